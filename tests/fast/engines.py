"""Engines above the rungs, checked as those of the rungs are, and which of their steps there are to combine."""

from pathlib import Path
from typing import Any

from minipaged.fast.engine import FastEngine
from minipaged.fast.steps import NAMES
from tests.batching.engines import Watched, watched

COMBINATIONS = {
    "none": (),
    "fused": ("fused",),
    "graphs": ("graphs",),
    "device_batch": ("device_batch",),
    "overlap": ("device_batch", "overlap"),  # which it needs
    "+graphs": ("fused", "graphs"),
    "+device_batch": ("fused", "graphs", "device_batch"),
    "all": NAMES,
    "all but fused": ("graphs", "device_batch", "overlap"),
    "all but graphs": ("fused", "device_batch", "overlap"),
}
"""Each step alone, each with all before it, and all but one. Without ``device_batch`` there is no overlap."""

MAIN = ("graphs", "overlap", "+device_batch", "all")
"""Those that differ in how they plan, choose and tell."""


def fast_engine(folder: Path, steps: str = "all", **options: Any) -> Watched:
    """Return a checked engine on the highest rung, with some steps."""
    taken = {name: name in COMBINATIONS[steps] for name in NAMES}
    w = watched(folder, **({"rung": "prefix"} | taken | options))
    assert isinstance(w.engine, FastEngine) == any(taken.values())
    return w


def check_steps(w: Watched, steps: str) -> None:
    """Check that an engine has done what its steps are for."""
    stats, taken = w.engine.stats(), COMBINATIONS[steps]
    assert (stats.get("fixed_size_steps", 0) > 0) == bool({"graphs", "device_batch"} & set(taken))
    assert (stats.get("late_steps", 0) > 0) == ("overlap" in taken)
    check_seats(w)


def check_seats(w: Watched) -> None:
    """Check that every seat is either free or one sequence's."""
    if batch := getattr(w.engine, "batch", None):
        rows = [*batch._free, *(seat.row for seat in batch.seats.values())]
        assert sorted(rows) == list(range(batch.nobody))


class Close(float):
    """A number that equals those near it."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3


def told(result: Any) -> tuple[Any, ...]:
    """Return all that a user is told of a result but its times."""
    logprobs = result.logprobs and [
        (each.token_id, Close(each.logprob), [(token_id, Close(value)) for token_id, value in each.top])
        for each in result.logprobs
    ]
    score = None if result.score is None else Close(result.score)
    return result.token_ids, result.text, result.finish_reason, result.index, result.seed, logprobs, score
