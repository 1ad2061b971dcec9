"""Engines of this rung, checked as those of rung 4, and what their requests have had of the cache."""

from pathlib import Path
from typing import Any

import torch

from tests.batching.engines import Watched, watched

KINDS = ("hash", "radix")
EDGES = (15, 16, 17, 31, 32, 33)
"""Prompts that end at the edge of a block of 16, and one token to each side."""


def prefix_engine(folder: Path, **options: Any) -> Watched:
    """Return a checked engine on this rung."""
    return watched(folder, **({"rung": "prefix"} | options))


def random_prompts(*lengths: int, seed: int = 11) -> list[list[int]]:
    """Return prompts that have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def expected_hits(kind: str, num_cached: int, num_prompt_tokens: int, block_size: int) -> int:
    """Return how many first tokens of a prompt are found when so many of them are cached."""
    most = min(num_cached, num_prompt_tokens - 1)
    return most if kind == "radix" else most // block_size * block_size


def hits_of(results: list[Any]) -> list[int]:
    """Return how many tokens of each result's prompt were found in the cache."""
    return [result.metrics.num_hit_tokens for result in results]


def num_prefilled(w: Watched) -> int:
    """Return how many tokens of prompts have been through the model."""
    return sum(event.num_tokens for event in w.events if event.act == "chunk")


def first_logits(w: Watched) -> list[torch.Tensor]:
    """Return a list that fills with the logits of each request's first token."""
    rows: list[torch.Tensor] = []
    choose = w.engine.choose

    def spy(batch: list[Any], logits: torch.Tensor) -> Any:
        rows.extend(row.clone() for seq, row in zip(batch, logits, strict=True) if not seq.output_token_ids)
        return choose(batch, logits)

    w.engine.choose = spy
    return rows


def forget_idle_blocks(w: Watched) -> None:
    """Give up every cached block that nobody uses."""
    cache = w.engine.cache
    while block_ids := list(cache.policy._blocks):
        for block_id in cache.index.forget(block_ids[0]):
            cache.pool.unmark_cached(block_id)
    w.check()
