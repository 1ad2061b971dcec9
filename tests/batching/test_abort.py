"""Requests and samples that are dropped, wherever they are: nothing is left of them, and the others go on."""

from pathlib import Path
from typing import Any

import pytest

from minipaged import SamplingParams, UserError
from tests.batching.engines import Watched, prompt_of, reference, send_away, tokens_of, watched
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

POLICIES = ("recompute", "swap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


def warm(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 42} | options))


def results_of(outputs: list[Any]) -> dict[tuple[int, int], Any]:
    """Return the results among some outputs by request and index."""
    return {(output.request_id, output.index): output.result for output in outputs if output.result}


# -- a whole request

KINDS = {"one": {}, "samples": {"n": 3}, "best-of": {"n": 2, "best_of": 3}, "beams": {"n": 2, "beam_width": 3}}
STATES = ("queued", "mid-prefill", "decoding", "sent-away", "coming-back")


def bring(w: Watched, request: int, state: str) -> None:
    """Step until a request is in the given state."""
    group = w.scheduler.groups[request]
    if state == "queued":
        return
    if state == "mid-prefill":
        while not group.members[0].num_computed:
            w.steps(1)
        assert not group.is_decoding
        return
    while len(group.members[0].token_ids) < group.num_prompt_tokens + 3:
        w.steps(1)
    if state != "decoding":
        send_away(w, request)
    if state == "coming-back":
        w.steps(1)
        assert group.is_running


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_frees_everything_in_every_state_and_others_go_on(folder: Path, kind: str, state: str, policy: str):
    others = [prompt_of(6, seed=5), prompt_of(7, seed=8)]
    company = warm(n=2, seed=1, max_tokens=14)
    expected = [tokens_of(watched(folder, num_blocks=64).generate([prompt], company)) for prompt in others]
    w = watched(folder, block_size=4, num_blocks=64, max_num_batched_tokens=12, preemption=policy)
    first, request, second = (
        w.add(others[0], company),
        w.add(prompt_of(21), warm(**KINDS[kind])),
        w.add(others[1], company),
    )
    bring(w, request, state)
    is_swapped = w.scheduler.groups[request].swapped is not None
    assert is_swapped == (state == "sent-away" and policy == "swap")
    dropped = w.engine.abort(request)
    w.check()
    assert [result.finish_reason for result in dropped] == ["abort"] * len(dropped)
    has_beams = kind != "beams" or state in STATES[2:]  # before the fork, a search has one sequence
    assert len(dropped) == ({"one": 1, "samples": 3}.get(kind, 2) if has_beams else 1)
    assert all(result.text == w.llm.tokenizer.decode(result.token_ids) for result in dropped)
    assert w.engine.abort(request) == w.engine.abort(request, index=0) == []
    w.check()
    ends = results_of(w.run())
    assert ends.keys() == {(first, 0), (first, 1), (second, 0), (second, 1)}
    for i, tokens in enumerate(expected):
        assert [ends[(first, second)[i], index].token_ids for index in (0, 1)] == tokens
    assert w.engine.abort(first) == w.engine.abort(999) == []


