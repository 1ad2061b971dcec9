"""What a finished sample says about the cache."""

from dataclasses import dataclass

from minipaged.foundation.sequence import Metrics as FoundationMetrics


@dataclass(frozen=True)
class Metrics(FoundationMetrics):
    """Rung 0's times, and what the request had of the cache.

    ``num_hit_tokens`` tokens of the prompt were found there when it entered, and ``num_evictions`` cached blocks were
    given up for it. Both are the request's, the same for all its samples. (The engine's own ``hit_tokens`` also counts
    what a request finds of itself when it comes back.)
    """

    num_hit_tokens: int = 0
    num_evictions: int = 0
