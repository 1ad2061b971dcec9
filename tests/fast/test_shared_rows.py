"""Decode steps of a fixed size whose rows read together what they have in common."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams, use
from minipaged.batching.plan import Plan
from minipaged.fast.inputs import MAX_SHARED_GROUPS, DecodeInputs
from minipaged.prefix.reference import shared_prefix_attention_merged
from minipaged.prefix.scheduler import PrefixPlan, SharedRows
from tests.batching.engines import greedy, tokens_of
from tests.fast.engines import fast_engine
from tests.prefix.engines import random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

MEMORY: dict[str, Any] = {"num_blocks": 512, "block_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Note the groups of every launch, and compute them; units of 8 tokens keep prompts short."""
    seen: list[tuple[list[int], list[int]]] = []

    def spied(q: Any, k: Any, v: Any, tables: Any, lens: Any, starts: Any, prefixes: Any, **others: Any) -> Any:
        seen.append((starts.tolist(), prefixes.tolist()))
        return shared_prefix_attention_merged(q, k, v, tables, lens, starts, prefixes, **others)

    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 8)
    monkeypatch.setattr("minipaged.prefix.reference.shared_prefix_attention_merged", spied)
    return seen


@pytest.mark.parametrize("steps", ["graphs", "all"])
@pytest.mark.parametrize("num_groups", [1, MAX_SHARED_GROUPS, MAX_SHARED_GROUPS + 2])
def test_steps_of_a_fixed_size_read_up_to_eight_beginnings_once(
    folder: Path, launches: list[Any], steps: str, num_groups: int
):
    lengths = [16] * num_groups, [3 + i % 4 for i in range(2 * num_groups)]
    drawn = random_prompts(*lengths[0], *lengths[1], 9, 17)
    beginnings, own, others = drawn[:num_groups], drawn[num_groups:-2], drawn[-2:]
    prompts = [beginnings[i % num_groups] + each for i, each in enumerate(own)] + others
    w = fast_engine(folder, steps, **MEMORY)
    answers = tokens_of(w.generate(prompts, greedy(5)))
    fixed = [each for each in launches if len(each[1]) == MAX_SHARED_GROUPS + 1]
    starts, prefixes = fixed[len(fixed) // 2]
    shared = min(num_groups, MAX_SHARED_GROUPS)
    assert prefixes == [16] * shared + [0] * (MAX_SHARED_GROUPS + 1 - shared)
    assert starts[: shared + 1] == list(range(0, 2 * shared + 1, 2)) and set(starts[shared + 1 :]) == {
        w.engine.graphs.size_for(len(prompts))
    }
    plain = fast_engine(folder, "none", prefix_cache=None, **MEMORY)
    assert answers == tokens_of(plain.generate(prompts, greedy(5)))


def test_a_readers_attention_still_gets_the_groups_of_an_eager_step(folder: Path, launches: list[Any]):
    common, *own = random_prompts(16, 3, 4)
    called = []

    def mine(*args: Any, **options: Any) -> Any:
        called.append(len(args[-1]))
        return shared_prefix_attention_merged(*args, **options)

    w = fast_engine(folder, "all", **MEMORY)
    with use(shared_prefix_attention=mine):
        w.generate([common + each for each in own], greedy(4))
    assert called and set(called) == {1}, "one group, and no empty ones of a fixed size"
    assert w.engine.stats()["fixed_size_steps"] == 0


def chunk(name: int, length: int) -> Any:
    return SimpleNamespace(name=name, stop=length)


def test_long_rows_go_first_within_their_group_and_groups_stay_at_the_front(folder: Path):
    engine: Any = fast_engine(folder, "all", **MEMORY).engine
    chunks = [chunk(i, length) for i, length in enumerate([20, 30, 10, 50, 40, 60, 70])]
    engine.arrange(plan := PrefixPlan(chunks=chunks, shared=[SharedRows(2, 8), SharedRows(3, 8)]))
    assert [each.name for each in plan.chunks] == [1, 0, 3, 4, 2, 6, 5]
    engine.arrange(plan := Plan(chunks=chunks))
    assert [each.stop for each in plan.chunks] == [70, 60, 50, 40, 30, 20, 10]


def test_on_a_gpu_few_common_bytes_are_not_read_together(folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine: Any = fast_engine(folder, "all", **MEMORY).engine
    engine.graphs.is_recorded = True
    num_bytes = engine.model.config.kv_bytes_per_token(engine.model.dtype) * 16 * 2
    for least, count in ((num_bytes, 1), (num_bytes + 1, 0)):
        monkeypatch.setattr("minipaged.fast.engine.MIN_SHARED_BYTES", least)
        engine.arrange(plan := PrefixPlan(chunks=[chunk(i, 20) for i in range(3)], shared=[SharedRows(3, 16)]))
        assert len(plan.shared) == count


def test_a_recording_sees_no_groups():
    inputs = DecodeInputs(8, 4, torch.device("cpu"))
    inputs.set_groups([SharedRows(3, 1024)], 8)
    before = [part.tolist() for part in inputs.groups]
    with inputs.without_groups():
        assert not any(part.any() for part in inputs.groups)
    assert [part.tolist() for part in inputs.groups] == before


@pytest.mark.parametrize("steps", ["none", "graphs", "all"])
@pytest.mark.parametrize("unit", [8, 1024])
def test_beams_that_share_in_pairs_keep_their_order(
    tmp_path: Path, steps: str, unit: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", unit)
    folder = make_tiny_model(tmp_path, "llama", num_hidden_layers=1, max_position_embeddings=2048)
    prompts = random_prompts(*[unit - 4] * 3)
    params = SamplingParams(beam_width=4, n=4, max_tokens=12, ignore_eos=True)
    memory: dict[str, Any] = {"num_blocks": 2048, "block_size": 4}
    plain = LLM(folder, rung="sharing", dtype="float32", device="cpu", **memory)
    w = fast_engine(folder, steps, **memory)
    assert tokens_of(w.generate(prompts, params)) == tokens_of(plain.generate(prompts, params))
    assert w.engine.stats()["shared_prefix_launches"] > 0
