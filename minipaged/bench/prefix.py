"""What the prefix cache costs when nothing is found, what it saves when a system prompt is shared, and its look-ups.

python -m minipaged.bench prefix
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from minipaged import LLM, SamplingParams
from minipaged.bench.random_model import save_random_model
from minipaged.bench.record import new_record, progress, write_record
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.index import PrefixIndex
from minipaged.prefix.radix_tree import RadixTree

CACHES: tuple[str | None, ...] = (None, "hash", "radix")
BLOCK_SIZE = 16
POOL_SIZES = (1_000, 10_000, 100_000)
"""Cached blocks among which one prompt is looked up."""
NUM_LOOKUP_TOKENS = 512
MAX_MODEL_LEN = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", default="smollm2", help="model of the runs without hits and with a system prompt, or 'random'")
    add("--requests", type=int, default=16, help="requests of a run (default: 16)")
    add("--prompt-tokens", type=int, default=128, help="own tokens of each prompt (default: 128)")
    add("--output-tokens", type=int, default=32, help="tokens of each answer (default: 32)")
    add("--system-tokens", type=int, default=512, help="tokens of the shared system prompt (default: 512)")
    add("--repeats", type=int, default=5, help="runs of each case (default: 5)")
    add("--out", type=Path, default=Path("docs/benchmarks/prefix.json"), help="where to write")


def run(options: argparse.Namespace) -> None:
    """Run everything and print a table."""
    names = ("model", "requests", "prompt_tokens", "output_tokens", "system_tokens", "repeats")
    record = new_record("prefix", {name: getattr(options, name) for name in names})
    record["lookup_seconds"] = measure_lookups(POOL_SIZES, options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model == "random":
            model = folder
            save_random_model(Path(folder), MAX_MODEL_LEN)
        engines = {str(cache): LLM(model, prefix_cache=cache) for cache in CACHES}
        record["without_hits"] = measure(engines, options, num_shared=0)
        record["system_prompt"] = measure(engines, options, num_shared=options.system_tokens)
    print(report(record))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(record, options.out)


def measure(engines: dict[str, LLM], options: argparse.Namespace, num_shared: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds and hit tokens of each run, by cache.

    Runs alternate, in a new order each round, so that all caches meet the same machine. On the CPU the seconds are
    those of the processor, which other programs on the machine change less than those of the clock.
    """
    found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "hit_tokens": []} for name in engines}
    params = SamplingParams(temperature=0, max_tokens=options.output_tokens, ignore_eos=True)
    for repeat in range(options.repeats + 1):
        progress(f"{num_shared} shared tokens, run {repeat} of {options.repeats}")
        for name in rotated(list(engines), repeat):
            llm = engines[name]
            clock = time.process_time if llm.device.type == "cpu" else time.perf_counter
            prompts = make_prompts(options, num_shared, llm.config.vocab_size, seed=repeat)
            before = llm.stats()["hit_tokens"]
            start = clock()
            llm.generate(prompts, params, progress=False)
            if repeat:  # the first run warms up
                found[name]["seconds"].append(clock() - start)
                found[name]["hit_tokens"].append(llm.stats()["hit_tokens"] - before)
    return found


def rotated(names: list[str], distance: int) -> list[str]:
    """Return the names from another one on.

    Example:
        >>> rotated(["None", "hash", "radix"], 4)
        ['hash', 'radix', 'None']
    """
    distance %= len(names)
    return names[distance:] + names[:distance]


def make_prompts(options: argparse.Namespace, num_shared: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens that begin with ``num_shared`` common ones; another seed shares nothing."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    shared = tokens(num_shared)
    return [shared + tokens(options.prompt_tokens) for _ in range(options.requests)]


def measure_lookups(pool_sizes: tuple[int, ...], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds that one prompt takes to enter and to leave, by index and by how much else is cached.

    It finds half of its blocks, and evicts others for the rest: the pool is full of cached blocks.
    """
    seconds: dict[str, dict[str, list[float]]] = {}
    for num_blocks in pool_sizes:
        indexes: dict[str, PrefixIndex] = {"hash": HashChain("bench", BLOCK_SIZE), "radix": RadixTree(BLOCK_SIZE)}
        for name, index in indexes.items():
            progress(f"{name}, {num_blocks:,} cached blocks")
            cache = PrefixCache(num_blocks, BLOCK_SIZE, None, index, LRU())
            fill(cache)
            samples = [time_one(cache, seed) for seed in range(20 * repeats)]
            seconds.setdefault(name, {})[str(num_blocks)] = samples
    return seconds


def fill(cache: PrefixCache) -> None:
    """Let prompts come and go until every block is cached."""
    for number in range(-(-cache.pool.num_blocks * BLOCK_SIZE // NUM_LOOKUP_TOKENS)):
        let_pass(cache, [number + 1000] * NUM_LOOKUP_TOKENS)


def let_pass(cache: PrefixCache, prompt: list[int]) -> None:
    """Let a prompt enter, be computed and leave."""
    length = min(len(prompt), cache.pool.num_blocks * BLOCK_SIZE)
    cache.allocate(PrefixRoom([0], [length], 0, 1, [prompt], "", [length - 1]))
    cache.note_computed(0, length, prompt)
    cache.free(0)
    cache.take_copies()
    cache.release_pins()


def time_one(cache: PrefixCache, seed: int) -> float:
    """Return the seconds of one prompt, the first half of which was the last to come in."""
    half = NUM_LOOKUP_TOKENS // 2
    let_pass(cache, [seed + 10**6] * half)
    start = time.perf_counter()
    let_pass(cache, [seed + 10**6] * half + [seed + 10**7] * half)
    return time.perf_counter() - start


def report(record: dict[str, Any]) -> str:
    """Return medians as tables."""
    lines = [
        f"{'one prompt of ' + str(NUM_LOOKUP_TOKENS) + ' tokens, us':<34}" + _columns(POOL_SIZES) + "   cached blocks"
    ]
    for name, by_size in record["lookup_seconds"].items():
        lines.append(f"{name:<34}" + "".join(f"{statistics.median(by_size[str(n)]) * 1e6:>10.0f}" for n in POOL_SIZES))
    lines.append(f"\n{'seconds of a run, against no cache':<34}{'seconds':>10}{'ratio':>10}{'hit tokens':>12}")
    for case in ("without_hits", "system_prompt"):
        plain = record[case]["None"]["seconds"]
        for name, found in record[case].items():
            # Runs of one round met the same machine, so their ratio is steadier than the ratio of medians.
            ratio = statistics.median(a / b for a, b in zip(found["seconds"], plain, strict=True))
            hits = statistics.median(found["hit_tokens"])
            median = statistics.median(found["seconds"])
            lines.append(f"{case.replace('_', ' ') + ', ' + name:<34}{median:>10.3f}{ratio:>10.3f}{hits:>12.0f}")
    return "\n".join(lines)


def _columns(numbers: tuple[int, ...]) -> str:
    return "".join(f"{number:>10,}" for number in numbers)
