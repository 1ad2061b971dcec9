"""Sliding windows: what is seen in any chunks, and the blocks that are given back."""

import math
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams
from tests.batching.engines import (
    after_every_token,
    greedy,
    prompt_of,
    reference,
    sent_away,
    tokens_of,
    watched,
)
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

POLICIES = ("recompute", "swap")


def windowed(path: Path, **options: Any) -> Path:
    return make_tiny_model(path, "mistral", **options)


CHUNKS = {
    (7, 8192): [7],
    (7, 3): [3, 2, 2],
    (7, 1): [1] * 7,
    (15, 8192): [15],
    (15, 3): [3] * 5,
    (15, 1): [1] * 15,
}
"""By the length of a prompt and the budget of a step: no last chunk has a single token if that can be helped."""


@pytest.mark.parametrize("budget", [8192, 3, 1])
def test_a_window_of_four_sees_four_tokens_in_whatever_chunks(tmp_path: Path, budget: int):
    path = windowed(tmp_path, sliding_window=4)
    for length in (7, 15):
        results = reference(path, [prompt_of(length)], greedy(4))
        w = watched(path, block_size=4, num_blocks=16, max_num_batched_tokens=budget)
        assert tokens_of(w.generate([prompt_of(length)], greedy(4))) == tokens_of(results)
        assert w.chunks_of(0) == CHUNKS[length, budget]
    wider = windowed(tmp_path / "wider", sliding_window=5)
    assert tokens_of(reference(wider, [prompt_of(7)], greedy(4))) != tokens_of(
        reference(path, [prompt_of(7)], greedy(4))
    ), "a window that is one too wide would go unseen"


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_have_left_every_window_are_given_back(tmp_path: Path, policy: str):
    path = windowed(tmp_path, sliding_window=8)
    expected = tokens_of(reference(path, [prompt_of(6)], greedy(60)))
    for when, num_preemptions in ((lambda group: False, 0), (after_every_token(), 59)):
        w = watched(path, block_size=4, num_blocks=32, preemption=policy)
        with sent_away(when):
            assert tokens_of(w.generate([prompt_of(6)], greedy(60))) == expected
        assert max(w.used_blocks) <= 3, "a window of 8 touches three blocks of 4"
        assert w.preemptions == num_preemptions


def test_a_model_with_one_layer_that_sees_all_keeps_every_block(tmp_path: Path):
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    path = make_tiny_model(tmp_path, "qwen2", **options)
    w = watched(path, block_size=4, num_blocks=32)
    tokens = tokens_of(w.generate([prompt_of(6)], greedy(60)))
    assert tokens == tokens_of(reference(path, [prompt_of(6)], greedy(60)))
    assert max(w.used_blocks) == math.ceil((6 + 58) / 4)


def test_samples_and_beams_under_a_window_share_and_give_back(tmp_path: Path):
    path = windowed(tmp_path, sliding_window=8)
    params = [SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=24), SamplingParams(beam_width=3, max_tokens=24)]
    lower = LLM(path, rung="sharing", block_size=4, num_blocks=64, dtype="float32", device="cpu")
    w = watched(path, block_size=4, num_blocks=26)
    prompts = [prompt_of(11), prompt_of(10)]
    assert tokens_of(w.generate(prompts, params)) == tokens_of(lower.generate(prompts, params))
    assert w.engine.stats()["copies"] > 0 and max(w.used_blocks) <= 2 * 3 * 3 + 2
