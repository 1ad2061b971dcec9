"""The sequences of one request: what was asked for, and what has become of them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from minipaged.foundation.philox import child_seed
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams
from minipaged.foundation.sequence import Result, Sequence
from minipaged.sharing.beam import BeamSearch
from minipaged.sharing.params import SamplingParams


@dataclass
class Family:
    """The sequences of one request.

    Args:
        params: What the request asked for.
        seed: What its samples' seeds are made of.
        indices: The samples to make.
        search: The state of its beam search, None where it samples.
        results: The samples that have ended.
    """

    params: FoundationParams
    seed: int
    indices: list[int]
    search: BeamSearch | None = None
    results: list[Result] = field(default_factory=list)

    @classmethod
    def of(cls, seq: Sequence) -> "Family":
        """Return the family of a sequence that waits for its prefill."""
        params = seq.params
        indices = list(range(num_sequences(params)))
        if not isinstance(params, SamplingParams) or params.beam_width is None:
            return cls(params, seq.seed, indices)
        search = BeamSearch(
            params.beam_width, seq.max_output_tokens, seq.end_token_ids, params.length_penalty, params.early_stopping
        )
        return cls(params, seq.seed, indices, search)

    @property
    def holds_back(self) -> bool:
        """Return whether samples wait until all have ended, since nobody knows before which will be returned."""
        return self.search is None and num_sequences(self.params) > num_returned(self.params)

    def samples_of(self, aborted: list[Result]) -> list[Result]:
        """Return what was aborted, sample by sample: before the fork, one sequence stands for all of them."""
        if len(aborted) != 1 or aborted[0].token_ids:
            return aborted
        return [replace(aborted[0], index=index, seed=child_seed(self.seed, index)) for index in self.indices]

    def best(self, aborted: Iterable[Result] = ()) -> list[Result]:
        """Return the n samples with the best mean log-probability, best first, counted anew from 0.

        ``aborted`` are samples that were stopped before they ended; they are ranked by what they have.
        """
        assert isinstance(self.params, SamplingParams)
        scored = [replace(result, score=_mean_logprob(result)) for result in (*self.results, *aborted)]
        scored.sort(key=lambda result: (-(result.score or 0.0), result.index))
        kept = scored[: self.params.n]
        if self.params.logprobs is None:  # they were asked for only to rank by them
            kept = [replace(result, logprobs=None) for result in kept]
        return [replace(result, index=index) for index, result in enumerate(kept)]


def num_sequences(params: FoundationParams) -> int:
    """Return how many sequences a request runs at once; rung 0's parameters ask for one."""
    return params.num_sequences if isinstance(params, SamplingParams) else 1


def num_returned(params: FoundationParams) -> int:
    """Return how many of a request's sequences are returned."""
    return params.n if isinstance(params, SamplingParams) else 1


def _mean_logprob(result: Result) -> float:
    logprobs = result.logprobs or []
    return sum(each.logprob for each in logprobs) / len(logprobs) if logprobs else -math.inf
