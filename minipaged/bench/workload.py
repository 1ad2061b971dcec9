"""Requests as people send them to a chat service: most are short, some very long, and nobody knows which."""

import math
import random
from dataclasses import dataclass

MEAN_PROMPT, MEAN_OUTPUT, LONGEST = 161, 338, 2048
"""Tokens, of the ShareGPT conversations as the PagedAttention paper has them."""

PROMPT_SIGMA, OUTPUT_SIGMA = 1.2, 0.9
"""Spread of the logarithms of the lengths.

The paper gives means and no spread, so the one of outputs is chosen by what follows from it. A sequence that takes
its room step by step takes ``prompt + output / 2`` slots on average, and stays ``output`` steps. With 0.9, the paper's
12 GB for OPT-13B, about 15,000 slots, then hold 7, 10, 13 and 30 sequences with Orca (Max), (Pow2), (Oracle) and
blocks; its figure of batched requests says 7.0, 9.8, 13.6 and 30.4. Less spread holds more. That of prompts hardly
matters, since they are short beside the outputs; they are a line or a pasted page, so it is larger.
"""


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens its answer will have, which only an oracle can tell."""

    prompt: list[int]
    output_length: int


def draw_lengths(num_requests: int, longest: int = LONGEST, seed: int = 0) -> list[tuple[int, int]]:
    """Draw lengths of prompts and outputs, lognormal, with the means above; both scale with ``longest``.

    Cutting at the limits lowers a mean, and a few draws miss it by chance, so all lengths are stretched until the
    means of this very list are right.

    Args:
        num_requests: How many to draw.
        longest: Most tokens of prompt and output together. A prompt has half of that at most.
        seed: Makes the same list again.

    Example:
        >>> lengths = draw_lengths(128)
        >>> [round(sum(column) / 128) for column in zip(*lengths)], max(map(sum, lengths)) <= 2048
        ([161, 338], True)
    """
    draw = random.Random(seed)
    spread = [
        (math.exp(PROMPT_SIGMA * draw.gauss()), math.exp(OUTPUT_SIGMA * draw.gauss())) for _ in range(num_requests)
    ]
    targets = (MEAN_PROMPT * longest / LONGEST, MEAN_OUTPUT * longest / LONGEST)
    scales = [1.0, 1.0]
    lengths: list[tuple[int, int]] = []
    for _ in range(50):  # each round comes closer; far fewer are needed unless almost everything is cut
        lengths = [_cut(prompt * scales[0], output * scales[1], longest) for prompt, output in spread]
        for i, target in enumerate(targets):
            scales[i] *= target * num_requests / sum(pair[i] for pair in lengths)
    return lengths


def _cut(prompt: float, output: float, longest: int) -> tuple[int, int]:
    num_prompt_tokens = min(max(round(prompt), 1), longest // 2)
    return num_prompt_tokens, min(max(round(output), 1), longest - num_prompt_tokens)


def draw_requests(num_requests: int, vocab_size: int, longest: int = LONGEST, seed: int = 0) -> list[Request]:
    """Draw requests with the lengths of `draw_lengths` and random token ids as prompts."""
    draw = random.Random(seed)
    return [
        Request([draw.randrange(vocab_size) for _ in range(num_prompt_tokens)], num_output_tokens)
        for num_prompt_tokens, num_output_tokens in draw_lengths(num_requests, longest, seed)
    ]
