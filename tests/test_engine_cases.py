"""Known faults of engines as small inputs, through `LLM` on every rung: block edges, poison, company, sampling."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.llm import RUNGS
from tests.tiny_models import make_tiny_model

CACHED_RUNGS = [rung for rung in RUNGS if rung != "foundation"]

pytestmark = pytest.mark.usefixtures("poisoned_caches")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama", with_tokenizer=True)


def load(folder: Path, rung: str, **options: Any) -> LLM:
    shape = {} if rung == "foundation" else {"num_blocks": 64, "max_model_len": 128}
    return LLM(folder, rung=rung, **{"dtype": "float32", "device": "cpu", **shape, **options})


def greedy(max_tokens: int, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def random_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def tokens_of(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


def record_logits(llm: LLM) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """Return a dict that fills with each prompt's rows of logits, one for every token."""
    rows: dict[tuple[int, ...], list[torch.Tensor]] = {}
    choose = llm.engine.choose

    def spy(batch: list[Any], logits: torch.Tensor) -> Any:
        for seq, row in zip(batch, logits.float().cpu(), strict=True):
            rows.setdefault(tuple(seq.prompt_token_ids), []).append(row.clone())
        return choose(batch, logits)

    llm.engine.choose = spy
    return rows


# Block edges


@pytest.mark.parametrize("rung", CACHED_RUNGS)
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_the_blocks_of_all_tokens_but_the_last_are_enough(folder: Path, rung: str, length: int):
    prompt = random_prompts(length)[0]
    expected = load(folder, "foundation").generate([prompt], greedy(2))[0]
    num_blocks = math.ceil((length + 2 - 1) / 16)
    if rung == "contiguous":  # a dense range is a power of two
        num_blocks = 2 ** math.ceil(math.log2(num_blocks))
    llm = load(folder, rung, num_blocks=num_blocks)
    assert tokens_of(llm.generate([prompt], greedy(2))) == [expected.token_ids]
    assert llm.stats()["free_blocks"] == num_blocks


