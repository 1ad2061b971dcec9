"""Rows that begin in the same blocks read those once, and get the answers that they get alone."""

from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams, use
from minipaged.prefix.reference import shared_prefix_attention_merged
from tests.batching.engines import Watched, greedy, tokens_of
from tests.prefix.engines import KINDS, hits_of, num_prefilled, prefix_engine, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", **SMALL)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


class Spy:
    """Note the groups of every launch, and compute them."""

    def __init__(self) -> None:
        self.groups: list[tuple[list[int], list[int]]] = []

    def __call__(
        self, q: Any, k: Any, v: Any, tables: Any, lens: Any, starts: Any, prefixes: Any, **others: Any
    ) -> Any:
        self.groups.append((starts.tolist(), prefixes.tolist()))
        for start, end, length in zip(starts[:-1], starts[1:], prefixes, strict=True):
            num_blocks = -(-int(length) // k.shape[1])
            assert (tables[start:end, :num_blocks] == tables[start, :num_blocks]).all(), "these blocks are not shared"
            assert (lens[start:end] > length).all()
        return shared_prefix_attention_merged(q, k, v, tables, lens, starts, prefixes, **others)


def run_spied(w: Watched, prompts: list[list[int]], params: Any) -> tuple[list[Any], Spy]:
    spy = Spy()
    with use(shared_prefix_attention=spy):
        results = w.generate(prompts, params)
    return results, spy


def test_a_system_prompt_of_64_requests_is_computed_once(folder: Path):
    system, *own = random_prompts(2048, *[3 + i % 5 for i in range(64)])
    prompts = [system + each for each in own]
    w = prefix_engine(folder, num_blocks=256)
    results = w.generate(prompts, greedy(4))
    num_own = sum(map(len, own))
    assert num_prefilled(w) == 2048 + num_own
    assert sum(event.num_tokens for event in w.events if event.act == "decode") == 64 * 3
    assert hits_of(results) == [0] + [2048] * 63
    stats = w.engine.stats()
    assert stats["hit_tokens"] == 63 * 2048 and stats["shared_prefix_launches"] > 0 and w.preemptions == 0
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_blocks": 2048}
    plain = LLM(folder, prefix_cache=None, **options)
    assert tokens_of(results) == tokens_of(plain.generate(prompts, greedy(4)))
    assert plain.stats()["shared_prefix_launches"] == plain.stats()["hit_tokens"] == 0
    assert len({tuple(tokens) for tokens in tokens_of(results)}) > 32, "answers that are all alike show nothing"


def test_groups_stand_side_by_side_and_share_whole_units(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 16)
    first, second, *own = random_prompts(40, 72, 3, 4, 5, 6, 7)
    prompts = [first + own[0], second + own[1], own[4], first + own[2], second + own[3]]
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=128, block_size=8)
    results, spy = run_spied(w, prompts, greedy(6))
    groups = {(tuple(starts), tuple(prefixes)) for starts, prefixes in spy.groups}
    assert ((0, 2, 4), (32, 64)) in groups, "whole units of 16, of the 40 and 72 tokens that are shared"
    assert w.engine.stats()["shared_prefix_launches"] == len(spy.groups)
    alone = LLM(folder, rung="foundation", dtype="float32", device="cpu").generate(prompts, greedy(6))
    assert tokens_of(results) == tokens_of(alone)


def test_rows_that_decode_together_stand_beside_prompts_that_go_in(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 16)
    common, *own = random_prompts(32, 3, 4, 50)
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64, max_num_batched_tokens=12)
    prompts = [common + own[0], common + own[1], own[2]]
    results, spy = run_spied(w, prompts, greedy(12))
    mixed = [event.step for event in w.events if event.act == "chunk" and event.request_id == 2]
    together = [step for step in mixed if sum(e.step == step and e.act == "decode" for e in w.events) == 2]
    assert together and spy.groups and all(starts[-1] == 2 for starts, _ in spy.groups)
    alone = LLM(folder, rung="foundation", dtype="float32", device="cpu").generate(prompts, greedy(12))
    assert tokens_of(results) == tokens_of(alone)


