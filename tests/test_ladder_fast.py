"""The identity matrix above the rungs: every step of speed alone and with others, on and off."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams
from tests.batching.engines import Watched, after_every_token, after_its_first_token, greedy, sent_away, tokens_of
from tests.fast.engines import COMBINATIONS, MAIN, check_steps, fast_engine
from tests.identity import (
    ARCHITECTURES,
    NUM_OUTPUT_TOKENS,
    Oracle,
    SameTokens,
    count_cells,
    counting_comparison,
    make_oracle,
)
from tests.prefix.engines import KINDS, hits_of, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

POLICIES = ("recompute", "swap")
WITH_SIZES = [name for name, steps in COMBINATIONS.items() if {"graphs", "device_batch"} & set(steps)]


@pytest.fixture
def same_tokens(request: pytest.FixtureRequest) -> SameTokens:
    return counting_comparison(request.node.nodeid)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("tiny"), request.param)


def slots(num_slots: int, block_size: int) -> dict[str, Any]:
    """Return the shape of a cache of so many slots."""
    return {"block_size": block_size, "num_blocks": num_slots // block_size}


def first_tokens(answers: list[list[int]], num_tokens: int) -> list[list[int]]:
    return [answer[:num_tokens] for answer in answers]


# -- any budget, any size of a batch


@pytest.mark.parametrize("steps", COMBINATIONS)
def test_tokens_are_those_of_transformers_in_any_chunks(oracle: Oracle, steps: str, same_tokens):
    prompts, answers = oracle.prompts[2:7], first_tokens(oracle.answers[2:7], 5)
    for block_size, budget in ((1, 8192), (4, 5), (16, 24)):
        w = fast_engine(oracle.folder, steps, max_num_batched_tokens=budget, **slots(192, block_size))
        same_tokens(tokens_of(w.generate(prompts, greedy(5))), answers)
        assert w.preemptions == 0
        check_steps(w, steps)


def sizes_of(w: Watched) -> set[int]:
    """Return a set that fills with the sizes that decode steps are filled up to."""
    sizes: set[int] = set()
    run = w.engine.graphs.run
    w.engine.graphs.run = lambda kind, size: (sizes.add(size), run(kind, size))
    return sizes


@pytest.mark.parametrize("steps", WITH_SIZES)
def test_batches_that_are_filled_up_get_the_same_tokens(oracle: Oracle, steps: str, same_tokens):
    for rung, max_num_seqs, expected in (("prefix", 7, {1, 2, 4, 7}), ("batching", 3, {1, 2, 3})):
        w = fast_engine(oracle.folder, steps, rung=rung, max_num_seqs=max_num_seqs, **slots(512, 4))
        sizes = sizes_of(w)
        lengths = range(2, 10)  # one after the other ends
        results = w.generate(oracle.prompts, [greedy(length) for length in lengths])
        pairs = zip(oracle.answers, lengths, strict=True)
        same_tokens(tokens_of(results), [answer[:length] for answer, length in pairs])
        assert sizes == expected
        check_steps(w, steps)


# -- sent away


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", MAIN)
def test_those_who_are_sent_away_get_the_same_tokens(oracle: Oracle, steps: str, policy: str, same_tokens):
    for block_size, budget, num_slots in ((1, 8192, 64), (4, 7, 56), (16, 8192, 64)):
        options = {"preemption": policy, "prefix_cache": None, "max_num_batched_tokens": budget}
        w = fast_engine(oracle.folder, steps, **options, **slots(num_slots, block_size))
        with sent_away(after_its_first_token):  # under a sliding window nobody would run out of blocks
            same_tokens(tokens_of(w.generate(oracle.prompts[3:], greedy(8))), first_tokens(oracle.answers[3:], 8))
        assert w.preemptions >= len(oracle.prompts[3:]) and (w.swaps > 0) == (policy == "swap")
        check_steps(w, steps)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_those_who_are_sent_away_after_every_token_get_the_same_tokens(oracle: Oracle, steps, policy, same_tokens):
    w = fast_engine(oracle.folder, steps, preemption=policy, **slots(512, 4))
    with sent_away(after_every_token()):
        same_tokens(tokens_of(w.generate(oracle.prompts, greedy(8))), first_tokens(oracle.answers, 8))
    assert w.preemptions >= len(oracle.prompts) * 7 and (w.swaps > 0) == (policy == "swap")
    assert w.engine.stats()["late_steps"] > 0


@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_those_who_run_out_of_blocks_get_the_same_tokens(oracle: Oracle, steps: str, same_tokens):
    for policy in POLICIES:
        w = fast_engine(oracle.folder, steps, preemption=policy, prefix_cache=None, **slots(64, 4))
        same_tokens(tokens_of(w.generate(oracle.prompts, greedy(NUM_OUTPUT_TOKENS))), oracle.answers)
        assert w.preemptions > 0 and (w.swaps > 0) == (policy == "swap")
        check_steps(w, steps)


# -- forked


@pytest.fixture(scope="module")
def families(oracle: Oracle) -> tuple[list[Any], list[list[int]]]:
    """Return parameters of samples, beams and a lone answer, and what rung 3 makes of them."""
    warm = {"temperature": 0.9, "max_tokens": 8, "ignore_eos": True}
    params = [
        SamplingParams(n=3, seed=3, **warm),
        SamplingParams(n=2, beam_width=3, max_tokens=8, ignore_eos=True),
        SamplingParams(n=2, best_of=3, seed=5, **warm),
        SamplingParams(seed=7, top_k=20, top_p=0.9, min_p=0.01, **warm),
    ]
    reference = LLM(oracle.folder, rung="sharing", dtype="float32", device="cpu", **slots(512, 4))
    expected = reference.generate(oracle.prompts[1:5], params)
    return params, tokens_of(expected)


@pytest.mark.parametrize("policy", [None, *POLICIES])
@pytest.mark.parametrize("steps", MAIN)
def test_samples_and_beams_get_the_tokens_of_lower_rungs(oracle: Oracle, families, steps, policy, same_tokens):
    params, expected = families
    for block_size in (4, 16):
        shape = slots(80 if policy else 512, block_size)
        w = fast_engine(oracle.folder, steps, preemption=policy, prefix_cache=None, **shape)
        with sent_away(after_its_first_token if policy else lambda group: False):
            results = w.generate([*oracle.prompts[1:5], oracle.prompts[5]], [*params, greedy(8)])
        same_tokens(tokens_of(results), [*expected, oracle.answers[5][:8]])
        assert w.engine.stats()["copies"] > 0 and (w.preemptions > 0) == (policy is not None)
        assert (w.swaps > 0) == (policy == "swap")
    lone = w.generate(oracle.prompts[4:6], [params[-1], greedy(8)])  # without beams every step may come late
    same_tokens(tokens_of(lone), [expected[-1], oracle.answers[5][:8]])
    check_steps(w, steps)


# -- found again


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", MAIN)
def test_hits_and_evictions_give_the_same_tokens(oracle: Oracle, steps: str, kind: str, same_tokens):
    for block_size in (1, 4, 16):
        w = fast_engine(oracle.folder, steps, prefix_cache=kind, **slots(512, block_size))
        for prompts, answers in ((oracle.prompts, oracle.answers), (oracle.prompts[::-1], oracle.answers[::-1])):
            results = w.generate(prompts, greedy(6))
            same_tokens(tokens_of(results), first_tokens(answers, 6))
        assert sum(hits_of(results)) > 0
        check_steps(w, steps)
    w = fast_engine(oracle.folder, steps, prefix_cache=kind, **slots(64, 4))
    num_hits = 0
    for prompt, answer in zip(oracle.prompts[4:] * 2, oracle.answers[4:] * 2, strict=True):
        results = [w.generate([prompt], greedy(4))[0] for _ in range(2)]
        same_tokens(tokens_of(results), [answer[:4]] * 2)
        num_hits += sum(hits_of(results))
    assert num_hits > 0 and w.engine.stats()["evictions"] > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", ["overlap", "all"])
def test_hits_evictions_and_preemptions_together_give_the_same_tokens(oracle: Oracle, steps, policy, same_tokens):
    for kind in KINDS:
        options = {"prefix_cache": kind, "preemption": policy, "max_num_batched_tokens": 24}
        w = fast_engine(oracle.folder, steps, **options, **slots(64, 4))
        prompts, answers = ([each for each in half[3:] for _ in range(2)] for half in (oracle.prompts, oracle.answers))
        with sent_away(after_its_first_token):
            same_tokens(tokens_of(w.generate(prompts, greedy(10))), first_tokens(answers, 10))
        stats = w.engine.stats()
        assert min(stats[name] for name in ("hit_tokens", "evictions", "preemptions")) > 0
        assert (w.swaps > 0) == (policy == "swap")
        check_steps(w, steps)


@pytest.mark.parametrize("steps", ["graphs", "all"])
def test_rows_that_read_their_common_beginning_together_get_the_same_tokens(
    oracle: Oracle, steps: str, same_tokens, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 8)  # the torch tier takes prefixes of any length
    first, second, *own = random_prompts(17, 24, 3, 5, 9, 4, 6, 2)
    prompts = [(second if i % 2 else first) + each for i, each in enumerate(own)]
    plain = fast_engine(oracle.folder, "none", **slots(512, 4)).generate(prompts, greedy(6))
    w = fast_engine(oracle.folder, steps, **slots(512, 4))
    same_tokens(tokens_of(w.generate(prompts, greedy(6))), tokens_of(plain))
    is_seen = w.engine.window is None  # with a window in every layer nobody looks at the beginning
    assert (w.engine.stats()["shared_prefix_launches"] > 0) == is_seen


# -- kernels in the interpreter and on a GPU

INTERPRETED = [
    ("llama", "all", {"prefix_cache": "radix"}),
    ("qwen2", "all but graphs", {"num_blocks": 5, "preemption": "swap"}),
    ("qwen3", "all", {"num_blocks": 5, "preemption": "recompute"}),
    ("mistral", "+graphs", {}),
]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a GPU to be absent: kernels are compiled where there is one"
)
@pytest.mark.parametrize(("architecture", "steps", "options"), INTERPRETED)
def test_the_kernels_give_the_tokens_of_the_torch_tier_in_the_interpreter(
    tmp_path: Path, architecture: str, steps: str, options: dict, same_tokens
):
    sizes: dict[str, Any] = {
        **ARCHITECTURES[architecture],
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    folder = make_tiny_model(tmp_path, architecture, **sizes)
    prompts = [[5, 9, 200, 31, 7, 8], [5, 9, 200, 31, 7, 9], [77, 3]]
    answers = {}
    for tier in ("torch", "triton"):
        taken = steps if tier == "triton" else "none"
        w = fast_engine(folder, taken, tier=tier, block_size=4, max_model_len=16, **({"num_blocks": 16} | options))
        answers[tier] = tokens_of(w.generate(prompts, greedy(5)))
        assert (w.preemptions > 0) == ("preemption" in options)
        check_steps(w, taken)
    same_tokens(answers["triton"], answers["torch"])


def check_graphs(w: Watched, steps: str) -> None:
    """Check that decode steps were replayed, and were recorded before the first request."""
    check_steps(w, steps)
    graphs = w.engine.graphs
    assert graphs.is_recorded == ("graphs" in COMBINATIONS[steps])
    assert bool(graphs._graphs) == graphs.is_recorded


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [name for name in COMBINATIONS if name not in ("none", "fused")])
def test_on_a_gpu_recorded_steps_give_the_tokens_of_transformers(oracle: Oracle, steps: str, same_tokens):
    for block_size, max_num_seqs in ((1, 3), (4, 7), (16, 20)):
        options = {"device": "cuda", "tier": "triton", "max_num_seqs": max_num_seqs}
        w = fast_engine(oracle.folder, steps, **options, **slots(512, block_size))
        num_recorded = len(w.engine.graphs._graphs)
        for _ in range(2):
            results = w.generate(oracle.prompts, greedy(NUM_OUTPUT_TOKENS))
            same_tokens(tokens_of(results), oracle.answers)
        assert sum(hits_of(results)) > 0
        check_graphs(w, steps)
        assert len(w.engine.graphs._graphs) == num_recorded, "a step was recorded while requests waited"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steps", MAIN)
def test_on_a_gpu_those_who_are_sent_away_and_forked_get_the_same_tokens(
    oracle: Oracle, families, steps: str, policy: str, same_tokens
):
    options = {"device": "cuda", "tier": "triton", "preemption": policy, "max_num_seqs": 20}
    for kind in (None, *KINDS):
        w = fast_engine(oracle.folder, steps, prefix_cache=kind, **options, **slots(96, 4))
        with sent_away(after_its_first_token):
            same_tokens(tokens_of(w.generate(oracle.prompts, greedy(NUM_OUTPUT_TOKENS))), oracle.answers)
            params, expected = families
            same_tokens(tokens_of(w.generate(oracle.prompts[1:5], params)), expected)
        assert w.preemptions > 0 and (w.swaps > 0) == (policy == "swap")
        check_graphs(w, steps)


def test_this_part_of_the_matrix_has_at_least_1150_cells(request: pytest.FixtureRequest, record_property):
    """Count what ran, not what was meant to run."""
    num_cells = count_cells(request)
    record_property("identity matrix above the rungs, cells compared", num_cells)
    assert num_cells >= 1150
