"""minipaged: a small LLM inference engine to learn KV-cache memory management from.

The package is a ladder. Each rung is a package of the same shape that adds one idea to the rung below:
`foundation` (no cache), `contiguous` (one dense reservation per sequence), `paged` (blocks and block tables),
`sharing` (copy-on-write), `batching` (continuous batching), `prefix` (prefix caching). `LLM` runs a model on any
rung. Names are loaded when they are first used, so that ``import minipaged`` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minipaged.errors import UserError as UserError
    from minipaged.foundation.sequence import Result as Result
    from minipaged.llm import LLM as LLM
    from minipaged.llm import use as use
    from minipaged.prefix.metrics import Metrics as Metrics
    from minipaged.prefix.params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "minipaged.llm",
    "Metrics": "minipaged.prefix.metrics",
    "Result": "minipaged.foundation.sequence",
    "SamplingParams": "minipaged.prefix.params",
    "UserError": "minipaged.errors",
    "use": "minipaged.llm",  # with it every part is known
}

__all__ = ["LLM", "Metrics", "Result", "SamplingParams", "UserError", "__version__", "use"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minipaged' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
