"""The swap space under the engine, and steps that fail: what ran is dropped, what waits goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams, use
from minipaged.batching.plan import Swap
from minipaged.batching.reference import gather_blocks, scatter_blocks
from minipaged.foundation.sampling import InvalidLogitsError
from tests.batching.engines import greedy, prompt_of, reference, send_away, tokens_of, watched
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

POLICIES = ("recompute", "swap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


def warm(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 42} | options))


# -- the space


def test_what_is_swapped_out_comes_back_bit_for_bit_elsewhere(folder: Path):
    w = watched(folder, block_size=4, num_blocks=32)
    kv, space = w.engine.kv, w.engine.swap_space
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    space.take(Swap(7, [(0, 5), (1, 2), (2, 30)]))
    assert space.holds(7) and torch.equal(kv, before)
    space.bring_back(Swap(7, [(0, 9), (1, 10), (2, 0)]))
    assert not space.holds(7)
    for source, target in ((5, 9), (2, 10), (30, 0)):
        assert torch.equal(kv[:, :, target], before[:, :, source])
    untouched = [i for i in range(32) if i not in (9, 10, 0)]
    assert torch.equal(kv[:, :, untouched], before[:, :, untouched])


def test_places_that_nobody_needs_any_more_stay_behind(folder: Path):
    w = watched(folder, block_size=4, num_blocks=8)
    kv, space = w.engine.kv, w.engine.swap_space
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    space.take(Swap(7, [(0, 5), (1, 2), (2, 3)]))
    space.bring_back(Swap(7, [(0, 6), (2, 1)]))
    assert torch.equal(kv[:, :, 6], before[:, :, 5]) and torch.equal(kv[:, :, 1], before[:, :, 3])
    space.drop(7)
    space.drop(8)


def test_blocks_that_samples_share_are_swapped_once(folder: Path):
    w = watched(folder, block_size=4, num_blocks=32, preemption="swap")
    request = w.add(prompt_of(18), warm(n=4))
    w.steps(2)
    assert w.engine.stats()["used_blocks"] == 4 + 4  # four full blocks of the prompt, and one of each sample's own
    moved = []
    with use(
        gather_blocks=lambda pool, ids, staging: (moved.append(len(ids)), gather_blocks(pool, ids, staging)),
        scatter_blocks=lambda pool, ids, staging: (moved.append(len(ids)), scatter_blocks(pool, ids, staging)),
    ):
        send_away(w, request)
        assert w.engine.stats()["used_blocks"] == 0
        w.run()
    assert moved == [8, 8]


def test_a_copy_back_that_is_not_made_is_seen(folder: Path):
    w = watched(folder, block_size=4, num_blocks=32, preemption="swap")
    request = w.add(prompt_of(18), greedy())
    w.steps(2)
    send_away(w, request)
    to_a_temporary = lambda pool, ids, staging: pool[:, :, ids].copy_(staging)  # noqa: E731
    with use(scatter_blocks=to_a_temporary), pytest.raises(InvalidLogitsError):
        w.steps(1)
    w.steps(1)
    w.assert_idle()


def test_a_full_swap_space_lets_others_compute_again(folder: Path):
    prompts = [prompt_of(12, seed=i) for i in range(4)]
    expected = tokens_of(reference(folder, prompts, greedy(12)))
    w = watched(folder, block_size=4, num_blocks=64, preemption="swap")
    object.__setattr__(w.scheduler.preemption, "max_swapped_blocks", 7)
    ids = [w.add(prompt, greedy(12)) for prompt in prompts]
    w.steps(3)
    for request in reversed(ids):  # each has four blocks
        send_away(w, request)
    assert (w.preemptions, w.swaps, w.scheduler.num_swapped_blocks) == (4, 1, 4)
    ends = {output.request_id: output.result.token_ids for output in w.run() if output.result}
    assert [ends[request] for request in ids] == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_beams_are_sent_away_and_come_back_together(folder: Path, policy: str):
    params = SamplingParams(beam_width=4, n=4, max_tokens=12)
    lower = LLM(folder, rung="sharing", block_size=4, num_blocks=64, dtype="float32", device="cpu")
    expected = lower.generate([prompt_of(9)], params)
    w = watched(folder, block_size=4, num_blocks=64, preemption=policy)
    request = w.add(prompt_of(9), params)
    for _ in range(5):
        w.steps(2)
        before = [list(member.token_ids) for member in w.scheduler.groups[request].members]
        send_away(w, request)
        assert [member.token_ids for member in w.scheduler.groups[request].members] == before
    results = [output.result for output in w.run()]
    assert [(r.token_ids, r.index) for r in results] == [(r.token_ids, r.index) for r in expected]
    assert [r.score for r in results] == pytest.approx([r.score for r in expected], abs=1e-4)


# -- steps that fail


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("injected")


@pytest.mark.parametrize("part", ["ragged_paged_attention", "copy_blocks", "gather_blocks", "scatter_blocks", "logits"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_fails_drops_what_ran_and_leaves_what_waits(folder: Path, part: str, policy: str):
    w = watched(folder, block_size=4, num_blocks=16, max_num_seqs=5, preemption=policy)
    prompts = [prompt_of(n, seed=n) for n in (10, 9, 7, 6, 5)]
    params = [warm(n=2, max_tokens=24), warm(n=2, max_tokens=20), greedy(9), greedy(9), greedy(9)]
    both = list(zip(prompts, params, strict=True))
    expected = [tokens_of(watched(folder, num_blocks=64).generate([prompt], each)) for prompt, each in both]
    ids = [w.add(prompt, each) for prompt, each in both]
    broken = {part: fail} if part != "logits" else {"ragged_paged_attention": lambda q, *args, **kwargs: q * torch.nan}
    outputs = w.steps(1)
    with use(**broken):
        try:
            while w.engine.has_unfinished():
                outputs += w.engine.step()
            has_failed = False
        except (RuntimeError, InvalidLogitsError):
            has_failed = True
    assert has_failed == (policy == "swap" or part not in ("gather_blocks", "scatter_blocks"))
    w.check()
    assert not (w.scheduler.running or w.engine.cache.seq_ids)
    outputs += w.run()
    ends = {(output.request_id, output.index): output.result for output in outputs if output.result}
    assert {request for request, _ in ends} == set(ids), "everybody hears of an end"
    for (request, index), result in ends.items():
        whole = expected[ids.index(request)][index]
        assert result.token_ids == (whole if result.finish_reason != "abort" else whole[: len(result.token_ids)])
    assert len([output for output in outputs if output.is_last]) == len(ids)
    assert any(result.finish_reason != "abort" for result in ends.values())
    assert any(result.finish_reason == "abort" for result in ends.values()) == has_failed


@pytest.mark.parametrize("policy", POLICIES)
def test_one_who_was_sent_away_lives_through_a_step_that_fails(folder: Path, policy: str):
    expected = watched(folder, num_blocks=64).generate([prompt_of(9)], warm(n=2))
    w = watched(folder, block_size=4, num_blocks=32, max_num_seqs=3, preemption=policy)
    running, away = w.add(prompt_of(5), greedy(20)), w.add(prompt_of(9), warm(n=2, priority=-1))
    w.steps(3)
    send_away(w, away)
    w.scheduler.max_num_seqs = 1  # it stays away
    w.steps(1)
    with use(ragged_paged_attention=fail), pytest.raises(RuntimeError, match="injected"):
        w.steps(1)
    w.scheduler.max_num_seqs = 3
    ends = {(output.request_id, output.index): output.result for output in w.run() if output.result}
    assert ends[running, 0].finish_reason == "abort"
    assert [ends[away, i].token_ids for i in (0, 1)] == tokens_of(expected)


@pytest.mark.parametrize("rung", ["sharing", "batching"])
def test_nan_in_one_beam_search_costs_no_caller_the_end_of_another(folder: Path, rung: str):
    llm = LLM(folder, rung=rung, num_blocks=64, dtype="float32", device="cpu")
    params = SamplingParams(beam_width=2, n=2, max_tokens=3)
    ids = [llm.engine.add_request(prompt_of(5, seed=i), params) for i in range(2)]
    forward = llm.model.forward

    def with_nan(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        logits[-1] = torch.nan
        return logits

    llm.engine.step()
    llm.engine.step()
    llm.model.forward = with_nan
    with pytest.raises(InvalidLogitsError):
        llm.engine.step()
    outputs = llm.engine.step()
    assert {output.request_id for output in outputs if output.is_last} == set(ids)
    assert not llm.engine.has_unfinished() and llm.stats()["used_blocks"] == 0


PLACES = ["allocate", "append", "fork", "free", "take_copies", "swap_out", "swap_in", "slots", "block_ids"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", [0, 1, 2])
def test_an_interrupt_anywhere_in_the_books_leaves_nobody_waiting_for_ever(folder: Path, place: str, call: int):
    w = watched(folder, block_size=4, num_blocks=16, preemption="swap")
    original, calls = getattr(w.engine.cache, place), iter(range(10**6))

    def interrupt_once(*args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return original(*args)

    setattr(w.engine.cache, place, interrupt_once)
    ids = [w.add(prompt_of(5 + i), warm(n=2, max_tokens=16)) for i in range(4)]
    outputs = []
    was_interrupted = False
    for _ in range(200):
        if not w.engine.has_unfinished():
            break
        try:
            outputs += w.engine.step()
        except KeyboardInterrupt:
            was_interrupted = True
    assert was_interrupted, "choose another call"
    w.assert_idle()
    assert {output.request_id for output in outputs if output.is_last} == set(ids)
    assert len(w.generate([prompt_of(5)], greedy())[0].token_ids) == 8
