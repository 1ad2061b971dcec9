"""What one measurement of ``bench kernels`` is, and how its samples become the number that has a target."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minipaged.bench.gpu_timing import Sides, Workbench

HIGHER_IS_BETTER = {
    "TB/s": True,
    "GB/s": True,
    "TFLOP/s": True,
    "% of copy": True,
    "% of read": True,
    "x": True,
    "us": False,
    "% over": False,
    "% rise": False,
}
"""Every unit that a score may have. ``% over`` and ``x`` compare with another side of the same case, ``% of copy`` and
``% of read`` with the ceilings of memory, and ``% rise`` the sides with each other: one for each batch size."""

COPY = "copy"
"""The row of the cases that are the ceilings of all that is bound by memory: ``copy`` and ``read``."""


@dataclass(frozen=True)
class Score:
    """A number that a case yields.

    Args:
        unit: One of `HIGHER_IS_BETTER`.
        target: What must be reached; None where nobody has set one.
        against: The side that ours is compared with, where the unit compares.
    """

    unit: str
    target: float | None = None
    against: str | None = None


@dataclass(frozen=True)
class Case:
    """One measurement: an operation at one size, and what it is compared with.

    Args:
        row: The family that it belongs to, which ``--rows`` chooses.
        name: What the table calls it.
        build: Makes the inputs and returns the calls. The first side is ours.
        scores: What is made of the samples.
        num_bytes: How many a call must move, whoever does it; of a sweep over batch sizes, for one sequence.
        num_flop: How many operations a call must do.
    """

    row: str
    name: str
    build: Callable[[Workbench], Sides]
    scores: tuple[Score, ...]
    num_bytes: int = 0
    num_flop: int = 0


def measured(case: Case, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return what the record says of a case."""
    return {
        "row": case.row,
        "name": case.name,
        "bytes": case.num_bytes,
        "flop": case.num_flop,
        "scores": [vars(score) for score in case.scores],
        "median_us": {side: statistics.median(values) for side, values in samples.items()},
        "us": samples,
    }


def failed(case: Case, error: Exception) -> dict[str, Any]:
    """Return what the record says of a case that could not be measured."""
    return {"row": case.row, "name": case.name, "error": f"{type(error).__name__}: {error}"}


def spread(samples: list[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile.

    Example:
        >>> spread([float(i) for i in range(1, 12)])
        (2.0, 10.0)
    """
    if len(samples) == 1:
        return samples[0], samples[0]
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def copy_rate(entry: dict[str, Any]) -> float:
    """Return how many bytes a microsecond the faster side of the copy moves, read and written ones together."""
    return entry["bytes"] / min(entry["median_us"].values())


def ceilings(cases: list[dict[str, Any]]) -> dict[str, float]:
    """Return bytes a microsecond by the unit that is measured against them, of what has moved most in this process.

    Reading alone may be faster than reading and writing. Where the plain read is not, it was the wrong yardstick.
    """
    rates = {case["name"]: copy_rate(case) for case in cases if case["row"] == COPY}
    return {"% of copy": rates["copy"], "% of read": max(rates.values())}


def value_of(score: dict[str, Any], entry: dict[str, Any], rates: dict[str, float], side: str | None = None) -> float:
    """Return a score's number.

    Args:
        score: As in the record.
        entry: The case, as in the record.
        rates: As `ceilings` returns them.
        side: Whose time counts; None is ours.

    Example:
        >>> entry = {"bytes": 8_000_000, "flop": 0, "median_us": {"ours": 2.0, "peer": 3.0}}
        >>> rates = {"% of copy": 5e6, "% of read": 8e6}
        >>> [value_of({"unit": unit, "against": "peer"}, entry, rates) for unit in ("TB/s", "% of copy", "x")]
        [4.0, 80.0, 1.5]
        >>> value_of({"unit": "TB/s"}, entry, rates, "peer") < 2.7
        True
    """
    times = entry["median_us"]
    us = times[next(iter(times)) if side is None else side]
    match score["unit"]:
        case "us":
            return us
        case "TB/s":
            return entry["bytes"] / us / 1e6
        case "GB/s":
            return entry["bytes"] / us / 1e3
        case "TFLOP/s":
            return entry["flop"] / us / 1e6
        case "% of copy" | "% of read":
            return 100 * entry["bytes"] / us / rates[score["unit"]]
        case "x":
            return times[score["against"]] / us
        case "% over":
            return 100 * (us / times[score["against"]] - 1)
        case "% rise":
            return largest_rise(times)[0]
    raise AssertionError(f"no score has the unit {score['unit']!r}")


def largest_rise(times: dict[str, float]) -> tuple[float, str, str]:
    """Return by how many percent the time per sequence rises most from one batch size to the next, and which two.

    Example:
        >>> largest_rise({"1": 8.0, "2": 8.0, "3": 15.0, "4": 20.0})
        (25.0, '2', '3')
    """
    sizes = pairwise(times)
    rises = [(100 * (times[b] * int(a) / (times[a] * int(b)) - 1), a, b) for a, b in sizes]
    return max(rises, key=lambda rise: rise[0])


def is_hit(unit: str, value: float, target: float | None) -> bool | None:
    """Return whether the target is reached; None where there is none."""
    if target is None:
        return None
    return value >= target if HIGHER_IS_BETTER[unit] else value <= target


def results(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every score of every case with its number.

    Args:
        cases: As in the record, those of `COPY` among them.
    """
    rates = ceilings(cases)
    return [
        _result(case, score, value_of(score, case, rates))
        for case in cases
        if "error" not in case
        for score in case["scores"]
    ]


def _result(case: dict[str, Any], score: dict[str, Any], value: float) -> dict[str, Any]:
    result = {"row": case["row"], "name": case["name"], **score, "value": value}
    if score["unit"] == "% rise":
        result["against"] = "{1} to {2}".format(*largest_rise(case["median_us"]))
    return result | {"is_hit": is_hit(score["unit"], value, score["target"])}
