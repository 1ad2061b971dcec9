"""The identity matrix of rung 5: found in the cache or not, evicted or not, sent away or not, forked or not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minipaged import LLM, SamplingParams
from tests.batching.engines import after_its_first_token, greedy, sent_away, tokens_of
from tests.identity import (
    ARCHITECTURES,
    NUM_OUTPUT_TOKENS,
    Oracle,
    SameTokens,
    count_cells,
    counting_comparison,
    make_oracle,
    transformers_answer,
)
from tests.prefix.engines import EDGES, KINDS, expected_hits, hits_of, num_prefilled, prefix_engine, random_prompts
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

BLOCK_SIZES = (1, 4, 16)
BUDGETS = (2, 3, 5, 16, 8192)

Ask = Callable[[list[list[int]], int], list[list[int]]]


@pytest.fixture
def same_tokens(request: pytest.FixtureRequest) -> SameTokens:
    return counting_comparison(request.node.nodeid)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def ask(oracle: Oracle) -> Ask:
    """Return a function that lets transformers answer prompts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(oracle.folder, dtype=torch.float32).eval()

    def answers(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        with torch.no_grad():
            return [transformers_answer(model, prompt, num_tokens) for prompt in prompts]

    return answers


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def slots(num_slots: int, block_size: int) -> dict[str, int]:
    """Return the shape of a cache of so many slots."""
    return {"block_size": block_size, "num_blocks": num_slots // block_size}


def first_tokens(answers: list[list[int]], num_tokens: int) -> list[list[int]]:
    return [answer[:num_tokens] for answer in answers]


# -- found again


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_that_come_again_get_the_tokens_of_transformers(
    oracle: Oracle, kind: str, block_size: int, same_tokens
):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(512, block_size))
    same_tokens(tokens_of(w.generate(oracle.prompts, greedy(NUM_OUTPUT_TOKENS))), oracle.answers)
    again = w.generate(oracle.prompts[::-1], greedy(NUM_OUTPUT_TOKENS))
    same_tokens(tokens_of(again), oracle.answers[::-1])
    alone = [w.generate([prompt], greedy(3))[0] for prompt in oracle.prompts]
    same_tokens(tokens_of(alone), first_tokens(oracle.answers, 3))
    lengths = [len(prompt) for prompt in oracle.prompts]
    assert hits_of(again) == [expected_hits(kind, n, n, block_size) for n in reversed(lengths)]
    assert hits_of(alone) == [expected_hits(kind, n, n, block_size) for n in lengths]
    assert w.engine.stats()["evictions"] == 0


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_that_end_at_the_edge_of_a_block_get_the_same_tokens(
    oracle: Oracle, ask: Ask, kind: str, block_size: int, same_tokens
):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(512, block_size))
    prompts = random_prompts(*EDGES)
    answers = ask(prompts, 2)
    for is_cached in (False, True, True):
        results = [w.generate([prompt], greedy(2))[0] for prompt in prompts]
        same_tokens(tokens_of(results), answers)
        assert hits_of(results) == [expected_hits(kind, n * is_cached, n, block_size) for n in EDGES]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_that_part_from_a_cached_one_get_the_same_tokens(
    oracle: Oracle, ask: Ask, kind: str, block_size: int, same_tokens
):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(512, block_size))
    base, own = random_prompts(40, 9)
    commons = (6, 17, 30, 39)
    prompts = [[*base[:common], (base[common] + 1) % 256, *own] for common in commons]
    answers = ask([base, *prompts], 4)
    same_tokens(tokens_of(w.generate([base], greedy(4))), answers[:1])
    results = [w.generate([prompt], greedy(4))[0] for prompt in prompts]
    same_tokens(tokens_of(results), answers[1:])
    assert hits_of(results) == [expected_hits(kind, common, 99, block_size) for common in commons]
    has_copies = kind == "radix" and block_size > 1
    assert (w.engine.stats()["copies"] > 0) == has_copies
    same_tokens(tokens_of(w.generate([base], greedy(4))), answers[:1])


