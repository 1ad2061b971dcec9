"""What the throughput bench runs: requests of random tokens, the same for every engine."""

import random
from dataclasses import dataclass

from minipaged.bench.workload import Request

TEMPERATURE = 0.6
MAX_MODEL_LEN = 4096
"""The limit that nano-vllm's own benchmark sets. The longest sequence here has half of it."""

NUM_IDS = 10_001
"""Prompts are made of the ids 0 to 10,000. A shorter vocabulary wraps around."""

BLOCK_SIZE = 16

PEER_WORKLOADS = ("batch", "single", "start")
"""What other engines run too. The other workloads compare minipaged with itself."""

TITLES = {
    "batch": "many sequences at once",
    "single": "one sequence",
    "start": "process start to first token",
    "shared": "shared system prompt, cache on/off",
    "no-hits": "prefix cache on without hits",
}
UNITS = {"batch": "tokens/s", "single": "ms/token", "start": "s", "shared": "x requests/s", "no-hits": "% slower"}
"""Of each workload, by name. Tokens are output tokens; a run's time includes its prompts."""

HIGHER_IS_BETTER = {"tokens/s": True, "ms/token": False, "s": False, "x requests/s": True, "% slower": False}


@dataclass(frozen=True)
class Sizes:
    """How much a workload holds; ranges hold both ends."""

    batch_size: int
    length_range: tuple[int, int]
    single: tuple[int, int]
    num_sharers: int
    num_shared: int
    num_own: int


FULL = Sizes(256, (100, 1024), single=(127, 146), num_sharers=64, num_shared=2048, num_own=128)
QUICK = Sizes(8, (4, 16), single=(7, 6), num_sharers=4, num_shared=64, num_own=8)


def draw_batch(batch_size: int, length_range: tuple[int, int], seed: int = 0) -> list[Request]:
    """Draw requests as nano-vllm's benchmark does: each one's length and ids, then the lengths of all outputs.

    Source: ``bench.py`` of nano-vllm. The order of the draws decides what comes out.

    Example:
        >>> requests = draw_batch(256, (100, 1024))
        >>> sum(len(request.prompt) for request in requests), sum(request.output_length for request in requests)
        (142827, 133966)
    """
    draw = random.Random(seed)
    prompts = [[draw.randint(0, NUM_IDS - 1) for _ in range(draw.randint(*length_range))] for _ in range(batch_size)]
    return [Request(prompt, draw.randint(*length_range)) for prompt in prompts]


def draw_requests(workload: str, sizes: Sizes, run: int) -> list[Request]:
    """Return the requests of one run.

    All runs have the same lengths. Run 0 has the ids that belong to the seed; the others have them moved by as much
    as their number, or a prefix cache would find the prompts of the run before. So each run of ``shared`` has a new
    system prompt too, and its first request computes it.

    Args:
        run: Counts from 0; a run before that warms up.
    """
    if workload == "shared":
        draw = random.Random(0)
        shared, *own = ([draw.randint(0, NUM_IDS - 1) for _ in range(count)] for count in _shared_lengths(sizes))
        requests = [Request(shared + tokens, sizes.num_own) for tokens in own]
    elif workload in ("single", "start"):
        prompt_length, output_length = sizes.single
        prompt = draw_batch(1, (prompt_length, prompt_length))[0].prompt
        requests = [Request(prompt, 1 if workload == "start" else output_length)]
    else:
        requests = draw_batch(sizes.batch_size, sizes.length_range)
    return [Request([(token + run) % NUM_IDS for token in each.prompt], each.output_length) for each in requests]


def _shared_lengths(sizes: Sizes) -> list[int]:
    return [sizes.num_shared, *[sizes.num_own] * sizes.num_sharers]


def num_blocks_for(requests: list[Request]) -> int:
    """Return the blocks in which all requests fit at once, with one to spare for each.

    Example:
        >>> num_blocks_for([Request([1] * 16, 1), Request([1] * 8, 8)])
        5
    """
    return sum(-(-(len(each.prompt) + each.output_length) // BLOCK_SIZE) + 1 for each in requests)


def wrapped(requests: list[Request], vocab_size: int) -> list[Request]:
    """Return the requests for a vocabulary that may be shorter than the ids."""
    if vocab_size >= NUM_IDS:
        return requests
    return [Request([token % vocab_size for token in each.prompt], each.output_length) for each in requests]


def shortened(requests: list[Request], most: int | None) -> list[Request]:
    """Return the requests with at most so many output tokens each; None leaves them."""
    if most is None:
        return requests
    return [Request(each.prompt, min(each.output_length, most)) for each in requests]