@pytest.mark.parametrize("rung", CACHED_RUNGS)
@pytest.mark.parametrize("length", [16, 32])
def test_a_pool_that_the_prompt_fills_gives_one_token(folder: Path, rung: str, length: int):
    llm = load(folder, rung, num_blocks=length // 16)
    result = llm.generate(random_prompts(length), greedy(2))[0]
    assert (len(result.token_ids), result.finish_reason) == (1, "length"), "the last token of an answer needs no slot"


@pytest.mark.parametrize("rung", [rung for rung in CACHED_RUNGS if rung != "contiguous"])
def test_a_block_is_taken_when_its_first_token_comes_and_not_before(folder: Path, rung: str):
    lengths = (15, 16, 17, 31, 32, 33)
    llm = load(folder, rung, num_blocks=16)
    num_blocks = {}
    llm.engine.before_release = lambda seq: num_blocks.update(
        {len(seq.prompt_token_ids): len(llm.engine.cache.tables[seq.seq_id].block_ids)}
    )
    for prompt in random_prompts(*lengths):
        llm.engine.add_request(prompt, greedy(2))
    llm.engine.step()
    tables = llm.engine.cache.tables
    held = {seq.num_tokens - 1: len(tables[seq.seq_id].block_ids) for seq in llm.engine.running}
    assert held == dict(zip(lengths, (1, 1, 2, 2, 2, 3), strict=True))
    llm.engine.step()
    assert num_blocks == dict(zip(lengths, (1, 2, 2, 2, 3, 3), strict=True))
    assert not llm.engine.has_unfinished() and llm.stats()["free_blocks"] == 16


# What the cache holds where nobody wrote


@pytest.mark.parametrize("poisoned_caches", [math.nan, math.inf, -math.inf], indirect=True)
@pytest.mark.parametrize("rung", CACHED_RUNGS)
def test_slots_that_nobody_wrote_never_reach_the_logits(folder: Path, rung: str):
    prompts = random_prompts(17, 3, 40, 16)
    params = [greedy(max_tokens) for max_tokens in (3, 2, 6, 6)]  # the short ones leave holes between the others
    logits = []
    for each in ("foundation", rung):
        llm = load(folder, each)
        logits.append(record_logits(llm))
        llm.generate(prompts, params)
    for prompt, each in zip(prompts, params, strict=True):
        ours, theirs = (torch.stack(rows[tuple(prompt)]) for rows in reversed(logits))
        assert len(ours) == each.max_tokens and torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("poisoned_caches", [math.nan, math.inf], indirect=True)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("budget", [3, 16, 8192])
def test_neither_chunks_nor_being_sent_away_change_the_logits(folder: Path, preemption: str, budget: int):
    prompts = random_prompts(17, 3, 40, 16)
    options = {"block_size": 4, "num_blocks": 16, "preemption": preemption, "max_num_batched_tokens": budget}
    llm, other = load(folder, "batching", **options), load(folder, "foundation")
    ours, theirs = record_logits(llm), record_logits(other)
    assert tokens_of(llm.generate(prompts, greedy(20))) == tokens_of(other.generate(prompts, greedy(20)))
    assert llm.stats()["preemptions"] > 0 and (llm.stats()["swaps"] > 0) == (preemption == "swap")
    for prompt, rows in theirs.items():
        torch.testing.assert_close(torch.stack(ours[prompt]), torch.stack(rows), atol=1e-4, rtol=0)


# Company

ARRANGEMENTS = ("alone", "together", "reversed")


def arranged(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, dict[str, Any]]:
    """Generate for prompts alone, together and in reverse; return tokens and logits of each prompt."""
    found = {}
    for name in ARRANGEMENTS:
        rows = record_logits(llm)
        if name == "alone":
            results = [llm.generate([prompt], params)[0] for prompt in prompts]
        else:
            results = llm.generate(prompts if name == "together" else prompts[::-1], params)
        tokens = {tuple(result.prompt_token_ids): result.token_ids for result in results}
        found[name] = {"tokens": tokens, "logits": {prompt: torch.stack(each) for prompt, each in rows.items()}}
    return found


@pytest.mark.parametrize("rung", RUNGS)
def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(folder: Path, rung: str):
    prompts = random_prompts(1, 2, 5, 11, 16, 17, 32, 40)
    found = arranged(load(folder, rung), prompts, greedy(32))
    for name in ARRANGEMENTS[1:]:
        assert found[name]["tokens"] == found["alone"]["tokens"]
        for prompt, alone in found["alone"]["logits"].items():
            assert len(alone) == 32
            torch.testing.assert_close(found[name]["logits"][prompt], alone, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("rung", RUNGS)
def test_in_bfloat16_company_changes_an_answer_only_where_two_tokens_are_close(folder: Path, rung: str, tier: str):
    prompts = random_prompts(1, 2, 5, 11, 16, 17, 32, 40)
    plain = {"fused": False, "graphs": False, "device_batch": False, "overlap": False}  # logits are looked at
    llm = load(folder, rung, tier=tier, device="cuda", dtype="bfloat16", **plain)
    llm.model.final_norm = llm.model.final_norm / 4  # logits of about 5: at 20 neighbours in bfloat16 are 0.125 apart
    found = arranged(llm, prompts, greedy(32))
    for name in ARRANGEMENTS[1:]:
        for prompt, alone in found["alone"]["tokens"].items():
            pairs = zip(alone, found[name]["tokens"][prompt], strict=True)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is not None:
                best = found["alone"]["logits"][prompt][first].topk(2).values
                assert best[0] - best[1] < 0.1


# Sampling


def rank_of(chosen: Any) -> int:
    """Return how many of the five best tokens are better than the chosen one; 5 when it is none of them."""
    best = [token_id for token_id, _ in chosen.top]
    return best.index(chosen.token_id) if chosen.token_id in best else 5


@pytest.mark.parametrize("rung", RUNGS)
def test_each_row_of_a_mixed_batch_is_sampled_by_its_own_values(folder: Path, rung: str):
    llm = load(folder, rung)
    prompt, other = random_prompts(7, 20)
    prompts = [other, prompt, prompt]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5),
        SamplingParams(temperature=1, top_k=5, seed=16, max_tokens=24, ignore_eos=True, logprobs=5),
        SamplingParams(temperature=1, seed=16, max_tokens=24, ignore_eos=True, logprobs=5),
    ]
    together = llm.generate(prompts, params)
    alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert tokens_of(together) == tokens_of(alone)
    ranks = [{rank_of(each) for each in result.logprobs} for result in together]
    assert ranks[0] == {0}
    assert len(ranks[1]) > 1 and max(ranks[1]) < 5
    assert 5 in ranks[2], "without top_k the same seed takes a token that is none of the five best"


