"""One whole decode step of a 0.6B model in one CUDA graph, and each kind of its work alone.

python -m minipaged.bench step

The shape is Qwen3-0.6B's with random weights. Context lengths are spread evenly around their mean, and blocks are
shuffled. The bound is the time in which a copy in the same process moves as many bytes as the step must read: all
weights once, and the keys and values of its sequences. The parts are replayed alone, on inputs of the same sizes;
their sum says whether they are the whole. Three more wholes lack one thing each, to see what that is worth.
"""

import random
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minipaged.bench.gpu_timing import (
    Call,
    Timer,
    Workbench,
    add_gpu_arguments,
    gpu_timer,
    gpu_workbench,
    kernel_times,
    new_gpu_record,
)
from minipaged.bench.kernel_case import copy_rate, measured, spread
from minipaged.bench.kernel_cases_attention import BLOCK_SIZE
from minipaged.bench.kernel_cases_memory import copy
from minipaged.bench.kernel_report import head
from minipaged.bench.record import check_output, check_plot, import_pyplot, steps, write_record
from minipaged.bench.step_model import QWEN3_06B, DecodeStep, Shape, StepModel
from minipaged.errors import UserError

TARGETS_MS = {1: 1.0, 64: 2.6, 256: 7.0}
"""Of the whole step, by batch size."""

MEAN_LENGTH = 825
SPREAD = 725
"""Contexts are between 100 and 1,550 tokens long: requests of very different ages decode side by side."""

COLOURS = {"attention": "#2f6f9f", "products": "#e0b04c", "small kernels": "#7d4f8a", "sampling": "#c8553d"}
"""Of the parts that make up the whole."""

OPTIONAL = "sampling with filters"
"""What stands after the parts: none of the whole, but in the place of one, where requests ask for it."""

WITHOUT = ("whole, without early starts", "whole, without the hint", "whole, rows in random order")
"""Wholes that lack one thing each."""


def spread_lengths(batch: int, mean: int, reach: int) -> list[int]:
    """Return lengths evenly spread over ``mean - reach`` to ``mean + reach``, in random order; their mean is exact.

    Example:
        >>> sorted(spread_lengths(3, mean=10, reach=4)), spread_lengths(1, mean=10, reach=4)
        ([6, 10, 14], [10])
    """
    steps = [2 * i / (batch - 1) - 1 if batch > 1 else 0.0 for i in range(batch)]  # from -1 to 1
    lengths = [mean + round(reach * step) for step in steps]
    random.Random(0).shuffle(lengths)
    return lengths


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    parser.add_argument("--batches", nargs="+", type=int, default=[*TARGETS_MS], metavar="N", help="batch sizes")
    parser.add_argument("--profile", action="store_true", help="also record the time of every kernel, outside a graph")
    add_gpu_arguments(parser, "step")


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write JSON, table and plot.

    Raises:
        UserError: Nothing can be measured here or written there, or a batch size is below 1.
    """
    plot = options.plot or options.out.with_suffix(".svg")
    check_output(options.out)
    check_plot(plot)
    if min(options.batches) < 1:
        raise UserError(f"a batch holds at least 1 sequence, not {min(options.batches)}")
    bench = gpu_workbench("step")
    timer = gpu_timer(options)
    settings = {
        "quick": options.quick,
        "num_samples": timer.num_samples,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "block_size": BLOCK_SIZE,
        "shape": asdict(QWEN3_06B),
    }
    record = new_gpu_record("step", options, settings)
    batches = {batch: spread_lengths(batch, MEAN_LENGTH, SPREAD) for batch in options.batches}
    record |= measure(bench, timer, QWEN3_06B, batches, kernel_times if options.profile else None)
    write_record(record, options.out)
    text = report(record)
    options.out.with_suffix(".txt").write_text(text + "\n")
    print(text)
    draw(record, plot)
    print(f"written: {options.out}, {options.out.with_suffix('.txt')} and {plot}")


def measure(
    bench: Workbench,
    timer: Timer,
    shape: Shape,
    batches: dict[int, list[int]],
    profiler: Callable[[Call], list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Measure the copy, then the step of each batch and its parts, and its kernels where a profiler is given."""
    with steps(2 + len(batches)) as begin:
        begin("copy")
        ceiling = copy(2**30 if bench.device.type == "cuda" else 2**10)
        copied = measured(ceiling, timer(ceiling.build(bench)))
        begin("making weights and caches")
        most = max(_num_blocks(lengths) for lengths in batches.values())
        model = StepModel(bench, shape, num_blocks=most)
        found = []
        for batch, lengths in batches.items():
            begin(f"batch {batch}")
            step = DecodeStep(model, sorted(lengths, reverse=True))  # as the engine puts its rows
            shuffled = DecodeStep(model, lengths)
            samples = timer(
                step.sides()
                | {
                    WITHOUT[0]: [step.without_early_starts],
                    WITHOUT[1]: [step.without_the_hint],
                    WITHOUT[2]: [shuffled.whole],
                }
            )
            entry = _measured(step, samples, copy_rate(copied), TARGETS_MS.get(batch))
            found.append(entry if profiler is None else entry | {"kernels": profiler(step.whole)})
    return {"copy": copied, "weight_bytes": model.weight_bytes, "batches": found}


