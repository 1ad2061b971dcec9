"""Rung 4's engine: chunks, company, block edges, small pools, coming back, and the arena."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams, UserError, use
from minipaged.batching.reference import ragged_paged_attention
from tests.batching.engines import (
    Watched,
    after_its_first_token,
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


# -- block edges

LENGTHS = (15, 16, 17, 31, 32, 33)


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_at_block_edges_that_are_sent_away_after_the_first_token_go_on_as_if_nothing_was(
    folder: Path, policy: str
):
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = tokens_of(reference(folder, prompts, greedy(3)))
    w = watched(folder, num_blocks=16, preemption=policy)
    with sent_away(after_its_first_token):
        assert tokens_of(w.generate(prompts, greedy(3))) == expected
    assert w.preemptions == len(LENGTHS) and w.swaps == (len(LENGTHS) if policy == "swap" else 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_the_fewest_blocks_are_enough_for_one_that_is_sent_away_after_its_first_token(
    folder: Path, length: int, policy: str
):
    num_blocks = math.ceil((length + 1) / 16)
    w = watched(folder, num_blocks=num_blocks, preemption=policy)
    with sent_away(after_its_first_token):
        tokens = tokens_of(w.generate([prompt_of(length)], greedy(2)))
    assert tokens == tokens_of(reference(folder, [prompt_of(length)], greedy(2)))
    assert w.preemptions == 1 and max(w.used_blocks) <= num_blocks


def test_a_sequence_holds_the_blocks_of_all_tokens_but_the_newest(folder: Path):
    w = watched(folder, num_blocks=16)
    ids = [w.add(prompt_of(length), greedy(4)) for length in LENGTHS]
    for expected in ((1, 1, 2, 2, 2, 3), (1, 2, 2, 2, 3, 3)):
        w.steps(1)
        tables = [w.engine.cache.tables[w.scheduler.groups[i].members[0].seq_id] for i in ids]
        assert tuple(len(table.block_ids) for table in tables) == expected
    w.run()


# -- a request that the pool can hold only alone, or never


def test_a_prompt_over_the_pool_is_refused_and_the_next_one_runs(folder: Path):
    w = watched(folder, num_blocks=10)
    with pytest.raises(UserError, match=r"200 tokens; the cache has room for 160 .*10 x block_size 16"):
        w.generate([prompt_of(200), prompt_of(20)], greedy())
    w.assert_idle()
    assert len(w.generate([prompt_of(20)], greedy())[0].token_ids) == 8


@pytest.mark.parametrize("company", [0, 3])
def test_an_answer_that_outgrows_the_pool_ends_with_length_and_is_not_sent_away_for_ever(folder: Path, company: int):
    w = watched(folder, num_blocks=10)
    request = w.add(prompt_of(100), greedy(200))
    for _ in range(company):
        w.add(prompt_of(20), greedy(60))
    ends = {output.request_id: output.result for output in w.run(at_most=62 + 62 * company) if output.result}
    assert (len(ends[request].token_ids), ends[request].finish_reason) == (61, "length")  # 100 + 61 - 1 = 160 slots
    assert all(len(result.token_ids) == 60 for i, result in ends.items() if i != request)
    assert (w.preemptions > 0) == (company > 0)


# -- coming back


@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_two_streams_that_cannot_both_finish_lose_nothing_and_repeat_nothing(folder: Path, policy: str):
    prompts = [prompt_of(36), prompt_of(36, seed=11)]
    expected = watched(folder, num_blocks=64).generate(prompts, greedy(30))
    w = watched(folder, num_blocks=7, preemption=policy)
    streams = [w.llm.stream(prompt, greedy(30)) for prompt in prompts]
    chunks: list[list[Any]] = [[], []]
    waiting = [0, 1]
    while waiting:
        for i in list(waiting):
            piece = next(streams[i], None)
            if piece is None:
                waiting.remove(i)
            else:
                chunks[i].append(piece)
    for own, result in zip(chunks, expected, strict=True):
        assert [token_id for chunk in own for token_id in chunk.token_ids] == result.token_ids
        assert "".join(chunk.text for chunk in own) == own[-1].result.text == result.text
        assert [len(chunk.token_ids) for chunk in own] == [1] * 30
        assert own[-1].result.metrics.num_generated_tokens == 30
    assert sum(len(output.token_ids) for output in w.delivered) == 60
    assert w.preemptions > 0 and (w.swaps > 0) == (policy != "recompute")
    w.assert_idle()
    if policy == "recompute":
        again = w.chunks_of(1)[1:]
        done = [len(o.token_ids) for o in w.delivered if o.request_id == 1][: again[0] - 36]
        assert again[0] == 36 + sum(done), "all tokens so far are computed again, and none twice"


def test_one_who_was_sent_away_comes_back_only_when_everything_fits(folder: Path):
    w = watched(folder, num_blocks=12, max_num_batched_tokens=32, preemption="recompute")
    first = w.add(prompt_of(100), greedy(60))  # 7 blocks, 10 in the end
    second = w.add(prompt_of(60, seed=9), greedy(60))  # 4 blocks, 8 in the end
    ends = [output for output in w.run(at_most=140) if output.is_last]
    assert [output.request_id for output in ends] == [first, second]
    assert w.preemptions == 1, "nobody is let in to be thrown out again"
    expected = reference(folder, [prompt_of(100), prompt_of(60, seed=9)], greedy(60))
    assert tokens_of([output.result for output in ends]) == tokens_of(expected)


def test_with_blocks_enough_nobody_is_sent_away_and_all_decode_in_one_batch(folder: Path):
    w = watched(folder, num_blocks=64)
    w.add(prompt_of(100), greedy(40))
    w.steps(20)
    w.add(prompt_of(50), greedy(20))
    w.steps(1)
    assert len(w.steps(1)) == 2
    w.run()
    assert w.preemptions == 0


# -- the budget of a step


@pytest.mark.parametrize(
    ("num_prompt_tokens", "budget", "expected"),
    [(80, 32, [32, 32, 16]), (64, 32, [32, 32]), (33, 32, [31, 2]), (200, 64, [64, 64, 64, 8]), (7, 1, [1] * 7)],
)
def test_a_prompt_is_cut_into_chunks_of_the_budget(
    folder: Path, num_prompt_tokens: int, budget: int, expected: list[int]
):
    w = watched(folder, num_blocks=20, max_num_batched_tokens=budget)
    request = w.add(prompt_of(num_prompt_tokens), greedy(2))
    outputs = w.run()
    assert w.chunks_of(request) == expected
    assert outputs[-1].result.token_ids == reference(folder, [prompt_of(num_prompt_tokens)], greedy(2))[0].token_ids


def test_a_long_prompt_never_holds_up_those_that_decode(folder: Path):
    w = watched(folder, num_blocks=64, max_num_batched_tokens=8)
    early = [w.add(prompt_of(2, seed=i), greedy(40)) for i in range(3)]
    w.steps(2)
    w.add(prompt_of(120), greedy(4))
    for _ in range(20):
        assert [output.request_id for output in w.steps(1)] == early, "everybody gets a token at every step"
    w.run()


def test_default_seats_are_lowered_to_the_budget_and_more_on_request_are_refused(folder: Path):
    assert watched(folder, num_blocks=4, max_num_batched_tokens=3).scheduler.max_num_seqs == 3
    assert watched(folder, num_blocks=4).scheduler.max_num_seqs == 256
    with pytest.raises(UserError, match="max_num_seqs must be at most max_num_batched_tokens, which is 3, not 4"):
        watched(folder, num_blocks=4, max_num_seqs=4, max_num_batched_tokens=3)


def test_seats_limit_how_many_sequences_run_at_a_time(folder: Path):
    w = watched(folder, num_blocks=64, max_num_seqs=4)
    params = [greedy(6), greedy(6, n=3), greedy(6, n=2), SamplingParams(beam_width=4, max_tokens=5), greedy(6)]
    results = w.generate([prompt_of(5, seed=i) for i in range(5)], params)
    assert len(results) == 1 + 3 + 2 + 1 + 1  # the watch counts seats after every step
    assert any("max_num_seqs" in event.reason for event in w.events if event.act == "wait")


def test_those_of_a_lower_priority_number_go_first(folder: Path):
    w = watched(folder, num_blocks=64, max_num_seqs=1)
    for priority in (2, 1, 1, -3):
        w.add(prompt_of(5), greedy(2, priority=priority))
    assert [output.request_id for output in w.run() if output.is_last] == [3, 1, 2, 0]


# -- many at once


def test_a_hundred_prompts_at_once_all_finish_under_a_progress_bar(folder: Path, capsys: pytest.CaptureFixture[str]):
    prompts = [prompt_of(i % 23 + 1, seed=i) for i in range(100)]
    w = watched(folder, block_size=4, num_blocks=40, max_num_batched_tokens=64)
    results = w.generate(prompts, greedy(10), progress=True)
    assert "100/100" in capsys.readouterr().err
    assert [result.prompt_token_ids for result in results] == prompts
    large = LLM(folder, rung="paged", num_blocks=256, dtype="float32", device="cpu")
    assert tokens_of(results) == tokens_of(large.generate(prompts, greedy(10)))
    assert w.preemptions > 0


def test_requests_join_and_leave_while_others_run(folder: Path):
    w = watched(folder, num_blocks=64)
    first = w.add(prompt_of(5), greedy(20))
    w.steps(3)
    second = w.add(prompt_of(6), greedy(2))
    outputs = w.steps(2)
    assert [output.request_id for output in outputs] == [first, second] * 2 and outputs[-1].is_last
    assert [output.request_id for output in w.steps(1)] == [first]
    w.run()


# -- over the arena


@pytest.mark.parametrize(("reservation", "num_held"), [("max", 2), ("pow2", 4), ("oracle", 4)])
def test_over_the_arena_a_request_holds_its_whole_range_and_nobody_is_sent_away(
    folder: Path, reservation: str, num_held: int
):
    w = watched(folder, cache="contiguous", reservation=reservation, num_blocks=8, max_model_len=64)
    prompts = [prompt_of(16, seed=i) for i in range(6)]
    held = []
    w.engine.before_release = lambda seq: held.append(len(w.engine.cache.ranges))
    assert tokens_of(w.generate(prompts, greedy(10))) == tokens_of(reference(folder, prompts, greedy(10)))
    assert max(held, default=0) <= num_held and w.preemptions == 0
    assert max(len(own) for own in running_by_step(w).values()) == num_held


def running_by_step(w: Watched) -> dict[int, set[int]]:
    """Return which requests computed a token in each step."""
    running: dict[int, set[int]] = {}
    for event in w.events:
        if event.act in ("chunk", "decode"):
            running.setdefault(event.step, set()).add(event.request_id)
    return running


# -- a reader's own attention


def test_the_plain_loop_in_the_place_of_attention_gives_the_same_tokens(folder: Path):
    prompts = [prompt_of(n) for n in (1, 9, 17)]
    rows: list[int] = []

    def attention(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows.append(len(q))
        return ragged_paged_attention(q, *args, **kwargs)

    expected = tokens_of(reference(folder, prompts, greedy(8)))
    for policy in POLICIES:
        w = watched(folder, block_size=4, num_blocks=16, max_num_batched_tokens=7, preemption=policy)
        with use(ragged_paged_attention=attention), sent_away(after_its_first_token):
            assert tokens_of(w.generate(prompts, greedy(8))) == expected
        assert w.preemptions > 0
    assert max(rows) == 7
