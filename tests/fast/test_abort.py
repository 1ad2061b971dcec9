"""Requests and samples that are dropped while a token is on its way to them: nothing is left, and others go on."""

from pathlib import Path
from typing import Any

import pytest

from minipaged import SamplingParams
from tests.batching.engines import Watched, prompt_of, send_away
from tests.fast.engines import check_seats, fast_engine, told
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

STEPS = ("+device_batch", "overlap", "all")
SHAPE = {"block_size": 4, "num_blocks": 64}
OTHER = prompt_of(6, seed=5)
PROMPT = prompt_of(21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


def warm(**options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 42} | options))


COMPANY = warm(seed=1, max_tokens=14)


@pytest.fixture(scope="module")
def other_answer(folder: Path) -> Any:
    return fast_engine(folder, "none", **SHAPE).generate([OTHER], COMPANY)[0]


def results_of(outputs: list[Any]) -> dict[tuple[int, int], Any]:
    return {(output.request_id, output.index): output.result for output in outputs if output.result}


def check_gone(w: Watched, company: int, other_answer: Any) -> None:
    """Let the company go on, which nothing has happened to, and check that nothing else is left."""
    w.check()
    ends = results_of([*w.delivered, *w.run()])
    assert [told(result) for (request, _), result in ends.items() if request == company] == [told(other_answer)]
    check_seats(w)
    assert w.engine.in_flight is None and not w.scheduler.groups and not w.engine.families


@pytest.mark.parametrize("num_steps", range(10))
@pytest.mark.parametrize("kind", ["one", "samples", "beams"])
@pytest.mark.parametrize("steps", STEPS)
def test_an_abort_between_any_two_steps_drops_what_was_on_its_way(
    folder: Path, other_answer: Any, steps: str, kind: str, num_steps: int
):
    options = {"one": {}, "samples": {"n": 3}, "beams": {"n": 2, "beam_width": 3}}[kind]
    [*free] = fast_engine(folder, "none", **SHAPE).generate([PROMPT], warm(**options))
    w = fast_engine(folder, steps, max_num_batched_tokens=20, **SHAPE)
    company, request = w.add(OTHER, COMPANY), w.add(PROMPT, warm(**options))
    outputs = w.steps(num_steps)
    dropped = w.engine.abort(request)
    assert w.engine.abort(request) == w.engine.abort(request, index=0) == []
    is_over = any(output.is_last for output in outputs if output.request_id == request)
    assert bool(dropped) != is_over
    for result in dropped:
        assert result.finish_reason == "abort" and result.metrics.num_hit_tokens == 0
        if kind != "beams":
            assert result.token_ids == free[result.index].token_ids[: len(result.token_ids)]
            told_tokens = [
                t for o in outputs if (o.request_id, o.index) == (request, result.index) for t in o.token_ids
            ]
            assert result.token_ids == told_tokens, "it is told what was told before, and no more"
    check_gone(w, company, other_answer)


@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_an_abort_while_the_last_token_is_on_its_way_is_an_abort(folder: Path, other_answer: Any, steps: str):
    w = fast_engine(folder, steps, **SHAPE)
    w.generate([PROMPT], warm(max_tokens=1))
    company, request = w.add(OTHER, COMPANY), w.add(PROMPT, warm(max_tokens=3))
    w.steps(3)
    assert request not in w.scheduler.groups, "to the scheduler it has ended"
    [result] = w.engine.abort(request)
    assert (result.finish_reason, len(result.token_ids)) == ("abort", 2)
    assert result.metrics.num_hit_tokens == 20, "what it had of the cache is still known"
    check_gone(w, company, other_answer)


