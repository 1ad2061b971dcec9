"""What rung 4 refuses, and that a refusal leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams, UserError
from tests.batching.engines import (
    greedy,
    prompt_of,
    watched,
)
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "attic"}, "cache must be one of paged, contiguous, not 'attic'"),
        ({"preemption": "never"}, "preemption must be one of auto, recompute, swap, not 'never'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1, not 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number from 1, not True"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be a whole number from 1, not 0"),
        ({"max_num_batched_tokens": 1.5}, "max_num_batched_tokens must be a whole number from 1, not 1.5"),
        ({"max_num_seqs": 9000}, "max_num_seqs must be at most max_num_batched_tokens, which is 8192, not 9000"),
        ({"reservation": "max"}, "rung 'batching' reserves nothing, so no reservation"),
        ({"cache": "paged", "reservation": "oracle"}, "reserves nothing, so no reservation"),
        ({"cache": "contiguous", "reservation": "guess"}, "reservation must be one of max, pow2, oracle"),
    ],
)
def test_options_out_of_range_are_refused_in_one_sentence(folder: Path, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message) as refusal:
        watched(folder, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("rung", ["foundation", "contiguous", "paged", "sharing"])
@pytest.mark.parametrize(
    "option",
    [{"cache": "paged"}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 9}, {"preemption": "swap"}],
    ids=lambda option: next(iter(option)),
)
def test_lower_rungs_refuse_the_options_of_this_one(folder: Path, rung: str, option: dict[str, Any]):
    name = next(iter(option))
    with pytest.raises(UserError, match=rf"rung '{rung}' does not know {name} \(.*\); rung 'batching' has it"):
        LLM(folder, rung=rung, dtype="float32", device="cpu", **option)


@pytest.mark.parametrize("rung", ["foundation", "contiguous", "paged", "sharing"])
def test_lower_rungs_refuse_a_priority(folder: Path, rung: str):
    llm = LLM(folder, rung=rung, dtype="float32", device="cpu")
    with pytest.raises(UserError, match=r"does not know priority \(1 was given\); rung 'batching' has it"):
        llm.generate([1, 2], greedy(2, priority=1))


@pytest.mark.parametrize("priority", [1.0, None, "first", True, 2**31 + 1])
def test_a_priority_that_is_no_number_is_refused(priority: Any):
    with pytest.raises(UserError, match="priority must be a whole number from"):
        SamplingParams(priority=priority)


def test_more_sequences_than_seats_are_refused_and_so_are_samples_over_the_arena(folder: Path):
    w = watched(folder, num_blocks=16, max_num_seqs=2)
    for params in (greedy(4, n=3), SamplingParams(beam_width=3), SamplingParams(best_of=3)):
        with pytest.raises(UserError, match="the request has 3 sequences; at most 2 run at a time"):
            w.generate([prompt_of(4)], params)
        w.assert_idle()
    w = watched(folder, num_blocks=16, cache="contiguous")
    with pytest.raises(UserError, match="2 sequences; the contiguous cache cannot share, so it takes one"):
        w.generate([prompt_of(4)], greedy(4, n=2))
    w.assert_idle()
    assert len(w.generate([prompt_of(4)], greedy(4))) == 1


def test_the_watch_notices_a_leak(folder: Path):
    w = watched(folder, num_blocks=20)
    w.engine.cache.pool.allocate()
    with pytest.raises(AssertionError):
        w.generate([prompt_of(3)], greedy())