# -- one sample of several


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1], [2, 0], [1, 0]])
def test_one_sample_goes_and_the_others_are_what_they_would_have_been(
    folder: Path, gone: list[int], num_tokens: int, policy: str | None
):
    params = warm(n=3)
    expected = watched(folder, num_blocks=64).generate([prompt_of(10)], params)
    company = reference(folder, [prompt_of(5)], warm(seed=3))[0]
    w = watched(folder, block_size=4, num_blocks=32, preemption=policy or "auto")
    other, request = w.add(prompt_of(5), warm(seed=3)), w.add(prompt_of(10), params)
    w.steps(num_tokens)
    if policy and num_tokens:
        send_away(w, request)
    for index in gone:
        result = w.engine.abort(request, index=index)[0]
        assert (result.index, result.seed, result.finish_reason) == (index, expected[index].seed, "abort")
        assert result.token_ids == expected[index].token_ids[:num_tokens]
        assert w.engine.abort(request, index=index) == [], "a second time does nothing"
        w.check()
    outputs = w.run()
    ends = results_of(outputs)
    assert ends.keys() == {(other, 0), *((request, i) for i in range(3) if i not in gone)}
    for (request_id, index), result in ends.items():
        whole = company if request_id == other else expected[index]
        assert (result.token_ids, result.seed, result.text) == (whole.token_ids, whole.seed, whole.text)
    assert [output.is_last for output in outputs if output.request_id == request][-1]
    assert sum(output.is_last for output in outputs) == 2


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("is_sent_away", [False, True])
def test_a_request_ends_when_its_last_sample_is_dropped(
    folder: Path, order: list[int], num_tokens: int, is_sent_away: bool
):
    w = watched(folder, block_size=4, num_blocks=32, preemption="swap")
    request = w.add(prompt_of(10), warm(n=3))
    w.steps(num_tokens)
    if is_sent_away and num_tokens:
        send_away(w, request)
    seeds = [w.engine.abort(request, index=index)[0].seed for index in order]
    assert len(set(seeds)) == 3
    w.assert_idle()
    assert w.engine.abort(request) == w.engine.abort(request, index=order[0]) == []
    assert len(w.generate([prompt_of(4)], warm())) == 1


def test_a_sample_that_goes_while_its_siblings_prefix_is_computed_again_takes_nothing_with_it(folder: Path):
    expected = watched(folder, num_blocks=64).generate([prompt_of(22)], warm(n=3))
    for num_steps in range(1, 9):
        w = watched(folder, block_size=4, num_blocks=32, max_num_batched_tokens=5, preemption="recompute")
        request = w.add(prompt_of(22), warm(n=3))
        group = w.scheduler.groups[request]
        while len(group.members[0].token_ids) < 25:
            w.steps(1)
        send_away(w, request)
        w.steps(num_steps)
        w.engine.abort(request, index=0)
        w.check()
        ends = results_of(w.run())
        assert [ends[request, i].token_ids for i in (1, 2)] == [each.token_ids for each in expected[1:]]


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("kind", ["best-of", "beams"])
def test_one_of_those_that_have_no_index_yet_is_refused(folder: Path, kind: str, num_tokens: int):
    w = watched(folder, num_blocks=32)
    request = w.add(prompt_of(10), warm(**KINDS[kind]))
    w.steps(num_tokens)
    with pytest.raises(UserError, match="beams and the samples of best_of have no index before they are ranked"):
        w.engine.abort(request, index=0)
    assert len(results_of(w.run())) == 2


def test_an_index_that_no_sample_has_changes_nothing(folder: Path):
    w = watched(folder, num_blocks=32)
    request = w.add(prompt_of(10), warm(n=2))
    for _ in range(3):
        assert w.engine.abort(request, index=2) == w.engine.abort(request, index=-1) == []
        w.steps(1)
    assert len(results_of(w.run())) == 2


def test_an_end_while_others_are_aborted_is_told_once(folder: Path):
    free = watched(folder, num_blocks=64).generate([prompt_of(9)], warm(n=3, max_tokens=20))
    others = {*free[0].token_ids[:8], *free[2].token_ids[:8]}
    end = next(token_id for token_id in free[1].token_ids[:7] if token_id not in others)
    w = watched(folder, num_blocks=32)
    request = w.add(prompt_of(9), warm(n=3, max_tokens=20, stop_token_ids=[end]))
    outputs = w.steps(7)
    assert [i for _, i in results_of(outputs)] == [1]
    assert w.engine.abort(request, index=1) == [], "it has ended already"
    assert [result.index for result in w.engine.abort(request)] == [0, 2]
    w.assert_idle()


def test_a_closed_stream_drops_a_request_that_waits_in_the_swap_space(folder: Path):
    w = watched(folder, block_size=4, num_blocks=32, preemption="swap")
    stream = w.llm.stream(prompt_of(9), warm(n=2))
    next(stream)
    send_away(w, 0)
    stream.close()
    w.assert_idle()
