"""The table and the plot of ``bench kernels``, from its record alone."""

import statistics
from pathlib import Path
from typing import Any

from minipaged.bench.gpu_timing import NUM_SAMPLES_QUICK
from minipaged.bench.kernel_case import HIGHER_IS_BETTER, ceilings, spread, value_of
from minipaged.bench.record import import_pyplot

HIT, MISS = "#2f6f9f", "#c8553d"


def head(record: dict[str, Any]) -> str:
    """Return a line on the GPU, or the processor where there is none, and the versions."""
    machine, versions = record["machine"], record["versions"]
    changed = {True: "", False: " with changes", None: ""}[record["is_clean"]]
    where = f"{machine['gpu']}, driver {machine['driver']}" if machine["gpu"] else machine["processor"]
    return (
        f"{where}, torch {versions['torch']}, triton {versions['triton']}; "
        f"commit {str(record['commit'])[:10]}{changed}, {record['date']}"
    )


def report(record: dict[str, Any]) -> str:
    """Return the table: a case's own time and scores, and under it the sides that it is compared with."""
    settings = record["settings"]
    num_samples = settings["num_samples"]
    lines = [head(record), f"{num_samples} samples of each side, at most {NUM_SAMPLES_QUICK} of each batch size"]
    lines += [f"sdpa takes {backend} for {case}" for case, backend in settings.get("sdpa_backends", {}).items()]
    times = "".join(f"{title:>9}" for title in ("us", "p10", "p90"))
    lines += ["", f"{'operation':<10}{'case':<35}{times}  {'measured':<16}{'peer':<18}{'target':<8}met"]
    rates = ceilings(record["cases"])
    for case in record["cases"]:
        found = [result for result in record["results"] if result["name"] == case["name"]]
        lines += _case_lines(case, found, rates)
    return "\n".join([*lines, "", *_conclusion(record)])


def _case_lines(case: dict[str, Any], found: list[dict[str, Any]], rates: dict[str, float]) -> list[str]:
    title = f"{case['row']:<10}{case['name']:<35}"
    if "error" in case:
        return [f"{title}  failed, see below"]
    if case["row"] == "batch":  # one side for each batch size is for the plot
        return [f"{title}{'':27}  {_score(found[0])}"]
    (_, ours), *others = case["us"].items()
    lines = [f"{title}{_times(ours)}  {_score(found[0])}"]
    lines += [f"{'':74}{_score(result)}" for result in found[1:]]
    for side, samples in others:
        rate = "" if found[0]["unit"] not in RATES else _amount(found[0], value_of(found[0], case, rates, side))
        lines.append(f"{'':12}{side:<33}{_times(samples)}  {rate}".rstrip())
    return lines


RATES = ("TB/s", "GB/s", "TFLOP/s", "% of copy", "% of read")
"""Units in which any side has a number, without another one to compare with."""


def _times(samples: list[float]) -> str:
    return "".join(f"{us:>9.2f}" for us in (statistics.median(samples), *spread(samples)))


def _score(result: dict[str, Any]) -> str:
    target, met = "", ""
    if result["target"] is not None:
        target = f"{'>=' if HIGHER_IS_BETTER[result['unit']] else '<='} {result['target']:g}"
        met = "yes" if result["is_hit"] else "NO"
    return f"{_amount(result, result['value']):<16}{_peer(result):<18}{target:<8}{met}".rstrip()


def _peer(result: dict[str, Any]) -> str:
    """Return what the number compares with: another side, two batch sizes, or a ceiling of memory."""
    return result["against"] or {"% of copy": "copy", "% of read": "read"}.get(result["unit"], "")


def _amount(result: dict[str, Any], value: float) -> str:
    digits = 2 if result["unit"] in ("TB/s", "us") else 1
    return f"{value:.{digits}f} {result['unit']}"


def _conclusion(record: dict[str, Any]) -> list[str]:
    with_target = [result for result in record["results"] if result["target"] is not None]
    missed = [result for result in with_target if not result["is_hit"]]
    lines = [f"{len(with_target) - len(missed)} of {len(with_target)} targets met"]
    lines += [
        f"missed: {result['name']}, {_amount(result, result['value'])} {result['against'] or ''}".rstrip()
        for result in missed
    ]
    return lines + [f"failed: {case['name']}: {case['error']}" for case in record["cases"] if "error" in case]


def share_of_target(result: dict[str, Any]) -> float:
    """Return the measured speed in percent of the speed that the target asks for: 100 or more is a hit.

    Example:
        >>> round(share_of_target({"unit": "us", "value": 10.0, "target": 9.0}), 1)
        90.0
        >>> share_of_target({"unit": "% over", "value": -15.0, "target": 2.0})  # 0.85 and 1.02 of the other's time
        120.0
    """
    value, target = result["value"], result["target"]
    if result["unit"] in ("% over", "% rise"):
        value, target = 100 + value, 100 + target
    return 100 * (value / target if HIGHER_IS_BETTER[result["unit"]] else target / value)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a bar for each target, and time per sequence over the batch size, as far as they were measured."""
    pyplot = import_pyplot()

    bars = [result for result in record["results"] if result["target"] is not None]
    sweeps = [case for case in record["cases"] if case["row"] == "batch" and "error" not in case]
    size = (10.0, max(3.2, 1.2 + 0.26 * len(bars)))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, layout="constrained", width_ratios=(5, 4))
    _draw_bars(left, bars)
    _draw_sweeps(right, sweeps)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(head(record), fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_bars(axis: Any, bars: list[dict[str, Any]]) -> None:
    shares = [share_of_target(result) for result in bars]
    colours = [HIT if result["is_hit"] else MISS for result in bars]
    axis.barh(range(len(bars)), shares, color=colours, height=0.7)
    for place, result in enumerate(bars):
        axis.annotate(
            f" {_amount(result, result['value'])}",
            (min(shares[place], 200), place),
            va="center",
            fontsize=6,
            annotation_clip=False,
        )
    axis.axvline(100, color="black", linewidth=0.8)
    axis.set_xlim(0, 200)  # far beyond its target, a bar need not be read
    axis.set_yticks(range(len(bars)), [result["name"] for result in bars], fontsize=7)
    axis.invert_yaxis()  # the table's order, from above
    axis.set_xlabel("speed in % of the target's")


def _draw_sweeps(axis: Any, sweeps: list[dict[str, Any]]) -> None:
    for case in sweeps:
        sizes = [int(side) for side in case["median_us"]]
        times = [1e6 * us / (case["bytes"] * size) for size, us in zip(sizes, case["median_us"].values(), strict=True)]
        axis.plot(sizes, times, linewidth=1, label=f"{case['name'].split(' x ')[1]} tokens")
    if sweeps:
        axis.set_xscale("log", base=2)
        axis.legend(frameon=False, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sequences in the batch")
    axis.set_ylabel("ps per byte of keys and values")