@pytest.mark.parametrize("budget", BUDGETS)
def test_what_is_left_of_a_prompt_is_computed_in_any_chunks(oracle: Oracle, kind: str, budget: int, same_tokens):
    w = prefix_engine(oracle.folder, prefix_cache=kind, max_num_batched_tokens=budget, **slots(512, 4))
    prompts, answers = oracle.prompts[3:], oracle.answers[3:]
    same_tokens(tokens_of(w.generate(prompts, greedy(8))), first_tokens(answers, 8))
    longer = [prompt + answer[:13] for prompt, answer in zip(prompts, answers, strict=True)]  # some of it is new
    results = w.generate(longer, greedy(3))
    same_tokens(tokens_of(results), [answer[13:] for answer in answers])
    cached = [len(prompt) + 7 for prompt in prompts]
    assert hits_of(results) == [expected_hits(kind, n, 99, 4) for n in cached]
    assert max(event.num_tokens for event in w.events if event.act == "chunk") <= budget


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_next_turn_finds_what_was_generated_in_the_last(oracle: Oracle, ask: Ask, kind, block_size, same_tokens):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(512, block_size))
    prompt, answer = oracle.prompts[-2], oracle.answers[-2]
    same_tokens(tokens_of(w.generate([prompt], greedy(NUM_OUTPUT_TOKENS))), [answer])
    turn = prompt + answer + random_prompts(5)[0]
    result = w.generate([turn], greedy(6))[0]
    same_tokens([result.token_ids], ask([turn], 6))
    num_cached = len(prompt) + len(answer) - 1  # the last token of an answer has no keys and values
    assert hits_of([result]) == [expected_hits(kind, num_cached, len(turn), block_size)] > [len(prompt) - 2]


@pytest.mark.parametrize(("block_size", "budget"), [(1, 128), (4, 32), (16, 32), (16, 128)])
def test_requests_that_come_together_and_begin_alike_get_the_same_tokens(
    oracle: Oracle, ask: Ask, kind: str, block_size: int, budget: int, same_tokens
):
    common, *own = random_prompts(32, 8, 8, 8, seed=12)
    prompts = [common + each for each in own]
    w = prefix_engine(oracle.folder, prefix_cache=kind, max_num_batched_tokens=budget, **slots(512, block_size))
    results = w.generate(prompts, greedy(3))
    same_tokens(tokens_of(results), ask(prompts, 3))
    assert hits_of(results) == [0, 32, 32] and num_prefilled(w) == 40 + 8 + 8


# -- evicted, sent away


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hits_under_eviction_give_the_same_tokens(oracle: Oracle, kind: str, block_size: int, same_tokens):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(64, block_size))
    prompts, answers = oracle.prompts[4:], oracle.answers[4:]
    num_hits = 0
    for _ in range(2):
        for prompt, answer in zip(prompts, answers, strict=True):
            results = [w.generate([prompt], greedy(4))[0] for _ in range(2)]
            same_tokens(tokens_of(results), [answer[:4]] * 2)
            num_hits += sum(hits_of(results))
    assert num_hits > 0 and w.engine.stats()["evictions"] > 0


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_those_who_are_sent_away_find_their_own_blocks(
    oracle: Oracle, kind: str, policy: str, block_size: int, same_tokens
):
    w = prefix_engine(oracle.folder, prefix_cache=kind, preemption=policy, **slots(512, block_size))
    with sent_away(after_its_first_token):
        first = w.generate(oracle.prompts[3:], greedy(NUM_OUTPUT_TOKENS))
    same_tokens(tokens_of(first), oracle.answers[3:])
    assert w.preemptions == 5 and (w.swaps > 0) == (policy == "swap")
    stats = w.engine.stats()
    if policy == "recompute":
        lengths = [len(prompt) + 1 for prompt in oracle.prompts[3:]]
        assert stats["hit_tokens"] == sum(expected_hits(kind, n, n, block_size) for n in lengths) > 0
    again = w.generate(oracle.prompts[3:], greedy(4))
    same_tokens(tokens_of(again), first_tokens(oracle.answers[3:], 4))
    assert sum(hits_of(again)) > 0


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_hits_evictions_and_preemptions_together_give_the_same_tokens(
    oracle: Oracle, kind: str, policy: str, same_tokens
):
    w = prefix_engine(oracle.folder, prefix_cache=kind, preemption=policy, max_num_batched_tokens=24, **slots(64, 4))
    prompts, answers = ([each for each in half[3:] for _ in range(2)] for half in (oracle.prompts, oracle.answers))
    with sent_away(after_its_first_token):
        same_tokens(tokens_of(w.generate(prompts, greedy(NUM_OUTPUT_TOKENS))), answers)
    stats = w.engine.stats()
    assert min(stats[name] for name in ("hit_tokens", "evictions", "preemptions")) > 0
    assert (w.swaps > 0) == (policy == "swap")


