"""A step that fails while another is in flight: everything is freed, nothing that was told is lost, others go on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from minipaged import SamplingParams, use
from minipaged.foundation.sampler import reference as sampler
from minipaged.foundation.sampling import InvalidLogitsError
from tests.batching.engines import Watched, after_its_first_token, greedy, reference, sent_away, tokens_of
from tests.fast.engines import check_seats, fast_engine
from tests.prefix.engines import random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

STEPS = ("+device_batch", "overlap", "all")
PROMPTS = random_prompts(9, 6, 22, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


class BrokenError(Exception):
    """What a replaced operation raises here."""


def fail(*args: Any, **kwargs: Any) -> NoReturn:
    raise BrokenError


def run_until_it_fails(w: Watched, error: type[Exception]) -> list[Any]:
    """Step until an error comes, and return what came before it."""
    outputs: list[Any] = []
    with pytest.raises(error):
        outputs.extend(outputs_of(w))
    w.check()
    assert not w.engine.batch.seats, "what is in the resident tables is not to be trusted"
    return outputs


def outputs_of(w: Watched) -> Iterator[Any]:
    """Step until nothing is left, and yield each output as it comes."""
    while w.engine.has_unfinished():
        yield from w.engine.step()


def ends_of(outputs: list[Any]) -> dict[int, list[str]]:
    """Return how the sequences of each request ended."""
    ends: dict[int, list[str]] = {}
    for output in outputs:
        if output.result:
            ends.setdefault(output.request_id, []).append(output.result.finish_reason)
    return ends


def check_works(w: Watched, folder: Path, prompts: list[list[int]] = PROMPTS) -> None:
    """Check that nothing is left, and that later answers are right."""
    w.assert_idle()
    check_seats(w)
    assert w.engine.in_flight is None
    assert tokens_of(w.generate(prompts, greedy(6))) == tokens_of(reference(folder, prompts, greedy(6)))


def no_token_after(num_calls: int) -> Callable[..., torch.Tensor]:
    """Return a choice of tokens that finds no token for its first row after some calls."""
    calls = iter(range(1000))

    def choose(*args: Any) -> torch.Tensor:
        token_ids = sampler.sample_tokens(*args)
        if next(calls) >= num_calls:
            token_ids[0] = -1
        return token_ids

    return choose


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("steps", STEPS)
def test_a_forward_pass_that_fails_costs_those_who_run_and_nobody_who_waits(folder: Path, steps: str, num_steps: int):
    w = fast_engine(folder, steps, max_num_seqs=3, block_size=4, num_blocks=64)
    requests = [w.add(prompt, greedy(6)) for prompt in PROMPTS]
    w.steps(num_steps)
    with use(ragged_paged_attention=fail):
        run_until_it_fails(w, BrokenError)
    ends = ends_of(w.run())
    assert ends == {request: ["length" if request == requests[-1] else "abort"] for request in requests}
    check_works(w, folder)


@pytest.mark.parametrize("num_calls", [0, 1, 4])
@pytest.mark.parametrize("steps", STEPS)
def test_a_row_without_a_best_token_ends_the_step_by_its_own_error(folder: Path, steps: str, num_calls: int):
    w = fast_engine(folder, steps, max_num_seqs=3, block_size=4, num_blocks=64)
    requests = [w.add(prompt, greedy(6)) for prompt in PROMPTS]
    with use(sample_tokens=no_token_after(num_calls)):
        outputs = run_until_it_fails(w, InvalidLogitsError)
    assert len(outputs) == 3 * num_calls, "the steps before it have been told"
    ends = ends_of(w.run())
    assert ends == {request: ["length" if request == requests[-1] else "abort"] for request in requests}
    check_works(w, folder)


@pytest.mark.parametrize("kind", ["hash", "radix"])
@pytest.mark.parametrize("steps", STEPS)
def test_what_a_step_without_tokens_has_written_is_never_found(folder: Path, steps: str, kind: str):
    w = fast_engine(folder, steps, prefix_cache=kind, block_size=4, num_blocks=64)
    w.add(PROMPTS[2], greedy(6))
    norm = w.engine.model.final_norm.clone()
    w.engine.model.final_norm.fill_(float("nan"))
    run_until_it_fails(w, InvalidLogitsError)
    w.engine.model.final_norm.copy_(norm)
    assert ends_of(w.run()) == {0: ["abort"]}
    [result] = w.generate([PROMPTS[2]], greedy(6))
    assert result.metrics.num_hit_tokens == 0
    check_works(w, folder)


@pytest.mark.parametrize("num_others", [0, 1])
@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_what_an_aborted_request_has_written_is_never_found_if_its_step_fails(folder: Path, kind: str, num_others: int):
    w = fast_engine(folder, "all", prefix_cache=kind, block_size=4, num_blocks=64)
    request = w.add(PROMPTS[2], greedy(6))
    others = [w.add(PROMPTS[0], greedy(6)) for _ in range(num_others)]
    norm = w.engine.model.final_norm.clone()
    w.engine.model.final_norm.fill_(float("nan"))
    w.steps(1)
    assert [result.finish_reason for result in w.engine.abort(request)] == ["abort"]
    w.engine.model.final_norm.copy_(norm)
    if others:
        run_until_it_fails(w, InvalidLogitsError)
    assert ends_of(w.run()) == {other: ["abort"] for other in others}
    [result] = w.generate([PROMPTS[2]], greedy(6))
    assert result.metrics.num_hit_tokens == 0
    check_works(w, folder)


@pytest.mark.parametrize("policy", ["recompute", "swap"])
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_one_who_was_sent_away_with_a_token_that_never_comes_is_dropped_too(folder: Path, steps: str, policy: str):
    def begin() -> Watched:
        w = fast_engine(folder, steps, preemption=policy, max_num_seqs=2, block_size=4, num_blocks=12)
        for prompt in (*random_prompts(15, 14), PROMPTS[0]):
            w.add(prompt, greedy(12))
        return w

    w, num_steps = begin(), 0
    while w.preemptions == 0:
        w.steps(1)
        num_steps += 1
    for error in (BrokenError, InvalidLogitsError):
        w = begin()
        choose = no_token_after(num_steps - 2) if error is InvalidLogitsError else sampler.sample_tokens
        with use(sample_tokens=choose):
            w.steps(num_steps - 1)
        assert w.preemptions == 0
        with use(write_slots=fail) if error is BrokenError else use():
            run_until_it_fails(w, error)
        assert w.preemptions == 1 and w.swaps == (policy == "swap")
        assert ends_of(w.run()) == {0: ["abort"], 1: ["abort"], 2: ["length"]}
        check_works(w, folder)


@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_an_answer_that_came_in_the_failed_step_is_told_with_the_aborts(folder: Path, steps: str):
    [free] = reference(folder, PROMPTS[:1], greedy(6))
    w = fast_engine(folder, steps, block_size=4, num_blocks=64)
    first = w.add(PROMPTS[0], greedy(6, stop_token_ids=[free.token_ids[2]]))
    outputs = w.steps(3)  # its third token is in flight
    second = w.add(PROMPTS[1], greedy(6, logprobs=1))  # makes its step wait
    third = w.add(PROMPTS[3], greedy(6))
    w.engine.choose = fail
    outputs += run_until_it_fails(w, BrokenError)
    del w.engine.choose
    outputs += w.run()
    assert ends_of(outputs) == {first: ["stop"], second: ["abort"], third: ["abort"]}
    told = [token for output in outputs if output.request_id == first for token in output.token_ids]
    assert told == free.token_ids[:3]
    check_works(w, folder)


@pytest.mark.parametrize("steps", STEPS)
def test_an_error_while_several_samples_run_leaves_none_of_them(folder: Path, steps: str):
    w = fast_engine(folder, steps, block_size=4, num_blocks=64)
    params = SamplingParams(n=3, temperature=1, seed=1, max_tokens=8, ignore_eos=True)
    w.add(PROMPTS[0], params)
    w.steps(3)
    with use(write_slots=fail):
        run_until_it_fails(w, BrokenError)
    results = [output.result for output in w.run()]
    assert [(each.index, each.finish_reason) for each in results] == [(index, "abort") for index in range(3)]
    check_works(w, folder)


def test_a_step_that_fails_before_those_who_come_back_costs_only_them(folder: Path):
    w = fast_engine(folder, block_size=4, num_blocks=64)
    for prompt in PROMPTS:
        w.add(prompt, greedy(6))
    with sent_away(after_its_first_token), use(write_slots=fail):
        run_until_it_fails(w, BrokenError)
    assert set(map(tuple, ends_of(w.run()).values())) == {("abort",)}
    check_works(w, folder)
