"""Where the time of a steady decode step goes: kernel by kernel, and how long the GPU waits between them.

python -m minipaged.bench profile --model qwen3-0.6b-random

256 sequences decode side by side and nobody waits. First some steps are timed by the clock, then as many run under
``torch.profiler``. Busy is the union of all intervals in which a kernel or a copy ran, so what overlaps counts once.

The profiler slows the host down, and a GPU that waits for the host waits longer then. So there are two idle shares:
the one inside the trace, and the one **by the clock**, which takes the busy time of a step from the trace and the time
of a step from the clock. The second is what a user has.

On one H200 with the 0.6B shape it takes about 40 s: a start, the prompts, and 100 steps of 5 ms, twice.
"""

import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minipaged.bench.gpu_timing import new_gpu_record
from minipaged.bench.kernel_report import head
from minipaged.bench.random_model import model_at
from minipaged.bench.record import check_writable, progress, write_record
from minipaged.bench.throughput_engines import Minipaged, sampling_params
from minipaged.bench.throughput_workloads import FULL, MAX_MODEL_LEN, QUICK, draw_requests, wrapped
from minipaged.bench.workload import Request
from minipaged.errors import UserError
from minipaged.fast.steps import NAMES as STEPS

TARGETS = (5.0, 1.0)
"""Percent of the time that the GPU may idle, and what would be better still."""

NUM_STEPS, NUM_STEPS_QUICK = 100, 5
NUM_SETTLING_STEPS = 5
SPARE_TOKENS = 128
"""Of each answer, for the steps before those that are measured: some of them compute prompts too."""

NUM_LINES = 25
"""Of kernels in the table; the JSON has all."""

KINDS = {
    "attention": (
        "decode_rows",
        "decode_splits",
        "own_splits",
        "own_rows",
        "merge_states",
        "fold_splits",
        "prefix_splits",
        "prefill_rows",
        "attention",
    ),
    "products": ("gemm", "nvjet", "cutlass", "gemv", "splitkreduce", "skinny", "addmm", "matmul", "linear", "::mm"),
    "sampling": (
        "best_of_tile",
        "collect",
        "choose_kept",
        "find_cut",
        "find_bracket",
        "count_bins",
        "fold_kernel",
        "argmax",
    ),
    "norms, rotary, cache": ("rms_norm", "norm_rotate", "rotary", "write_slots", "silu"),
    "copies": ("memcpy", "memset", "copy", "swap_blocks", "expand_rows"),
}
"""What kernels are called, by what they do; the first that fits counts."""


