"""What is sampled does not depend on company, or on being sent away."""

from pathlib import Path
from typing import Any

import pytest

from minipaged import SamplingParams
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


EVERYTHING = {
    "seeded": {"temperature": 0.8, "seed": 42},
    "filtered": {"temperature": 1.2, "seed": 7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "counted": {"temperature": 0, "seed": 8, "frequency_penalty": 1.5},
    "logprobs": {"temperature": 1.0, "seed": 1, "logprobs": 3},
    "samples": {"temperature": 0.9, "seed": 3, "n": 3},
    "best-of": {"temperature": 0.9, "seed": 3, "n": 2, "best_of": 4},
    "beams": {"beam_width": 3, "n": 2, "length_penalty": 0.8, "seed": 9},
}


def everything(max_tokens: int = 14) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, ignore_eos=True, **each) for each in EVERYTHING.values()]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[list[Any]]:
    """Return what each of `everything` gives alone, in a large cache."""
    w = watched(folder, num_blocks=64)
    found = [w.generate([prompt_of(9, seed=i)], each) for i, each in enumerate(everything())]
    assert w.preemptions == 0
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["few-blocks", "after-every-token", "large"])
def test_everything_that_is_sampled_is_the_same_in_company_and_when_sent_away(
    folder: Path, undisturbed: list[list[Any]], policy: str, way: str
):
    w = watched(folder, num_blocks=28 if way == "few-blocks" else 128, block_size=4, preemption=policy)
    prompts = [prompt_of(9, seed=i) for i in range(len(EVERYTHING))]
    when = after_every_token() if way == "after-every-token" else lambda group: False
    with sent_away(when):
        results = w.generate(prompts, everything())
    expected = [result for own in undisturbed for result in own]
    assert tokens_of(results) == tokens_of(expected)
    for result, other in zip(results, expected, strict=True):
        assert (result.text, result.index, result.seed) == (other.text, other.index, other.seed)
        assert result.score == (None if other.score is None else pytest.approx(other.score, abs=1e-4))
        values = [[each.logprob for each in one.logprobs or ()] for one in (result, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-4) and len(values[0]) in (0, 14)
    assert (w.preemptions > 0) == (way != "large") and (w.swaps > 0) == (way != "large" and policy == "swap")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stop_string_that_comes_in_pieces_is_found_by_one_who_is_sent_away_between_them(folder: Path, policy: str):
    free = reference(folder, [prompt_of(9, seed=seed) for seed in range(8)], greedy(16))
    prompt, text, place = next(
        (result.prompt_token_ids, result.text, i)
        for result in free
        for i in range(3, 12)
        if result.text[i : i + 3].isascii() and result.text.find(result.text[i : i + 3]) == i
    )
    stop = text[place : place + 3]
    expected = reference(folder, [prompt], greedy(16, stop=stop))[0]
    w = watched(folder, num_blocks=16, preemption=policy)
    with sent_away(after_every_token()):
        chunks = list(w.llm.stream(prompt, greedy(16, stop=stop)))
    result = chunks[-1].result
    assert (result.text, result.finish_reason, result.token_ids) == (expected.text, "stop", expected.token_ids)
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert w.preemptions >= place
    w.assert_idle()


def test_a_seed_gives_the_same_tokens_next_to_seeded_and_unseeded_neighbours_who_come_and_go(folder: Path):
    def params(seed: int | None, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=0.8, seed=seed, n=n, max_tokens=16, ignore_eos=True)

    alone = {n: tokens_of(watched(folder, num_blocks=64).generate([prompt_of(9)], params(42, n))) for n in (1, 3)}
    assert len({tuple(each) for each in alone[3]}) == 3 and alone[3][0] == alone[1][0]
    for n in (1, 3):
        for neighbours in ([None], [7], [None, 42, None]):
            w = watched(folder, block_size=4, num_blocks=24)
            for i, seed in enumerate(neighbours):
                w.add(prompt_of(4 + i), params(seed))
            w.steps(2)
            assert tokens_of(w.generate([prompt_of(9)], params(42, n))) == alone[n]
