"""Who finds whose blocks, and what this rung refuses."""

from pathlib import Path

import pytest

from minipaged import LLM, SamplingParams, UserError
from minipaged.llm import RUNGS
from tests.batching.engines import after_its_first_token, greedy, reference, sent_away, tokens_of
from tests.prefix.engines import KINDS, hits_of, prefix_engine, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

LOWER = RUNGS[: RUNGS.index("prefix")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def salted(*salts: str | None) -> list[SamplingParams]:
    return [greedy(4) if salt is None else greedy(4, cache_salt=salt) for salt in salts]


def test_only_requests_of_one_salt_find_each_other(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    prompts = random_prompts(64)
    results = [w.generate(prompts, params)[0] for params in salted("a", "b", "a", None, "", "A", "a ")]
    found = 48 if kind == "hash" else 63
    assert hits_of(results) == [0, 0, found, 0, found, 0, 0]
    assert tokens_of(results) == tokens_of(reference(folder, prompts, greedy(4))) * 7


def test_requests_of_different_salts_share_nothing_at_the_same_time(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    [prompt] = random_prompts(64)
    results = w.generate([prompt] * 4, salted("a", "b", "b", "a"))
    found = 48 if kind == "hash" else 63
    assert sorted(hits_of(results)) == [0, 0, found, found] and hits_of(results)[:2] == [0, 0]
    assert tokens_of(results) == tokens_of(reference(folder, [prompt], greedy(4))) * 4


def test_a_salt_is_kept_when_a_request_is_sent_away(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, preemption="recompute", num_blocks=8)
    [prompt] = random_prompts(33)
    with sent_away(after_its_first_token):
        results = w.generate([prompt] * 2, salted("a", "b"))
    assert w.preemptions == 2 and hits_of(results) == [0, 0]
    assert tokens_of(results) == tokens_of(reference(folder, [prompt], greedy(4))) * 2
    own = 32 if kind == "hash" else 33  # each has found its own blocks when it came back
    assert w.engine.stats()["hit_tokens"] == 2 * own
    assert hits_of([w.generate([prompt], salted(salt)[0])[0] for salt in "cab"])[0] == 0


def test_half_a_character_may_be_a_salt(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    results = [w.generate(random_prompts(40), salted("\udcc3"))[0] for _ in range(2)]
    assert hits_of(results)[1] > 0


@pytest.mark.parametrize("salt", [7, b"a", ["a"], "x" * 257])
def test_a_salt_is_text_of_at_most_256_characters(salt: object):
    with pytest.raises(UserError, match="cache_salt must be text of at most 256 characters"):
        SamplingParams(cache_salt=salt)  # type: ignore[arg-type]
    assert SamplingParams(cache_salt="x" * 256).cache_salt == "x" * 256


def test_a_salt_without_a_prefix_cache_does_no_harm(folder: Path):
    for options in ({"prefix_cache": None}, {"cache": "contiguous", "max_model_len": 128}):
        llm = LLM(folder, dtype="float32", device="cpu", num_blocks=16, **options)
        results = llm.generate(random_prompts(33), salted("a"))
        assert tokens_of(results) == tokens_of(reference(folder, random_prompts(33), greedy(4)))


# -- refusals


@pytest.mark.parametrize("rung", LOWER)
def test_lower_rungs_know_neither_salts_nor_a_prefix_cache(folder: Path, rung: str):
    shape = {} if rung == "foundation" else {"num_blocks": 8, "max_model_len": 64}
    for options in ({"prefix_cache": "radix"}, {"eviction_policy": "lru"}):
        [name] = options
        with pytest.raises(UserError, match=f"rung '{rung}' does not know {name} .* rung 'prefix' has it"):
            LLM(folder, rung=rung, device="cpu", **shape, **options)
    llm = LLM(folder, rung=rung, dtype="float32", device="cpu", prefix_cache=None, **shape)  # none is what it has
    with pytest.raises(UserError, match=f"rung '{rung}' does not know cache_salt .* rung 'prefix' has it"):
        llm.generate(random_prompts(5), salted("a"))
    assert llm.generate(random_prompts(5), salted(""))[0].token_ids


@pytest.mark.parametrize("value", ["", "tree", "HASH", True, 1])
def test_an_unknown_prefix_cache_is_refused_with_those_that_there_are(folder: Path, value: object):
    with pytest.raises(UserError, match="prefix_cache must be hash, radix or None, not"):
        LLM(folder, device="cpu", num_blocks=8, prefix_cache=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "mru", "LRU", 1])
def test_an_unknown_eviction_policy_is_refused_with_those_that_there_are(folder: Path, value: object):
    with pytest.raises(UserError, match=r"eviction_policy must be one of .*lru.*, not"):
        LLM(folder, device="cpu", num_blocks=8, eviction_policy=value)  # type: ignore[arg-type]


def test_the_contiguous_cache_works_on_this_rung_and_refuses_a_prefix_cache(folder: Path):
    options = {"cache": "contiguous", "num_blocks": 16, "max_model_len": 64, "dtype": "float32", "device": "cpu"}
    with pytest.raises(UserError, match="contiguous cache cannot share"):
        LLM(folder, prefix_cache="radix", **options)
    for others in ({}, {"prefix_cache": None}):
        llm = LLM(folder, **options, **others)
        for _ in range(2):
            results = llm.generate(random_prompts(33, 5), greedy(6))
            assert tokens_of(results) == tokens_of(reference(folder, random_prompts(33, 5), greedy(6)))
            assert hits_of(results) == [0, 0]
        assert llm.rung == "prefix" and llm.stats()["hit_tokens"] == 0