# -- forked


@pytest.mark.parametrize("block_size", [4, 16])
def test_samples_of_a_cached_prompt_get_the_tokens_of_rung_0(oracle: Oracle, kind: str, block_size: int, same_tokens):
    w = prefix_engine(oracle.folder, prefix_cache=kind, **slots(512, block_size))
    prompts = oracle.prompts[4:7]
    w.generate(prompts, greedy(1))
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=10, ignore_eos=True)
    results = w.generate(prompts, params)
    alone = [SamplingParams(temperature=0.9, seed=each.seed, max_tokens=10, ignore_eos=True) for each in results]
    reference = LLM(oracle.folder, rung="foundation", dtype="float32", device="cpu")
    expected = reference.generate([each.prompt_token_ids for each in results], alone)
    same_tokens(tokens_of(results), tokens_of(expected))
    assert hits_of(results)[::3] == [expected_hits(kind, len(each), len(each), block_size) for each in prompts]
    assert w.engine.stats()["copies"] > 0 and len({tuple(each.token_ids) for each in results}) > 3


@pytest.mark.parametrize("policy", [None, "recompute", "swap"])
def test_beams_of_a_cached_prompt_get_the_tokens_of_rung_3(oracle: Oracle, kind: str, policy, same_tokens):
    w = prefix_engine(oracle.folder, prefix_cache=kind, preemption=policy, **slots(96 if policy else 512, 4))
    prompts = oracle.prompts[4:7]
    w.generate(prompts[::-1], greedy(1))
    params = SamplingParams(n=2, beam_width=3, max_tokens=10, ignore_eos=True)
    results = w.generate(prompts, params)
    reference = LLM(oracle.folder, rung="sharing", dtype="float32", device="cpu", **slots(512, 4))
    same_tokens(tokens_of(results), tokens_of(reference.generate(prompts, params)))
    assert sum(hits_of(results)) > 0 and w.engine.stats()["copies"] > 0
    assert (w.preemptions > 0) == (policy is not None)


# -- read once for several rows