def _num_blocks(lengths: Sequence[int]) -> int:
    return sum(-(-length // BLOCK_SIZE) for length in lengths)


def _measured(
    step: DecodeStep, samples: dict[str, list[float]], rate: float, target_ms: float | None
) -> dict[str, Any]:
    """Return what the record says of one batch. Parts whose bytes are few have no bound."""
    must_read = {"attention": step.kv_bytes, "products": step.model.weight_bytes}
    must_read["whole"] = sum(must_read.values())
    median_ms = {side: statistics.median(us) / 1000 for side, us in samples.items()}
    median_ms["sum of parts"] = sum(median_ms[part] for part in COLOURS)
    return {
        "batch": len(step.lengths),
        "lengths": step.lengths,
        "kv_bytes": step.kv_bytes,
        "bound_ms": {side: num_bytes / rate / 1000 for side, num_bytes in must_read.items()},
        "median_ms": median_ms,
        "target_ms": target_ms,
        "is_hit": None if target_ms is None else median_ms["whole"] <= target_ms,
        "us": samples,
    }


def report(record: dict[str, Any]) -> str:
    """Return the table: the whole step of each batch, its parts under it, and what they sum up to."""
    lines = [head(record), f"{record['settings']['num_samples']} samples of each", ""]
    lines.append(f"{'ms':<28}{'median':>9}{'p10':>9}{'p90':>9}{'bound':>9}  {'target':<8}met")
    for entry in record["batches"]:
        mean = statistics.mean(entry["lengths"])
        for side, samples in entry["us"].items():
            name = f"batch {entry['batch']}, mean {mean:.0f}" if side == "whole" else f"    {side}"
            low, high = (us / 1000 for us in spread(samples))
            bound = f"{entry['bound_ms'][side]:>9.3f}" if side in entry["bound_ms"] else f"{'':9}"
            ends = _verdict(entry) if side == "whole" else ""
            if side == OPTIONAL:
                lines.append(f"{'    sum of these parts':<28}{entry['median_ms']['sum of parts']:>9.3f}")
            lines.append(f"{name:<28}{entry['median_ms'][side]:>9.3f}{low:>9.3f}{high:>9.3f}{bound}{ends}".rstrip())
    return "\n".join(lines)


def _verdict(entry: dict[str, Any]) -> str:
    if entry["target_ms"] is None:
        return ""
    target = f"<= {entry['target_ms']:g}"
    return f"  {target:<8}{'yes' if entry['is_hit'] else 'NO'}"


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the parts of each batch on each other, with marks for the whole step, its target and its bound."""
    pyplot = import_pyplot()

    entries = record["batches"]
    figure, axis = pyplot.subplots(figsize=(7.2, 0.9 + 0.7 * len(entries)), layout="constrained")
    for place, entry in enumerate(entries):
        end = 0.0
        for part, colour in COLOURS.items():
            width = entry["median_ms"][part]
            axis.barh(place, width, left=end, color=colour, height=0.5, label=None if place else part)
            end += width
        marks = {
            "whole": entry["median_ms"]["whole"],
            "bound": entry["bound_ms"]["whole"],
            "target": entry["target_ms"],
        }
        for (name, value), style in zip(marks.items(), ("-", ":", "--"), strict=True):
            if value is not None:
                ends = (place - 0.4, place + 0.4)
                axis.plot((value, value), ends, style, color="black", label=None if place else name)
    axis.set_yticks(range(len(entries)), [f"batch {entry['batch']}" for entry in entries])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("ms of one decode step; parts replayed alone")
    axis.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(head(record), fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