@pytest.mark.parametrize("rung", RUNGS)
def test_a_seed_gives_the_same_answer_next_to_seeded_and_unseeded_neighbours(folder: Path, rung: str):
    llm = load(folder, rung)
    prompt = random_prompts(9)[0]

    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(temperature=0.8, seed=seed, max_tokens=16, ignore_eos=True)

    alone = llm.generate([prompt], params(42))[0].token_ids
    unseeded = []
    for _ in range(5):
        for seeds in ([42, None], [42, 7], [None, 42]):
            results = llm.generate([prompt, prompt], [params(seed) for seed in seeds])
            assert results[seeds.index(42)].token_ids == alone
            unseeded += [result for result, seed in zip(results, seeds, strict=True) if seed is None]
    assert len({result.seed for result in unseeded}) == 10, "without a seed every request draws its own"
    assert len({tuple(result.token_ids) for result in unseeded}) > 1


@pytest.mark.parametrize("rung", RUNGS[RUNGS.index("sharing") :])
def test_the_samples_of_one_seed_differ_and_come_again_in_any_company(folder: Path, rung: str):
    llm = load(folder, rung)
    prompt, other = random_prompts(9, 13)
    params = SamplingParams(n=3, temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    first = tokens_of(llm.generate([prompt], params))
    assert tokens_of(llm.generate([prompt], params)) == first and len({tuple(each) for each in first}) == 3
    company = SamplingParams(temperature=1.0, max_tokens=5)
    assert tokens_of(llm.generate([other, prompt], [company, params])[1:]) == first


RAW = [-0.4402, -1.4402, -2.4402, -3.4402]
"""The log-probabilities of logits [1, 0, -1, -2]."""


@pytest.fixture(scope="module")
def four_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("four"), "llama", vocab_size=4)


@pytest.mark.parametrize("rung", RUNGS)
def test_reported_logprobs_are_those_of_the_raw_distribution_in_every_setting(four_tokens: Path, rung: str):
    llm = load(four_tokens, rung)
    llm.model.forward = lambda ids, positions, attend, at=None: torch.tensor([[1.0, 0.0, -1.0, -2.0]]).repeat(
        len(ids if at is None else at), 1
    )
    settings = [(temperature, top_p) for temperature in (1, 0.5, 0) for top_p in (1, 0.5)]
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, seed=1, max_tokens=6, logprobs=3, presence_penalty=0.5)
        for temperature, top_p in settings
    ]
    for result in llm.generate([[0, 1]] * len(params), params):
        assert len(result.logprobs) == 6
        for token_id, each in zip(result.token_ids, result.logprobs, strict=True):
            assert each.token_id == token_id and each.logprob == pytest.approx(RAW[token_id], abs=1e-4)
            assert [top for top, _ in each.top] == [0, 1, 2]
            json.dumps([each.logprob, each.top], allow_nan=False)
            assert [value for _, value in each.top] == pytest.approx(RAW[:3], abs=1e-4)
    own_only = llm.generate([[0, 1]], SamplingParams(temperature=0, max_tokens=1, logprobs=0))[0].logprobs[0]
    assert own_only.top == () and own_only.logprob == pytest.approx(RAW[0], abs=1e-4)
