"""What requests and the engine say about the cache: hit tokens, evictions, cached blocks."""

from pathlib import Path

import pytest

from minipaged import LLM, Metrics, SamplingParams
from tests.batching.engines import after_its_first_token, greedy, sent_away, tokens_of
from tests.prefix.engines import KINDS, expected_hits, hits_of, prefix_engine, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


WARM = {"temperature": 1.0, "seed": 3, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (SamplingParams(**WARM), 1),
        (SamplingParams(n=3, **WARM), 3),
        (SamplingParams(n=2, best_of=4, **WARM), 2),
        (SamplingParams(n=2, beam_width=3, max_tokens=6, ignore_eos=True), 2),
    ],
)
def test_every_result_says_what_its_request_has_found(folder: Path, kind: str, params: SamplingParams, count: int):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    prompts = random_prompts(40)
    found = expected_hits(kind, 40, 40, 16)
    for expected in (0, found, found):
        results = w.generate(prompts, params)
        assert all(isinstance(each.metrics, Metrics) and each.metrics.num_evictions == 0 for each in results)
        assert hits_of(results) == [expected] * count
        assert {each.metrics.num_prompt_tokens for each in results} == {40}
    assert w.engine.stats()["hit_tokens"] == 2 * found


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(**WARM),
        SamplingParams(n=3, **WARM),
        SamplingParams(n=2, best_of=4, **WARM),
        SamplingParams(n=2, beam_width=3, max_tokens=6, ignore_eos=True),
    ],
)
@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_what_an_aborted_request_leaves_says_it_too(folder: Path, kind: str, params: SamplingParams, num_steps: int):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    [prompt] = random_prompts(40)
    w.generate([prompt], greedy(1))
    request_id = w.add(prompt, params)
    w.steps(num_steps)
    results = w.engine.abort(request_id)
    found = expected_hits(kind, 40, 40, 16) if num_steps else 0  # it has not looked before it enters
    assert results and hits_of(results) == [found] * len(results)
    assert {each.finish_reason for each in results} == {"abort"}
    w.assert_idle()


def test_a_sample_that_is_aborted_and_one_whose_step_fails_say_it_too(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    [prompt] = random_prompts(40)
    w.generate([prompt], greedy(1))
    request_id = w.add(prompt, SamplingParams(n=3, **WARM))
    w.steps(2)
    results = w.engine.abort(request_id, 1)
    forward, w.engine.model.forward = w.engine.model.forward, lambda *args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        w.engine.step()
    w.engine.model.forward = forward
    results += [output.result for output in w.run() if output.result]
    assert hits_of(results) == [expected_hits(kind, 40, 40, 16)] * 3


def test_a_stream_ends_with_what_was_found(folder: Path, kind: str):
    llm = prefix_engine(folder, prefix_cache=kind, num_blocks=64).llm
    [prompt] = random_prompts(40)
    ends = [[chunk.result for chunk in llm.stream(prompt, greedy(3)) if chunk.result] for _ in range(2)]
    assert [hits_of(each) for each in ends] == [[0], [expected_hits(kind, 40, 40, 16)]]


def test_who_pushes_others_out_of_the_cache_is_told(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, block_size=4, num_blocks=16)
    first, second, third = random_prompts(40, 24, 20)
    assert w.generate([first], greedy(1))[0].metrics.num_evictions == 0
    assert w.engine.stats()["cached_blocks"] == 10
    [result] = w.generate([second], greedy(1))  # takes the six that were never used
    assert result.metrics.num_evictions == 0 and w.engine.stats()["cached_blocks"] == 16
    [result] = w.generate([third], greedy(9))  # five for its prompt, and two for its answer
    assert (result.metrics.num_evictions, w.engine.stats()["evictions"]) == (7, 7)


def test_blocks_are_free_in_use_or_both_cached_and_free_once(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, block_size=4, num_blocks=16)
    [prompt] = random_prompts(22)
    w.generate([prompt], greedy(3))
    stats = w.engine.stats()
    assert (stats["free_blocks"], stats["used_blocks"], stats["cached_blocks"]) == (16, 0, 6)
    w.add(prompt, greedy(8))
    w.add(prompt, greedy(8))
    w.steps(2)
    stats = w.engine.stats()
    assert stats["free_blocks"] + stats["used_blocks"] == stats["num_blocks"] == 16
    shared = [block_id for block_id in range(16) if w.engine.cache.pool.num_references(block_id) == 2]
    assert len(shared) == 5 and stats["used_blocks"] == 5 + 2
    w.run()


def test_coming_back_is_no_hit_of_the_request_but_one_of_the_cache(folder: Path, kind: str):
    w = prefix_engine(folder, prefix_cache=kind, preemption="recompute", num_blocks=64)
    with sent_away(after_its_first_token):
        results = w.generate(random_prompts(40), greedy(4))
    assert hits_of(results) == [0] and w.engine.stats()["hit_tokens"] == (32 if kind == "hash" else 40)


def test_without_a_prefix_cache_nothing_is_counted(folder: Path):
    llm = LLM(folder, prefix_cache=None, num_blocks=64, dtype="float32", device="cpu")
    for _ in range(2):
        results = llm.generate(random_prompts(40), greedy(4))
        assert hits_of(results) == [0] and results[0].metrics.num_evictions == 0
    stats = llm.stats()
    names = ("hit_tokens", "evictions", "cached_blocks", "shared_prefix_launches")
    assert {name: stats[name] for name in names} == dict.fromkeys(names, 0)
    assert stats["free_blocks"] == stats["num_blocks"] == 64


def test_the_facade_has_a_cache_unless_it_is_told_otherwise(folder: Path):
    llm = LLM(folder, num_blocks=64, dtype="float32", device="cpu")
    first, again = (llm.generate(random_prompts(40), greedy(4))[0] for _ in range(2))
    assert llm.rung == "prefix" and hits_of([first, again]) == [0, 32]
    assert tokens_of([first]) == tokens_of([again])
    lru = LLM(folder, num_blocks=64, dtype="float32", device="cpu", eviction_policy="lru", prefix_cache="radix")
    assert hits_of([lru.generate(random_prompts(40), greedy(4))[0] for _ in range(2)]) == [0, 39]
