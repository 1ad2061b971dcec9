"""What each step of ``fast`` is worth: the workload ``batch`` of bench throughput, with one more step each time.

python -m minipaged.bench fast --model qwen3-0.6b-random

The steps are switched on lowest first, each on top of those before. All run in one process, one after the other, with
pools that just hold all requests.

On one H200 with the 0.6B shape, two runs of everything take about 3 minutes: without any step a run takes about 25 s,
with all of them 6 s.
"""

import statistics
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from minipaged.bench.gpu_timing import new_gpu_record
from minipaged.bench.kernel_report import head
from minipaged.bench.random_model import model_at
from minipaged.bench.record import check_output, check_plot, import_pyplot, progress, write_record
from minipaged.bench.throughput import add_shared_arguments, choose_repeats, samples_of
from minipaged.bench.throughput_worker import Event, Job, run_process
from minipaged.bench.throughput_workloads import FULL, MAX_MODEL_LEN, QUICK, draw_requests, num_blocks_for
from minipaged.fast.steps import NAMES as STEPS

WARM_UP_TOKENS = 64
"""Output tokens of a request in the run that warms up: enough for every kernel, and a fraction of a run."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    add = parser.add_argument
    add("--model", default="qwen3-0.6b-random", help="a shape with random weights, a folder, a hub id, or random")
    add("--repeats", type=int, help="runs of each row (default 2; quick 1)")
    add_shared_arguments(parser, "fast")


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write the JSON and the plot."""
    plot = options.plot or options.out.with_suffix(".svg")
    check_output(options.out)
    check_plot(plot)
    num_runs = choose_repeats(options, default=2)
    with model_at(options.model, MAX_MODEL_LEN) as model:
        record = measure(options, model, num_runs)
    write_record(record, options.out)
    draw(record, plot)
    print(report(record))
    print(f"written: {options.out} and {plot}")


def make_variants(num_blocks: int) -> dict[str, dict[str, Any]]:
    """Return the options of each row.

    Example:
        >>> [name for name in make_variants(8)]
        ['none', '+ fused', '+ graphs', '+ device_batch', '+ overlap']
        >>> make_variants(8)["+ graphs"]
        {'num_blocks': 8, 'fused': True, 'graphs': True, 'device_batch': False, 'overlap': False}
    """
    variants = {}
    for num_steps, name in enumerate(("none", *(f"+ {step}" for step in STEPS))):
        switches = {step: place < num_steps for place, step in enumerate(STEPS)}
        variants[name] = {"num_blocks": num_blocks, **switches}
    return variants


def measure(options: Namespace, model: str, num_runs: int) -> dict[str, Any]:
    """Run all rows and return the record."""
    settings = {name: getattr(options, name) for name in ("model", "quick", "device", "dtype")}
    record = new_gpu_record("fast", options, settings | {"repeats": num_runs})
    variants = make_variants(num_blocks_for(draw_requests("batch", QUICK if options.quick else FULL, 0)))
    job = Job(
        engine="minipaged",
        model=model,
        workloads=["batch"],
        variants=variants,
        runs=num_runs,
        warm_up_tokens=WARM_UP_TOKENS,
        is_quick=options.quick,
        device=options.device,
        dtype=options.dtype,
    )
    progress(f"{', '.join(variants)}; runs of each: {num_runs}")
    events = run_process(job)
    record["process"] = {"job": {**vars(job), "model": options.model}, "events": events}
    record["rows"] = [row_of(name, events) for name in variants]
    return record


def row_of(name: str, events: list[Event]) -> dict[str, Any]:
    """Return what the record says of one row."""
    measured = [
        event for event in events if event["event"] == "sample" and event["variant"] == name and event["run"] >= 0
    ]
    memory = next(event for event in events if event["event"] == "memory" and event["variants"] == [name])
    samples = samples_of("batch", measured)
    return {
        "steps": name,
        "samples": samples,
        "median": statistics.median(samples),
        "seconds": [event["seconds"] for event in measured],
        "memory_bytes": memory["memory_bytes"],
        "pool_bytes": memory["pool_bytes"],
    }


def report(record: dict[str, Any]) -> str:
    """Return the table."""
    settings, rows = record["settings"], record["rows"]
    lines = [
        head(record),
        f"{settings['model']}; output tokens/s, runs of each: {settings['repeats']}, medians; each row adds a step",
        "",
        f"{'steps':<18}{'tokens/s':>10}{'of all runs':>20}{'x before':>10}{'x none':>9}{'GiB':>7}",
    ]
    before = first = rows[0]["median"]
    for row in rows:
        spread = f"{min(row['samples']):,.0f} to {max(row['samples']):,.0f}"
        gib = "-" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f}"
        lines.append(
            f"{row['steps']:<18}{row['median']:>10,.0f}{spread:>20}{row['median'] / before:>10.2f}"
            f"{row['median'] / first:>9.2f}{gib:>7}"
        )
        before = row["median"]
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a bar for each row, and each run as a dot."""
    pyplot = import_pyplot()

    rows = record["rows"]
    figure, axis = pyplot.subplots(figsize=(6.4, 2.8), layout="constrained")
    axis.barh(range(len(rows)), [row["median"] for row in rows], color="#2f6f9f", height=0.7)
    for place, row in enumerate(rows):
        axis.plot(row["samples"], [place] * len(row["samples"]), "o", color="black", markersize=3)
    axis.set_yticks(range(len(rows)), [row["steps"] for row in rows])
    axis.invert_yaxis()  # the table's order, from above
    axis.set_xlabel("output tokens per second")
    axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['settings']['model']}; {head(record)}", fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