@dataclass(frozen=True)
class Interval:
    """A kernel, or a copy, in microseconds of the trace."""

    name: str
    start: float
    end: float


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    add = parser.add_argument
    add("--model", default="qwen3-0.6b-random", help="a shape with random weights, a folder, a hub id, or random")
    add("--steps", type=int, help=f"steps to look at (default {NUM_STEPS})")
    add("--without", nargs="+", metavar="STEP", default=[], help=f"steps of fast/ to leave out: {', '.join(STEPS)}")
    add("--trace", type=Path, help="also write the trace here, for a browser's trace viewer (.json.gz)")
    add("--device", help="cpu or cuda; default: CUDA where there is one")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the engine chooses")
    add("--quick", action="store_true", help="few sequences and steps: shows that it works")
    add("--json", "--out", dest="out", type=Path, default=Path("profile.json"), help="JSON to write")
    add("--commit", help="the commit of these files, where git cannot tell; wins over git's")


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write the JSON."""
    check_writable(options.out)
    if options.trace is not None:
        if not options.trace.name.endswith((".json", ".json.gz")):
            raise UserError(f"a trace is JSON, so its name must end in .json or .json.gz, not {options.trace.name!r}")
        check_writable(options.trace)
    for step in options.without:
        if step not in STEPS:
            raise UserError(f"no step is called {step!r}; there is {', '.join(STEPS)}")
    num_steps = (NUM_STEPS_QUICK if options.quick else NUM_STEPS) if options.steps is None else options.steps
    if num_steps < 1:
        raise UserError(f"--steps must be at least 1, not {num_steps}")
    with model_at(options.model, MAX_MODEL_LEN) as model:
        record = measure(options, model, num_steps)
    write_record(record, options.out)
    print(report(record))
    print(f"written: {options.out}")


def measure(options: Namespace, model: str, num_steps: int) -> dict[str, Any]:
    """Bring the engine to steady decode, time steps, profile as many, and return the record."""
    settings = {name: getattr(options, name) for name in ("model", "quick", "device", "dtype", "without")}
    record = new_gpu_record("profile", options, settings | {"steps": num_steps})
    progress("loading")
    switches = dict.fromkeys(options.without, False)
    engine = Minipaged(model, device=options.device, dtype=options.dtype, **switches)
    requests = wrapped(draw_requests("batch", QUICK if options.quick else FULL, 0), engine.vocab_size)
    progress(f"{len(requests)} prompts")
    start_decoding(engine, requests, most_tokens=2 * num_steps + SPARE_TOKENS)
    step_ms = time_steps(engine, num_steps)
    progress(f"profiling {num_steps} steps")
    intervals = profile_steps(engine, num_steps, options.trace)
    is_cuda = engine.llm.device.type == "cuda"
    return record | summarize(intervals, step_ms, has_target=is_cuda and not options.quick) | {"batch": len(requests)}


def start_decoding(engine: Minipaged, requests: list[Request], most_tokens: int) -> None:
    """Queue all requests and run until each has its first token, and some steps more.

    Args:
        most_tokens: Of each answer: nobody may end while steps are measured.
    """
    waiting = set()
    for each in requests:
        params = sampling_params(Request(each.prompt, most_tokens))
        waiting.add(engine.llm.engine.add_request(each.prompt, params))
    while waiting:
        waiting -= {output.request_id for output in engine.llm.engine.step() if output.token_ids}
    for _ in range(NUM_SETTLING_STEPS):
        engine.llm.engine.step()


def time_steps(engine: Minipaged, num_steps: int) -> list[float]:
    """Return the milliseconds of each step by the clock; where steps overlap, their mean is what counts."""
    times = []
    _synchronize()
    before = time.perf_counter()
    for place in range(num_steps):
        engine.llm.engine.step()
        if place == num_steps - 1:
            _synchronize()
        now = time.perf_counter()
        times.append(round(1000 * (now - before), 5))
        before = now
    return times


def profile_steps(engine: Minipaged, num_steps: int, trace: Path | None) -> list[Interval]:
    """Return what the device did during some steps; on a CPU, the operations that no other operation called."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = engine.llm.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    _synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            engine.llm.engine.step()
        _synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    return [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type.name == ("CUDA" if is_cuda else "CPU")
        and not event.is_user_annotation
        and (is_cuda or event.cpu_parent is None)
    ]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def busy_us(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals.

    Example:
        >>> busy_us([Interval("a", 0, 4), Interval("b", 2, 5), Interval("c", 8, 9)])
        6.0
    """
    busy, reached = 0.0, float("-inf")
    for each in sorted(intervals, key=lambda interval: interval.start):
        busy += max(0.0, each.end - max(each.start, reached))
        reached = max(reached, each.end)
    return busy


def kind_of(name: str) -> str:
    """Return what a kernel does, as far as its name tells.

    Example:
        >>> kind_of("nvjet_tst_128x64"), kind_of("decode_rows_kernel"), kind_of("Memcpy DtoH")
        ('products', 'attention', 'copies')
    """
    low = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in low for word in words)), "other")


def summarize(intervals: list[Interval], step_ms: list[float], has_target: bool) -> dict[str, Any]:
    """Return the sums by kernel and by kind, and the idle shares in percent.

    Raises:
        UserError: The profiler saw nothing.
    """
    if not intervals:
        raise UserError("the profiler saw no kernel; CUPTI may be missing, or another profiler may hold it")
    num_steps = len(step_ms)
    busy = busy_us(intervals)
    span = max(each.end for each in intervals) - min(each.start for each in intervals)
    by_name: dict[str, list[float]] = defaultdict(list)
    for each in intervals:
        by_name[each.name].append(each.end - each.start)
    kernels = [
        {"name": name, "kind": kind_of(name), "calls_per_step": len(us) / num_steps, "us_per_step": sum(us) / num_steps}
        for name, us in by_name.items()
    ]
    kernels.sort(key=lambda kernel: -kernel["us_per_step"])
    kinds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kinds[kernel["kind"]] += kernel["us_per_step"]
    clock_us = 1000 * sum(step_ms) / num_steps
    idle = {"in_trace": 100 * (1 - busy / span), "by_clock": 100 * (1 - busy / num_steps / clock_us)}
    aims = dict(zip(("target", "stretch"), TARGETS if has_target else (None, None), strict=True))
    return {
        "step_ms": step_ms,
        "mean_step_us": clock_us,
        "busy_us_per_step": busy / num_steps,
        "traced_us_per_step": span / num_steps,
        "idle_percent": idle,
        **aims,
        "kinds_us_per_step": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels": kernels,
    }


def report(record: dict[str, Any]) -> str:
    """Return the tables: by kind, by kernel, and the idle share below."""
    settings, total = record["settings"], record["busy_us_per_step"]
    without = f", without {', '.join(settings['without'])}" if settings["without"] else ""
    lines = [
        head(record),
        f"{settings['model']}{without}: {settings['steps']} decode steps of {record['batch']} sequences",
        "",
        f"{'us of a step':<66}{'calls':>7}{'us':>10}{'%':>7}",
    ]
    lines += [f"{kind:<73}{us:>10.1f}{100 * us / total:>7.1f}" for kind, us in record["kinds_us_per_step"].items()]
    lines.append("")
    for kernel in record["kernels"][:NUM_LINES]:
        us = kernel["us_per_step"]
        lines.append(f"{kernel['name'][:64]:<66}{kernel['calls_per_step']:>7.1f}{us:>10.1f}{100 * us / total:>7.1f}")
    if len(record["kernels"]) > NUM_LINES:
        lines.append(f"and {len(record['kernels']) - NUM_LINES} more in the JSON")
    return "\n".join([*lines, "", *_conclusion(record)])


def _conclusion(record: dict[str, Any]) -> list[str]:
    idle = record["idle_percent"]
    lines = [
        f"a step takes {record['mean_step_us']:.0f} us by the clock, {record['traced_us_per_step']:.0f} us under the "
        f"profiler; the device is busy for {record['busy_us_per_step']:.0f} us of it",
        f"idle: {idle['by_clock']:.1f} % by the clock, {idle['in_trace']:.1f} % in the trace",
    ]
    if idle["by_clock"] < 0:
        lines.append("less than 0: under the profiler kernels take longer than they leave idle without it")
    if record["target"] is not None:
        words = ["met" if idle["by_clock"] <= record[name] else "MISSED" for name in ("target", "stretch")]
        lines.append(f"target {record['target']:g} %: {words[0]}; stretch {record['stretch']:g} %: {words[1]}")
    return lines
