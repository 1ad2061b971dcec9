"""How many tokens a second, beside other engines, a roofline and targets.

python -m minipaged.bench throughput --model qwen3-0.6b-random

- ``batch``: 256 sequences at once, prompts and outputs of 100 to 1,024 tokens: the workload of nano-vllm's benchmark.
- ``single``: one sequence, 127 tokens in and 146 out; the time of its prompt is shared among the tokens.
- ``start``: from the start of the process to its first token, with empty caches of compiled kernels.
- ``shared``: 64 requests with a common system prompt, the prefix cache on against off.
- ``no-hits``: ``batch`` with the prefix cache on against off; it finds nothing.

Engines run in processes of their own. The last two workloads compare minipaged with itself: both sides are loaded at
once, with pools that just hold all requests, and take turns; the ratio is that of the two runs of a turn.

On one H200 with the 0.6B shape, a start takes about 20 s, a run of ``batch`` 6 s, of ``single`` 0.2 s, and of
``shared`` 2 s (both sides). Each workload is run once more to warm up. So 3 runs of everything take about 2.5 minutes,
with the 8B shape 5; a run of ``batch`` with ``--engine transformers`` takes 4 minutes.
"""

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from minipaged.bench.gpu_timing import new_gpu_record
from minipaged.bench.random_model import model_at
from minipaged.bench.record import check_output, check_plot, progress, write_record
from minipaged.bench.throughput_engines import PACKAGES, check_engine, engine_version, model_for
from minipaged.bench.throughput_report import PEERS, draw, report, target_of
from minipaged.bench.throughput_worker import Event, Job, run_process
from minipaged.bench.throughput_workloads import (
    FULL,
    MAX_MODEL_LEN,
    PEER_WORKLOADS,
    QUICK,
    TITLES,
    UNITS,
    draw_requests,
    num_blocks_for,
)
from minipaged.errors import UserError
from minipaged.foundation.weights import resolve_model

SIDES: dict[str, dict[str, Any]] = {"off": {"prefix_cache": None}, "on": {"prefix_cache": "hash"}}
"""What the workloads on the prefix cache compare."""

CACHE_FOLDERS = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "VLLM_CACHE_ROOT")
"""Where engines keep what they compile, as environment variables."""

SHORT_WARM_UP = 8
"""Output tokens of a request while transformers warms up: a whole run takes minutes."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    add = parser.add_argument
    add("--model", default="qwen3-0.6b-random", help="a shape with random weights, a folder, a hub id, or random")
    add("--engine", nargs="+", metavar="NAME", default=["minipaged"], help=f"engines: {', '.join(PACKAGES)}")
    add("--workload", nargs="+", metavar="NAME", default=list(TITLES), help=f"workloads: {', '.join(TITLES)}")
    add("--repeats", type=int, help="runs of each workload, but for start, which runs once (default 3; quick 1)")
    add_shared_arguments(parser, "throughput")


def add_shared_arguments(parser: ArgumentParser, name: str) -> None:
    """Declare what all benches of whole engines take."""
    add = parser.add_argument
    add("--device", help="cpu or cuda; default: CUDA where there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the engine chooses")
    add("--quick", action="store_true", help="few and short requests: shows that it works, not how fast")
    add("--json", "--out", dest="out", type=Path, default=Path(f"{name}.json"), help="JSON to write")
    add("--plot", type=Path, help="plot to write, .svg or .png (default: .svg beside the JSON)")
    add("--commit", help="the commit of these files, where git cannot tell; wins over git's")


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write the JSON and the plot."""
    plot = options.plot or options.out.with_suffix(".svg")
    check_output(options.out)
    check_plot(plot)
    check_workloads(options.workload, options.engine)
    num_runs = choose_repeats(options, default=3)
    with model_at(options.model, MAX_MODEL_LEN) as model:
        resolve_model(model)  # fetches it, if need be, before the time of a start is taken
        for engine in options.engine:
            check_engine(engine, model)
        record = measure(options, model, num_runs)
    write_record(record, options.out)
    draw(record, plot)
    print(report(record))
    print(f"written: {options.out} and {plot}")


def check_workloads(workloads: list[str], engines: list[str]) -> None:
    """Refuse names that there are not, and workloads that none of the engines runs."""
    for name in workloads:
        if name not in TITLES:
            raise UserError(f"no workload is called {name!r}; there is {', '.join(TITLES)}")
    if "minipaged" not in engines and not set(workloads) & set(PEER_WORKLOADS):
        raise UserError(f"workload {workloads[0]} compares minipaged with itself, so it needs --engine minipaged")


def choose_repeats(options: Namespace, default: int) -> int:
    """Return how often a workload is run."""
    num_runs = (1 if options.quick else default) if options.repeats is None else options.repeats
    if num_runs < 1:
        raise UserError(f"--repeats must be at least 1, not {num_runs}")
    return num_runs