@pytest.mark.parametrize("num_steps", range(1, 7))
@pytest.mark.parametrize("gone", [[0], [2], [1, 0], [0, 1, 2]])
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_one_sample_goes_and_the_others_are_what_they_would_have_been(
    folder: Path, other_answer: Any, steps: str, gone: list[int], num_steps: int
):
    free = fast_engine(folder, "none", **SHAPE).generate([PROMPT], warm(n=3))
    w = fast_engine(folder, steps, **SHAPE)
    company, request = w.add(OTHER, COMPANY), w.add(PROMPT, warm(n=3))
    outputs = w.steps(num_steps)
    for index in gone:
        [result] = w.engine.abort(request, index=index)
        num_told = sum(len(o.token_ids) for o in outputs if (o.request_id, o.index) == (request, index))
        assert result.token_ids == free[index].token_ids[:num_told] and result.finish_reason == "abort"
        assert w.engine.abort(request, index=index) == []
        w.check()
    outputs += w.run()
    ends = results_of(outputs)
    assert ends.keys() == {(company, 0), *((request, i) for i in range(3) if i not in gone)}
    assert all(told(ends[request, i]) == told(free[i]) for i in range(3) if i not in gone)
    assert sum(output.is_last for output in outputs) == 1 + (len(gone) < 3)
    check_gone(w, company, other_answer)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_one_who_is_dropped_or_ends_after_it_was_sent_away_leaves_nothing(
    folder: Path, other_answer: Any, steps: str, policy: str
):
    [free] = fast_engine(folder, "none", **SHAPE).generate([PROMPT], warm())
    for end, n in ((None, 1), (free.token_ids[2], 1), (None, 3)):
        w = fast_engine(folder, steps, preemption=policy, **SHAPE)
        stops = [] if end is None else [end]
        company, request = w.add(OTHER, COMPANY), w.add(PROMPT, warm(n=n, stop_token_ids=stops))
        w.steps(3)
        send_away(w, request)  # its third token is on its way
        if end is None:
            results = w.engine.abort(request)
            assert {each.finish_reason for each in results} == {"abort"} and len(results) == n
        else:
            outputs = w.steps(1)
            assert told(results_of(outputs)[request, 0])[2:] == ("stop", 0, 42, None, None)
        assert w.scheduler.num_swapped_blocks == 0 and not w.engine.swap_space._staging
        check_gone(w, company, other_answer)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_one_who_is_sent_away_in_the_step_that_brings_its_last_token_leaves_nothing(
    folder: Path, steps: str, policy: str
):
    options = {"preemption": policy, "block_size": 4, "num_blocks": 10}
    params = [warm(seed=1, max_tokens=12), warm(max_tokens=12)]
    prompts = [prompt_of(15, seed=5), prompt_of(14)]
    free = fast_engine(folder, "none", **options).generate(prompts, params)
    w = fast_engine(folder, steps, **options)
    requests = [w.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    num_steps = 0
    while w.preemptions == 0:
        w.steps(1)
        num_steps += 1
    last = num_steps - 2  # its token that was on its way in the step that sent it away
    assert last > 1 and free[1].token_ids.index(free[1].token_ids[last]) == last
    w = fast_engine(folder, steps, **options)
    stopping = warm(max_tokens=12, stop_token_ids=[free[1].token_ids[last]])
    for prompt, each in zip(prompts, (params[0], stopping), strict=True):
        w.add(prompt, each)
    outputs = w.steps(num_steps)
    assert w.preemptions == 1 and (w.swaps > 0) == (policy == "swap")
    result = results_of(outputs)[requests[1], 0]
    assert result.finish_reason == "stop" and result.token_ids == free[1].token_ids[: last + 1]
    assert w.scheduler.num_swapped_blocks == 0 and not w.engine.swap_space._staging
    assert w.scheduler.num_waiting == 0 and told(results_of(w.run())[requests[0], 0]) == told(free[0])


@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_when_all_are_dropped_nothing_is_left_to_wait_for(folder: Path, steps: str):
    w = fast_engine(folder, steps, **SHAPE)
    requests = [w.add(prompt, warm()) for prompt in (OTHER, PROMPT)]
    for num_steps in (1, 2):
        w.steps(num_steps)
        w.engine.abort(requests.pop())
    assert not w.engine.has_unfinished() and w.engine.step() == []
    w.assert_idle()
    stream = w.llm.stream(PROMPT, warm())
    next(stream)
    stream.close()
    w.assert_idle()
    assert len(w.generate([PROMPT], warm())[0].token_ids) == 6