@pytest.mark.parametrize("budget", [9, 8192])
def test_rows_that_read_their_common_beginning_together_get_the_same_tokens(
    oracle: Oracle, ask: Ask, kind: str, budget: int, same_tokens, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("minipaged.prefix.scheduler.SHARED_UNIT", 8)  # the torch tier takes prefixes of any length
    first, second, *own = random_prompts(17, 24, 3, 5, 9, 4, 6, 2)
    prompts = [(second if i % 2 else first) + each for i, each in enumerate(own)]
    w = prefix_engine(oracle.folder, prefix_cache=kind, max_num_batched_tokens=budget, **slots(512, 4))
    same_tokens(tokens_of(w.generate(prompts, greedy(6))), ask(prompts, 6))
    is_seen = w.engine.window is None  # with a window in every layer nobody looks at the beginning
    assert (w.engine.stats()["shared_prefix_launches"] > 0) == is_seen


# -- the default model, and kernels in the interpreter


@pytest.fixture(scope="module")
def default_oracle(smollm2_folder: Path) -> Oracle:
    """Return the default model, a chat's first two turns and what rung 0 answers."""
    llm = LLM(smollm2_folder, rung="foundation", dtype="float32", device="cpu")
    first = llm.chat_prompt([{"role": "user", "content": "Name a colour of the sky and say why it has it."}])
    answer = llm.generate([first], greedy(4))[0].token_ids
    second = first + answer + [42, 108, 30]
    return Oracle(smollm2_folder, [first, second], [answer, llm.generate([second], greedy(4))[0].token_ids])


def test_the_default_model_gives_the_same_tokens_with_hits(default_oracle: Oracle, kind: str, same_tokens):
    w = prefix_engine(default_oracle.folder, prefix_cache=kind, num_blocks=24)
    for turns in range(2):
        results = [w.generate([prompt], greedy(4))[0] for prompt in default_oracle.prompts]
        same_tokens(tokens_of(results), default_oracle.answers)
        assert (hits_of(results)[0] > 0) == (turns > 0) and hits_of(results)[1] > 0


INTERPRETED = [
    ("llama", {"prefix_cache": "hash"}),
    ("qwen2", {"prefix_cache": "radix"}),
    ("qwen3", {"prefix_cache": "hash", "num_blocks": 5, "preemption": "recompute"}),
    ("mistral", {"prefix_cache": "radix", "num_blocks": 5, "preemption": "swap"}),
]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a GPU to be absent: kernels are compiled where there is one"
)
@pytest.mark.parametrize(("architecture", "options"), INTERPRETED)
def test_the_kernels_give_the_tokens_of_the_torch_tier_in_the_interpreter(
    tmp_path: Path, architecture: str, options: dict, same_tokens
):
    sizes = dict(ARCHITECTURES[architecture], num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    folder = make_tiny_model(tmp_path, architecture, **sizes)
    prompts = [[5, 9, 200, 31, 7, 8], [5, 9, 200, 31, 7, 9], [77, 3]]
    answers = {}
    for tier in ("torch", "triton"):
        w = prefix_engine(folder, tier=tier, block_size=4, max_model_len=16, **({"num_blocks": 16} | options))
        answers[tier] = [*tokens_of(w.generate(prompts[:1], greedy(3))), *tokens_of(w.generate(prompts, greedy(5)))]
        assert w.engine.stats()["hit_tokens"] > 0 and (w.preemptions > 0) == ("preemption" in options)
    same_tokens(answers["triton"], answers["torch"])


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
def test_on_a_gpu_prompts_that_come_again_get_the_tokens_of_transformers(
    oracle: Oracle, kind: str, tier: str, same_tokens
):
    for block_size in BLOCK_SIZES:
        for num_slots in (128, 512):
            options = {"prefix_cache": kind, "tier": tier, "device": "cuda"}
            w = prefix_engine(oracle.folder, **options, **slots(num_slots, block_size))
            for _ in range(2):
                same_tokens(tokens_of(w.generate(oracle.prompts, greedy(NUM_OUTPUT_TOKENS))), oracle.answers)
            stats = w.engine.stats()  # in the small pool a window's blocks are given back early and evicted first
            assert stats["evictions"] > 0 if num_slots == 128 else stats["hit_tokens"] > 0


def test_this_part_of_the_matrix_has_at_least_850_cells(request: pytest.FixtureRequest, record_property):
    """Count what ran, not what was meant to run."""
    num_cells = count_cells(request)
    record_property("identity matrix of rung 5, cells compared", num_cells)
    assert num_cells >= 850