def measure(options: Namespace, model: str, num_runs: int) -> dict[str, Any]:
    """Run all processes one after the other and return the record."""
    settings = {name: getattr(options, name) for name in ("model", "engine", "workload", "quick", "device", "dtype")}
    record = new_gpu_record("throughput", options, settings | {"repeats": num_runs})
    record["engine_versions"] = {engine: engine_version(engine) for engine in options.engine}
    record["peers"] = [peer for peer in PEERS if peer["model"] == options.model]
    record["processes"], record["rows"] = [], []
    for engine in options.engine:
        with model_for(engine, model) as loadable:
            for job, is_cold in plan_jobs(options, engine, loadable, num_runs):
                progress(f"{engine}: {', '.join(job.workloads)}")
                events = run_job_process(job, is_cold)
                record["processes"].append({"job": {**vars(job), "model": options.model}, "events": events})
                record["rows"] += [row_of(job, workload, events, options) for workload in job.workloads]
    record["rows"].sort(key=lambda row: list(TITLES).index(row["workload"]))
    return record


def plan_jobs(options: Namespace, engine: str, model: str, num_runs: int) -> list[tuple[Job, bool]]:
    """Return the processes of one engine, and of each whether compiled kernels are hidden from it."""
    same = {"engine": engine, "model": model, "is_quick": options.quick}
    same |= {"device": options.device, "dtype": options.dtype}
    if engine == "transformers":
        same["warm_up_tokens"] = SHORT_WARM_UP
    jobs = []
    if "start" in options.workload:
        jobs.append((Job(**same, workloads=["start"]), True))
    plain = [name for name in ("batch", "single") if name in options.workload]
    if plain:
        jobs.append((Job(**same, workloads=plain, runs=num_runs), False))
    compared = [name for name in ("shared", "no-hits") if name in options.workload and engine == "minipaged"]
    if compared:
        sizes = QUICK if options.quick else FULL
        num_blocks = max(num_blocks_for(draw_requests(name, sizes, 0)) for name in compared)
        variants = {name: {**side, "num_blocks": num_blocks} for name, side in SIDES.items()}
        jobs.append((Job(**same, workloads=compared, runs=num_runs, variants=variants, is_alternating=True), False))
    return jobs


def run_job_process(job: Job, is_cold: bool) -> list[Event]:
    """Run a process, with empty folders in the place of its caches if they shall be cold."""
    with ExitStack() as stack:
        names = CACHE_FOLDERS if is_cold else ()
        folders = {name: stack.enter_context(tempfile.TemporaryDirectory()) for name in names}
        return run_process(job, folders)


def row_of(job: Job, workload: str, events: list[Event], options: Namespace) -> dict[str, Any]:
    """Return what the record says of one workload of one engine."""
    of_workload = [event for event in events if event.get("workload") == workload]
    measured = [event for event in of_workload if event["event"] == "sample" and event["run"] >= 0]
    memory = next(event for event in of_workload if event["event"] == "memory")
    samples = samples_of(workload, measured)
    return {
        "workload": workload,
        "engine": job.engine,
        "unit": UNITS[workload],
        "samples": samples,
        "median": statistics.median(samples),
        "num_requests": len(draw_requests(workload, QUICK if job.is_quick else FULL, 0)),
        "input_tokens": measured[0]["input_tokens"],
        "output_tokens": measured[0]["output_tokens"],
        "hit_tokens": sum(event["hit_tokens"] for event in measured),
        "memory_bytes": memory["memory_bytes"],
        "pool_bytes": memory["pool_bytes"],
        **target_of(workload, options.model, job.engine, options.quick, statistics.median(samples)),
    }


def samples_of(workload: str, measured: list[Event]) -> list[float]:
    """Return one number for each run, in the workload's unit.

    Example:
        >>> turn = [{"run": 0, "variant": name, "seconds": s} for name, s in (("off", 3.0), ("on", 2.0))]
        >>> samples_of("shared", turn), samples_of("no-hits", turn)
        ([1.5], [-33.333])
    """
    if workload == "start":
        return [event["at"] for event in measured]
    if workload == "single":
        return [round(1000 * event["seconds"] / event["output_tokens"], 4) for event in measured]
    if workload == "batch":
        return [round(event["output_tokens"] / event["seconds"], 2) for event in measured]
    seconds = {(event["run"], event["variant"]): event["seconds"] for event in measured}
    turns = [(seconds[run, "off"], seconds[run, "on"]) for run, variant in seconds if variant == "on"]
    if workload == "shared":
        return [round(off / on, 4) for off, on in turns]
    return [round(100 * (on / off - 1), 3) for off, on in turns]
