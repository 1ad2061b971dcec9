"""How long one step of the scheduler takes, without a model, and what that depends on.

python -m minipaged.bench scheduler
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path

from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import NextToken
from minipaged.batching.scheduler import Scheduler
from minipaged.bench.record import new_record, progress, write_record
from minipaged.errors import UserError

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 100
CASES = {
    "64 running": (64, 0, 20_000),
    "128 running": (128, 0, 20_000),
    "256 running": (256, 0, 20_000),
    "512 running": (512, 0, 20_000),
    "256 running, 100,000 waiting": (256, 100_000, 20_000),
    "256 running, pool of 1,000,000": (256, 0, 1_000_000),
}
"""Sequences that run, requests that wait behind them, and blocks of the pool."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/scheduler.json"), help="where to write")
    parser.add_argument("--steps", type=int, default=200, help="steps of each case (default: 200)")


def run(options: argparse.Namespace) -> None:
    """Time every case and print a table of medians."""
    if options.steps < 1:
        raise UserError(f"--steps must be at least 1, not {options.steps}")
    settings = {"block_size": BLOCK_SIZE, "num_prompt_tokens": NUM_PROMPT_TOKENS, "steps": options.steps}
    record = new_record("scheduler", settings)
    record["seconds"] = {}
    for name, case in CASES.items():
        progress(name)
        record["seconds"][name] = time_steps(make_scheduler(*case), options.steps)
    print(report(record["seconds"]))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(record, options.out)


def make_scheduler(num_running: int, num_waiting: int, num_blocks: int) -> Scheduler:
    """Return a scheduler in which that many sequences decode and that many requests wait for a seat."""
    cache = BatchingCache(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(cache, num_running, max_num_batched_tokens=num_running * NUM_PROMPT_TOKENS)
    for request_id in range(num_running + num_waiting):
        scheduler.add(request_id, request_id, [1] * NUM_PROMPT_TOKENS, max_output_tokens=10**6)
    take_step(scheduler)
    assert len(scheduler.running) == num_running and scheduler.num_waiting == num_waiting
    return scheduler


def take_step(scheduler: Scheduler) -> float:
    """Make one step in which every sampled sequence goes on, and return the seconds that the scheduler took."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    middle = time.perf_counter()
    tokens = [NextToken(chunk.member.seq_id, 1) for chunk in plan.chunks if chunk.is_sampled]
    resumed = time.perf_counter()
    scheduler.update(plan, tokens)
    return time.perf_counter() - resumed + middle - start


def time_steps(scheduler: Scheduler, num_steps: int) -> list[float]:
    """Return the seconds of each of some decode steps. Every 16th step all sequences need a new block."""
    return [take_step(scheduler) for _ in itertools.repeat(None, num_steps)]


def report(seconds: dict[str, list[float]]) -> str:
    """Return medians as a table.

    Example:
        >>> print(report({"2 running": [0.001, 0.002, 0.0015]}))
        one step of the scheduler                 ms    us a sequence
        2 running                              1.500          750.000
    """
    lines = [f"{'one step of the scheduler':<34}{'ms':>10}{'us a sequence':>17}"]
    for name, samples in seconds.items():
        median = statistics.median(samples)
        lines.append(f"{name:<34}{median * 1e3:>10.3f}{median * 1e6 / int(name.split()[0]):>17.3f}")
    return "\n".join(lines)