def test_samples_share_what_they_were_forked_from(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 16)
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=64)
    prompts = random_prompts(40)
    results, spy = run_spied(w, prompts, SamplingParams(n=4, temperature=1, seed=3, max_tokens=6, ignore_eos=True))
    assert spy.groups == [([0, 4], [32])] * len(spy.groups) and spy.groups
    alone = [SamplingParams(temperature=1, seed=each.seed, max_tokens=6, ignore_eos=True) for each in results]
    expected = LLM(folder, rung="foundation", dtype="float32", device="cpu").generate(prompts * 4, alone)
    assert tokens_of(results) == tokens_of(expected)


@pytest.mark.parametrize("length", [1023, 1024, 1025, 1040])
def test_less_than_a_unit_is_not_shared(folder: Path, length: int):
    prompt, *_ = random_prompts(length)
    w = prefix_engine(folder, num_blocks=160)
    w.generate([[*prompt, 1]], greedy(1))
    _, spy = run_spied(w, [[*prompt, 2, 3], [*prompt, 4, 5]], greedy(3))
    found = length // 16 * 16
    assert bool(spy.groups) == (found >= 1024)
    assert all(each == ([0, 2], [1024]) for each in spy.groups)


@pytest.mark.parametrize(
    ("architecture", "sizes", "layers"),
    [
        ("mistral", {"sliding_window": 24}, 0),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, 1),
        ("llama", {}, 2),
    ],
)
def test_only_layers_that_see_the_beginning_share_it(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], layers: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 16)
    folder = make_tiny_model(tmp_path, architecture, **sizes)
    common, *own = random_prompts(32, 3, 4)
    prompts = [common + each for each in own]
    w = prefix_engine(folder, num_blocks=32)
    results, spy = run_spied(w, prompts, greedy(5))
    steps = {e.step for e in w.events if e.act == "decode" and sum(o.step == e.step for o in w.events) == 2}
    assert len(spy.groups) >= layers * len(steps) and bool(spy.groups) == (layers > 0)
    assert len(spy.groups) % max(layers, 1) == 0
    alone = LLM(folder, rung="foundation", dtype="float32", device="cpu").generate(prompts, greedy(5))
    assert tokens_of(results) == tokens_of(alone)


def test_a_plan_of_ones_own_needs_no_groups(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from minipaged.batching.scheduler import Scheduler

    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 16)
    common, *own = random_prompts(32, 3, 4)
    prompts = [common + each for each in own]
    w = prefix_engine(folder, num_blocks=32)
    with use(plan_step=Scheduler.plan_step):
        plain = w.generate(prompts, greedy(5))
    assert w.engine.stats()["shared_prefix_launches"] == 0
    assert tokens_of(w.generate(prompts, greedy(5))) == tokens_of(plain)
    assert w.engine.stats()["shared_prefix_launches"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("tier", ["torch", "triton"])
def test_on_a_gpu_a_shared_system_prompt_gives_the_tokens_of_a_run_without_a_cache(
    folder: Path, kind: str, tier: str, is_eager: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.fast.engine.MIN_SHARED_BYTES", 1)
    system, *own = random_prompts(2048, *[3 + i % 5 for i in range(16)])
    prompts = [system + each for each in own]
    w = prefix_engine(folder, prefix_cache=kind, num_blocks=256, tier=tier, device="cuda", enforce_eager=is_eager)
    results = w.generate(prompts, greedy(8))
    assert w.engine.stats()["shared_prefix_launches"] > 0
    plain = LLM(folder, prefix_cache=None, num_blocks=4096, tier=tier, device="cuda", dtype="float32")
    assert tokens_of(results) == tokens_of(plain.generate(prompts, greedy(8)))
