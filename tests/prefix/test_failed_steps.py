"""A step that breaks off: nothing stays held, and what it was about to write is never found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from minipaged import SamplingParams, use
from tests.batching.engines import Watched, greedy, reference, send_away, tokens_of
from tests.prefix.engines import KINDS, forget_idle_blocks, hits_of, prefix_engine, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class BrokenError(Exception):
    """What a replaced operation raises here."""


def fail(*args: Any, **kwargs: Any) -> NoReturn:
    raise BrokenError


def fail_in_layer(layer: int) -> Callable[..., None]:
    """Return a write that works until it comes to a layer."""
    from minipaged.paged.reference import write_slots

    calls = iter(range(layer + 1))

    def write(*args: Any) -> None:
        if next(calls) == layer:
            raise BrokenError
        write_slots(*args)

    return write


def break_step(w: Watched, **parts: Callable[..., Any]) -> None:
    """Let a step break off, and hear of the ends of those that it costs."""
    with use(**parts), pytest.raises(BrokenError):
        w.engine.step()
    w.check()
    results = [output.result for output in w.engine.step()]
    assert results and {each.finish_reason for each in results} == {"abort"}


def check_answers(w: Watched, folder: Path, prompts: list[list[int]]) -> list[int]:
    """Check later answers, and return how many tokens they have found."""
    results = [w.generate([prompt], greedy(6))[0] for prompt in prompts]
    assert tokens_of(results) == tokens_of(reference(folder, prompts, greedy(6)))
    return hits_of(results)


@pytest.mark.parametrize("part", ["copy_blocks", "write_slots", "layer 1", "ragged_paged_attention"])
def test_a_step_that_fails_with_hits_holds_nothing_and_leaves_nothing_wrong(folder: Path, kind: str, part: str):
    if part == "copy_blocks" and kind == "hash":
        part = "write_slots"  # nothing is copied
    w = prefix_engine(folder, prefix_cache=kind, block_size=4, num_blocks=64)
    [base] = random_prompts(22)
    w.generate([base], greedy(8))
    other = [*base[:14], 9, 8, 7, 6, 5, 4]
    w.add(other, greedy(8))
    break_step(w, **({"write_slots": fail_in_layer(1)} if part == "layer 1" else {part: fail}))
    w.run()
    hits = check_answers(w, folder, [[*other, 1, 2, 3], base, other])
    assert hits[:2] == ([14, 21] if kind == "radix" else [12, 20])


def test_copies_for_forks_that_were_not_made_are_never_found(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, block_size=4, num_blocks=64)
    [prompt] = random_prompts(10)
    w.add(prompt, SamplingParams(n=3, temperature=1, seed=1, max_tokens=8, ignore_eos=True))
    w.steps(1)
    break_step(w, copy_blocks=fail)
    w.run()
    assert check_answers(w, folder, [[*prompt, 1, 2, 3]]) == [8]


def test_blocks_that_were_not_swapped_in_are_never_found(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, preemption="swap", block_size=4, num_blocks=64)
    [prompt] = random_prompts(10)
    request_id = w.add(prompt, greedy(8))
    w.steps(2)
    send_away(w, request_id)
    break_step(w, scatter_blocks=fail)
    w.run()
    assert check_answers(w, folder, [[*prompt, 1, 2, 3]]) == [8]


def test_blocks_that_were_not_swapped_out_cost_only_their_request(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, preemption="swap", block_size=4, num_blocks=10)
    prompts = random_prompts(15, 14)
    for prompt in prompts:
        w.add(prompt, greedy(12))
    with use(gather_blocks=fail), pytest.raises(BrokenError):
        w.run()
    w.check()
    w.run()
    assert sum(check_answers(w, folder, prompts)) > 0


def test_what_a_family_that_came_back_has_not_computed_is_never_found(folder: Path, kind: str):
    options = {"preemption": "recompute", "max_num_batched_tokens": 3, "block_size": 4, "num_blocks": 64}
    w = prefix_engine(folder, prefix_cache=kind, **options)
    [prompt] = random_prompts(22)
    request_id = w.add(prompt, SamplingParams(n=2, temperature=1, seed=1, max_tokens=8, ignore_eos=True))
    w.steps(11)
    assert len(w.engine.members[request_id]) == 2
    send_away(w, request_id)
    forget_idle_blocks(w)
    w.steps(1)  # the first of the two begins with what they share
    w.engine.abort(request_id)
    w.check()
    assert check_answers(w, folder, [[*prompt, 1, 2, 3]])[0] <= 3
