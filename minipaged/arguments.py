"""The arguments of `LLM` and its methods: which forms they may have, and what is refused before anything runs."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from minipaged.batching.generate import CACHES
from minipaged.batching.limits import MAX_NUM_BATCHED_TOKENS, check_limits
from minipaged.batching.preemption import Preemption
from minipaged.contiguous.arena import RESERVATIONS
from minipaged.errors import UserError
from minipaged.foundation.config import ModelConfig
from minipaged.prefix.eviction import make_policy
from minipaged.prefix.generate import PREFIX_CACHES
from minipaged.prefix.params import SamplingParams

Prompt = str | Sequence[int]

MAX_SLOTS = 2**50
"""More slots than any machine has memory for; beyond, numbers no longer fit where they must."""


def check_limit(max_model_len: int | None, config: ModelConfig) -> int:
    """Return the limit of the engine, the model's own for None; refuse a higher one."""
    if max_model_len is None:
        return config.max_model_len
    if type(max_model_len) is not int or not 2 <= max_model_len <= config.max_model_len:
        raise UserError(
            f"max_model_len must be 2 to {config.max_model_len}, the model's own limit, not {max_model_len}"
        )
    return max_model_len


OPTIONS: dict[str, tuple[str, Any]] = {
    "cache": ("batching", None),
    "max_num_seqs": ("batching", None),
    "max_num_batched_tokens": ("batching", None),
    "preemption": ("batching", None),
    "prefix_cache": ("prefix", "hash"),
    "eviction_policy": ("prefix", None),
}
"""The options that not every rung with a cache has: the rung that added each, and the default."""


def check_engine_options(rung: str, rungs: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set away from their default; refuse what the rung does not know or nobody does."""
    given = {name: value for name, value in options.items() if value != OPTIONS[name][1]}
    if rungs.index(rung) < rungs.index("prefix") and given.get("prefix_cache", "none") is None:
        del given["prefix_cache"]  # that is what the rung has
    for name, value in given.items():
        owner = OPTIONS[name][0]
        if rungs.index(owner) > rungs.index(rung):
            raise UserError(f"rung {rung!r} does not know {name} ({value!r} was given); rung {owner!r} has it")
    if given.get("cache", "paged") not in CACHES:
        raise UserError(f"cache must be one of {', '.join(CACHES)}, not {given['cache']!r}")
    if given.get("prefix_cache") not in (None, *PREFIX_CACHES):
        raise UserError(f"prefix_cache must be {', '.join(PREFIX_CACHES)} or None, not {given['prefix_cache']!r}")
    if given.get("cache") == "contiguous" and given.get("prefix_cache") is not None:
        raise UserError("the contiguous cache cannot share, so it has no prefix_cache; cache 'paged' has it")
    if "preemption" in given:
        Preemption(given["preemption"])  # the one place that knows the policies
    if "eviction_policy" in given:
        make_policy(given["eviction_policy"])
    if rungs.index(rung) >= rungs.index("batching"):
        check_limits(given.get("max_num_seqs"), given.get("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS))
    return given


def check_cache_options(
    rung: str, block_size: int, num_blocks: int | None, reservation: str | None, cache: str | None = None
) -> None:
    """Refuse options of the cache that are out of range or that the rung does not have."""
    if type(block_size) is not int or block_size < 1:
        raise UserError(f"block_size must be a whole number from 1, not {block_size!r}")
    if num_blocks is not None and (type(num_blocks) is not int or num_blocks < 1):
        raise UserError(f"num_blocks must be a whole number from 1, not {num_blocks!r}")
    if block_size * (num_blocks or 1) > MAX_SLOTS:
        raise UserError(
            f"block_size x num_blocks may be at most {MAX_SLOTS} slots, not {block_size * (num_blocks or 1)}"
        )
    if reservation is not None and rung != "contiguous" and cache != "contiguous":
        raise UserError(
            f"rung {rung!r} reserves nothing, so no reservation; rung 'contiguous' has it, and those from 'batching' "
            "up with cache='contiguous'"
        )
    if reservation not in (None, *RESERVATIONS):
        raise UserError(f"reservation must be one of {', '.join(RESERVATIONS)}, not {reservation!r}")
    if rung == "foundation":
        for name, is_set in (("num_blocks", num_blocks is not None), ("block_size", block_size != 16)):
            if is_set:
                raise UserError(f"rung 'foundation' has no cache, so no {name}; rung 'contiguous' has it")


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or many prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise UserError(f"prompts must be a string, a list of token ids, or a list of such, not {_shown(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    for item in prompts:
        check_prompt_type(item)
    return list(prompts)  # type: ignore[arg-type]


def check_prompt_type(prompt: object) -> None:
    """Refuse what is neither text nor a list of token ids."""
    if not isinstance(prompt, str | list | tuple):
        raise UserError(f"a prompt is a string or a list of token ids, not {_shown(prompt)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def owned_params(params: SamplingParams) -> Iterator[tuple[str, Any, str]]:
    """Yield the parameters that are set away from their default, with the rung that added each."""
    for each in fields(params):
        if getattr(params, each.name) != each.default:
            home = next(
                base for base in reversed(type(params).__mro__) if each.name in getattr(base, "__annotations__", {})
            )
            yield each.name, getattr(params, each.name), home.__module__.split(".")[1]


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return parameters for each of ``count`` prompts, from none, from one for all, or from one each."""
    each = [params or SamplingParams()] * count if params is None or isinstance(params, SamplingParams) else params
    if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
        raise UserError(f"sampling_params must be SamplingParams or a list of them, not {params!r}")
    if len(each) != count:
        raise UserError(f"{len(each)} sampling parameters were given for {count} prompts; give one for all or one each")
    return list(each)
