"""What the identity matrix is made of: tiny models with the answers of transformers, and a count of the comparisons.

Models are tiny, random and in fp32; at every step the two best logits lie well apart, so that a different token is a
fault and never a tie.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minipaged import SamplingParams
from tests.tiny_models import make_tiny_model

ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 11},
    "qwen2-mixed-window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}
PROMPT_LENGTHS = (1, 3, 4, 5, 15, 16, 17, 40)
NUM_OUTPUT_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)

SameTokens = Callable[[list[list[int]], list[list[int]]], None]

CELLS: Counter[str] = Counter()
"""How many comparisons each test of this process has made: one model, rung, tier, cache shape and arrangement each."""


def counting_comparison(test: str) -> SameTokens:
    """Return a function that holds tokens equal to those expected, and counts that as one cell of a test."""
    CELLS[test] = 0

    def compare(tokens: list[list[int]], expected: list[list[int]]) -> None:
        assert tokens == expected
        assert all(tokens), "an answer without tokens shows nothing"
        CELLS[test] += 1

    return compare


def count_cells(request: pytest.FixtureRequest) -> int:
    """Return how many cells the asking test's file has compared; skip if not all of its tests have run here."""
    matrix = {
        item.nodeid
        for item in request.session.items
        if item.path == request.node.path
        and "same_tokens" in getattr(item, "fixturenames", ())
        and not (torch.cuda.is_available() and item.get_closest_marker("skipif"))
    }
    if not matrix <= CELLS.keys():
        pytest.skip("the tests of the matrix have not all run in this process, so their cells cannot be counted")
    assert min(CELLS[test] for test in matrix) > 0
    return sum(CELLS[test] for test in matrix)


@dataclass
class Oracle:
    """A model, its prompts, and the answers that transformers gives."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


def make_oracle(folder: Path, name: str) -> Oracle:
    """Save the model of this name and let transformers answer."""
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder, name.split("-")[0], **ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    with torch.no_grad():
        answers = [transformers_answer(model, prompt, NUM_OUTPUT_TOKENS) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) == len(answers), "the prompts must lead to different answers"
    return Oracle(folder, prompts, answers)


def transformers_answer(model, prompt: list[int], num_tokens: int) -> list[int]:
    """Decode greedily without a cache and check that no step was close."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > 1e-3, "the two best logits are too close to tell a fault from a tie"
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :]
