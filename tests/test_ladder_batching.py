"""The identity matrix of rung 4: any chunks, any company, sent away or not, forked or not, over either cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams
from tests.batching.engines import Watched, after_every_token, after_its_first_token, sent_away, watched
from tests.identity import (
    ARCHITECTURES,
    NUM_OUTPUT_TOKENS,
    Oracle,
    SameTokens,
    count_cells,
    counting_comparison,
    make_oracle,
)
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

BUDGETS = (1, 2, 3, 5, 16, 8192)
BLOCK_SIZES = (1, 4, 16)
POLICIES = ("recompute", "swap", "auto")
WAYS = ("recompute", "swap")  # on a CPU "auto" is one of them


@pytest.fixture
def same_tokens(request: pytest.FixtureRequest) -> SameTokens:
    return counting_comparison(request.node.nodeid)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("tiny"), request.param)


def greedy(max_tokens: int = NUM_OUTPUT_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def slots(num_slots: int, block_size: int) -> dict[str, int]:
    """Return the shape of a cache of so many slots."""
    return {"block_size": block_size, "num_blocks": num_slots // block_size}


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


def was_sent_away(w: Watched, policy: str) -> bool:
    """Return whether requests were sent away, and in the way that the policy asks for."""
    if policy == "auto":
        return w.preemptions > 0
    return w.preemptions > 0 and (w.swaps > 0) == (policy == "swap")


# -- chunks


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_tokens_do_not_depend_on_the_budget_of_a_step(oracle: Oracle, budget: int, block_size: int, same_tokens):
    w = watched(oracle.folder, max_num_batched_tokens=budget, **slots(192, block_size))
    prompts = oracle.prompts[2:7]  # of 4 to 17 tokens
    same_tokens(tokens_of(w.generate(prompts, greedy(6))), [answer[:6] for answer in oracle.answers[2:7]])
    assert w.preemptions == 0
    num_tokens: dict[int, int] = {}
    for event in w.events:
        num_tokens[event.step] = num_tokens.get(event.step, 0) + event.num_tokens
    assert max(num_tokens.values()) == min(budget, sum(map(len, prompts)))


@pytest.mark.parametrize("budget", BUDGETS[2:])
def test_a_prompt_alone_gets_the_tokens_that_it_gets_in_company(oracle: Oracle, budget: int, same_tokens):
    w = watched(oracle.folder, max_num_batched_tokens=budget, **slots(64, 4))
    alone = [w.generate([prompt], greedy())[0].token_ids for prompt in oracle.prompts[:3:-1]]
    same_tokens(alone, oracle.answers[:3:-1])
    assert w.preemptions == 0


# -- sent away


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_those_who_are_sent_away_get_the_same_tokens(oracle: Oracle, policy: str, block_size: int, same_tokens):
    w = watched(oracle.folder, preemption=policy, **slots(64, block_size))
    same_tokens(tokens_of(w.generate(oracle.prompts, greedy())), oracle.answers)
    assert was_sent_away(w, policy)


@pytest.mark.parametrize("budget", [3, 7, 20])
@pytest.mark.parametrize("policy", POLICIES)
def test_those_who_are_sent_away_and_come_back_in_chunks_get_the_same_tokens(
    oracle: Oracle, policy: str, budget: int, same_tokens
):
    w = watched(oracle.folder, preemption=policy, max_num_batched_tokens=budget, **slots(56, 4))
    with sent_away(after_its_first_token):  # under a sliding window nobody would run out of blocks
        same_tokens(tokens_of(w.generate(oracle.prompts[3:], greedy())), oracle.answers[3:])
    assert was_sent_away(w, policy) and w.preemptions >= len(oracle.prompts[3:])
    chunks = [event for event in w.events if event.act == "chunk"]
    assert max(event.num_tokens for event in chunks) <= budget


@pytest.mark.parametrize("policy", WAYS)
def test_those_who_are_sent_away_after_every_token_get_the_same_tokens(oracle: Oracle, policy: str, same_tokens):
    w = watched(oracle.folder, preemption=policy, **slots(256, 4))
    with sent_away(after_every_token()):
        same_tokens(tokens_of(w.generate(oracle.prompts, greedy())), oracle.answers)
    assert was_sent_away(w, policy) and w.preemptions >= len(oracle.prompts) * (NUM_OUTPUT_TOKENS - 1)


# -- forked


def test_samples_that_fork_in_the_middle_of_all_others_get_the_tokens_of_rung_0(oracle: Oracle, same_tokens):
    for budget in (5, 8192):
        w = watched(oracle.folder, max_num_batched_tokens=budget, **slots(256, 4))
        check_samples(w, oracle, same_tokens)
        assert w.preemptions == 0


def check_samples(w: Watched, oracle: Oracle, same_tokens: SameTokens, has_copies: bool = True) -> None:
    """Compare samples and lone answers of one batch with those of rung 0, by the seeds that they had.

    Who computes everything again writes it into blocks of its own, so there may be nothing to copy.
    """
    prompts = oracle.prompts[1:5]  # 3, 4, 5 and 15 tokens
    warm = {"temperature": 0.9, "max_tokens": 10, "ignore_eos": True}
    results = w.generate(prompts, [SamplingParams(n=n, seed=n, **warm) for n in (3, 1, 4, 2)])
    assert (w.engine.stats()["copies"] > 0) == has_copies
    reference = LLM(oracle.folder, rung="foundation", dtype="float32", device="cpu")
    alone = [SamplingParams(seed=result.seed, **warm) for result in results]
    same_tokens(
        tokens_of(results), tokens_of(reference.generate([result.prompt_token_ids for result in results], alone))
    )
    assert len({tuple(result.token_ids) for result in results}) > 6


def test_beams_get_the_tokens_of_the_rung_before(oracle: Oracle, same_tokens):
    w = watched(oracle.folder, max_num_batched_tokens=7, **slots(256, 4))
    check_beams(w, oracle, same_tokens)
    assert w.preemptions == 0


def check_beams(w: Watched, oracle: Oracle, same_tokens: SameTokens, has_copies: bool = True) -> None:
    """Compare beam searches among other requests with those of rung 3 in a large cache."""
    prompts = oracle.prompts[1:5]
    params = [SamplingParams(n=n, beam_width=3, max_tokens=10, ignore_eos=True) for n in (3, 1)]
    params = [params[0], greedy(10), params[1], greedy(10)]
    results = w.generate(prompts, params)
    assert (w.engine.stats()["copies"] > 0) == has_copies
    reference = LLM(oracle.folder, rung="sharing", dtype="float32", device="cpu", **slots(512, 4))
    same_tokens(tokens_of(results), tokens_of(reference.generate(prompts, params)))


CHECKS = {"samples": check_samples, "beams": check_beams}


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("policy", WAYS)
def test_families_that_are_sent_away_together_get_the_same_tokens(
    oracle: Oracle, policy: str, block_size: int, kind: str, same_tokens
):
    w = watched(oracle.folder, preemption=policy, **slots(80, block_size))
    CHECKS[kind](w, oracle, same_tokens)
    assert was_sent_away(w, policy)


@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("policy", WAYS)
def test_families_that_are_sent_away_after_every_token_get_the_same_tokens(
    oracle: Oracle, policy: str, kind: str, same_tokens
):
    w = watched(oracle.folder, preemption=policy, **slots(256, 4))
    with sent_away(after_every_token()):
        CHECKS[kind](w, oracle, same_tokens, has_copies=policy != "recompute")
    assert was_sent_away(w, policy)


# -- over rung 1's arena


@pytest.mark.parametrize("budget", [5, 8192])
@pytest.mark.parametrize("reservation", ["max", "pow2", "oracle"])
def test_over_the_arena_tokens_are_the_same(oracle: Oracle, reservation: str, budget: int, same_tokens):
    options = {"cache": "contiguous", "reservation": reservation, "max_model_len": 64}
    w = watched(oracle.folder, max_num_batched_tokens=budget, **options, **slots(256, 16))
    same_tokens(tokens_of(w.generate(oracle.prompts, greedy())), oracle.answers)
    assert w.preemptions == 0 and any(event.act == "wait" for event in w.events)


# -- kernels in the interpreter

INTERPRETED = [
    ("llama", {"max_num_batched_tokens": 3, "num_blocks": 16}),
    ("qwen2", {"preemption": "recompute", "num_blocks": 4}),
    ("qwen3", {"preemption": "swap", "num_blocks": 4}),
    ("mistral", {"max_num_batched_tokens": 3, "preemption": "swap", "num_blocks": 4}),
    ("llama", {"cache": "contiguous", "num_blocks": 8}),
]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a GPU to be absent: kernels are compiled where there is one"
)
@pytest.mark.parametrize(("architecture", "options"), INTERPRETED)
def test_the_kernels_give_the_tokens_of_the_torch_tier_in_the_interpreter(
    tmp_path: Path, architecture: str, options: dict[str, Any], same_tokens
):
    sizes = dict(ARCHITECTURES[architecture], num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    folder = make_tiny_model(tmp_path, architecture, **sizes)
    prompts = [[5, 9, 200, 31, 7], [77, 3], [8]]
    answers = {}
    for tier in ("torch", "triton"):
        w = watched(folder, tier=tier, block_size=4, max_model_len=16, **options)
        answers[tier] = tokens_of(w.generate(prompts, greedy(6)))
        assert (w.preemptions > 0) == ("preemption" in options)
    same_tokens(answers["triton"], answers["torch"])


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu_those_who_are_sent_away_get_the_tokens_of_transformers(
    oracle: Oracle, policy: str, tier: str, same_tokens
):
    options = {"preemption": policy, "tier": tier, "device": "cuda"}
    for block_size in BLOCK_SIZES:
        w = watched(oracle.folder, **options, **slots(64, block_size))
        same_tokens(tokens_of(w.generate(oracle.prompts, greedy())), oracle.answers)
        assert was_sent_away(w, policy)
        w = watched(oracle.folder, max_num_batched_tokens=7, **options, **slots(64, block_size))
        with sent_away(after_its_first_token):
            same_tokens(tokens_of(w.generate(oracle.prompts, greedy())), oracle.answers)
        assert was_sent_away(w, policy)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("policy", WAYS)
def test_on_a_gpu_families_that_are_sent_away_get_the_tokens_of_lower_rungs(
    oracle: Oracle, policy: str, tier: str, same_tokens
):
    for check in (check_samples, check_beams):
        w = watched(oracle.folder, preemption=policy, tier=tier, device="cuda", **slots(80, 4))
        check(w, oracle, same_tokens)
        assert was_sent_away(w, policy)


def test_this_part_of_the_matrix_has_at_least_315_cells(request: pytest.FixtureRequest, record_property):
    """Count what ran, not what was meant to run."""
    num_cells = count_cells(request)
    record_property("identity matrix of rung 4, cells compared", num_cells)
    assert num_cells >= 315
