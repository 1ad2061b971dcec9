"""One process of the throughput bench: starts engines, runs workloads, and says on standard output what happens.

A fresh process for every engine, so that none finds another's memory, caches or threads. Each event is one line of
JSON behind a mark; whatever else an engine prints is passed on. The process that started this one notes when a line
arrives, so the time of a start needs no clock that both share.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minipaged.errors import UserError

MARK = "minipaged-bench "

Event = dict[str, Any]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Job:
    """What one process does.

    Args:
        engine: A name of `PACKAGES`.
        model: What the engine can load.
        workloads: Run one after the other by each engine.
        variants: Options of `LLM` by a name of their own; other engines have one, without options.
        is_alternating: All variants are loaded at once and take turns; else one follows the other.
        runs: Measured runs of each workload and variant.
        warm_up_tokens: Most output tokens of a request in the run that warms up; None runs the workload whole.
    """

    engine: str
    model: str
    workloads: list[str]
    variants: dict[str, dict[str, Any]] = field(default_factory=lambda: {"default": {}})
    is_alternating: bool = False
    runs: int = 1
    warm_up_tokens: int | None = None
    is_quick: bool = False
    device: str | None = None
    dtype: str | None = None


def run_process(job: Job, environment: Mapping[str, str] | None = None) -> list[Event]:
    """Do a job in a new process and return its events, each with ``at``: seconds since the process was started.

    Raises:
        UserError: The process has refused the job, or died.
    """
    command = [sys.executable, "-m", "minipaged.bench.throughput_worker", json.dumps(vars(job))]
    events: list[Event] = []
    start = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", env={**os.environ, **(environment or {})}
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                events.append({**json.loads(line.removeprefix(MARK)), "at": round(time.perf_counter() - start, 4)})
            else:
                print(line, end="", file=sys.stderr, flush=True)
    refusal = next((event["reason"] for event in events if event["event"] == "refused"), None)
    if refusal is not None:
        raise UserError(refusal)
    if process.returncode != 0:
        raise UserError(f"the process of engine {job.engine} ended with code {process.returncode}; see above")
    return events


def run_job(job: Job, emit: Emit) -> None:
    """Do a job in this process."""
    from minipaged.bench.throughput_engines import load_engine

    def load(variant: str) -> Any:
        engine = load_engine(job.engine, job.model, job.device, job.dtype, **job.variants[variant])
        emit({"event": "loaded", "variant": variant})
        return engine

    if job.is_alternating:
        _run_workloads(job, {variant: load(variant) for variant in job.variants}, emit)
        return
    for variant in job.variants:
        _run_workloads(job, {variant: load(variant)}, emit)
        _free_memory()


def _run_workloads(job: Job, engines: dict[str, Any], emit: Emit) -> None:
    from minipaged.bench.throughput_engines import memory_in_use
    from minipaged.bench.throughput_workloads import FULL, QUICK, draw_requests, shortened, wrapped
    from minipaged.machine import choose_device

    sizes = QUICK if job.is_quick else FULL
    for workload in job.workloads:
        has_warm_up = workload != "start"
        for run in range(-1 if has_warm_up else 0, job.runs):
            requests = draw_requests(workload, sizes, run)
            if run < 0:
                requests = shortened(requests, job.warm_up_tokens)
            # Each is first in every other run, so that a drift of the machine favours nobody.
            for variant in list(engines) if run % 2 == 0 else list(reversed(engines)):
                engine = engines[variant]
                sample = _measure(engine, wrapped(requests, engine.vocab_size))
                emit({"event": "sample", "workload": workload, "variant": variant, "run": run, **sample})
        pools = [engine.pool_bytes for engine in engines.values()]
        emit(
            {
                "event": "memory",
                "workload": workload,
                "variants": list(engines),
                "memory_bytes": memory_in_use(choose_device(job.device)),
                "pool_bytes": None if None in pools else sum(pools),
            }
        )


def _measure(engine: Any, requests: list[Any]) -> dict[str, Any]:
    """Return what is noted of one run."""
    from minipaged.bench.throughput_engines import sum_outputs, time_run

    hits_before = engine.hit_tokens()
    seconds = time_run(engine, requests)
    return {
        "seconds": seconds,
        "input_tokens": sum(len(each.prompt) for each in requests),
        "output_tokens": sum_outputs(requests),
        "hit_tokens": engine.hit_tokens() - hits_before,
    }


def _free_memory() -> None:
    """Give back what the last engine held, for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    """Do the job that the command line holds."""

    def emit(event: Event) -> None:
        print(MARK + json.dumps(event), flush=True)

    job = Job(**json.loads(sys.argv[1]))
    import torch  # noqa: F401  (most of what an import takes)

    emit({"event": "imported"})
    try:
        run_job(job, emit)
    except UserError as error:
        emit({"event": "refused", "reason": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
