"""How long the bookkeeping of the caches takes, without a model, and whether it depends on the size of the pool.

python -m minipaged.bench bookkeeping
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minipaged.bench.record import new_record, progress, write_record
from minipaged.contiguous.arena import Arena
from minipaged.paged.cache import PagedCache
from minipaged.sharing.cache import SharingCache

NUM_SEQUENCES = 256
NUM_TOKENS = 1000
NUM_PROMPT_TOKENS = 100
BLOCK_SIZE = 16
POOL_SIZES = (20_000, 200_000, 2_000_000)
"""Blocks. The smallest holds the sequences with little to spare."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/bookkeeping.json"), help="where to write")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case (default: 5)")


def run(options: argparse.Namespace) -> None:
    """Time every cache at every pool size and print a table of medians."""
    settings = {
        "num_sequences": NUM_SEQUENCES,
        "num_tokens": NUM_TOKENS,
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "block_size": BLOCK_SIZE,
    }
    record = new_record("bookkeeping", settings)
    record["seconds"] = measure(options.repeats, POOL_SIZES)
    print(report(record["seconds"]))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(record, options.out)


def measure(repeats: int, pool_sizes: tuple[int, ...]) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each run, by cache and number of blocks; making the pool is not counted."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for num_blocks in pool_sizes:
        for name, make in CACHES.items():
            progress(f"{name}, {num_blocks:,} blocks")
            cache = make(num_blocks)
            samples = [time_once(cache, name) for _ in range(repeats)]
            seconds.setdefault(name, {})[str(num_blocks)] = samples
    return seconds


CACHES: dict[str, Callable[[int], Any]] = {
    "contiguous": lambda num_blocks: Arena(num_blocks * BLOCK_SIZE, max_model_len=NUM_TOKENS),
    "paged": lambda num_blocks: PagedCache(num_blocks, BLOCK_SIZE),
    "sharing": lambda num_blocks: SharingCache(num_blocks, BLOCK_SIZE),
}


def time_once(cache: Any, name: str) -> float:
    """Let all sequences enter, grow together as in decoding, and leave; return the seconds of it all."""
    room = (NUM_PROMPT_TOKENS, NUM_TOKENS - NUM_PROMPT_TOKENS if name == "contiguous" else NUM_TOKENS)
    start = time.perf_counter()
    for seq_id in range(NUM_SEQUENCES):
        cache.allocate(seq_id, *room)
    for _ in range(NUM_TOKENS - NUM_PROMPT_TOKENS):
        for seq_id in range(NUM_SEQUENCES):
            cache.append(seq_id)
    for seq_id in range(NUM_SEQUENCES):
        cache.free(seq_id)
    return time.perf_counter() - start


def report(seconds: dict[str, dict[str, list[float]]]) -> str:
    """Return the medians as a table.

    Example:
        >>> print(report({"paged": {"20": [0.25, 0.5, 0.3], "2000": [0.3]}}))
        256 sequences of 1,000 tokens: seconds to allocate, append and free, by blocks in the pool
        cache               20     2,000
        paged            0.300     0.300
    """
    sizes = list(next(iter(seconds.values())))
    lines = [
        f"{NUM_SEQUENCES} sequences of {NUM_TOKENS:,} tokens: "
        "seconds to allocate, append and free, by blocks in the pool",
        f"{'cache':<12}" + "".join(f"{int(size):>10,}" for size in sizes),
    ]
    for name, by_size in seconds.items():
        lines.append(f"{name:<12}" + "".join(f"{statistics.median(by_size[size]):>10.3f}" for size in sizes))
    return "\n".join(lines)
