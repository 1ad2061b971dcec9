"""Beam search in the engine: the beams, tokens and scores of transformers, on shared blocks."""

import itertools
import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minipaged import SamplingParams
from minipaged.sharing.cache import SharingCache
from tests.sharing.engines import watched
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned_caches")

ARCHITECTURES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 7},
    "llama-few-tokens": {"vocab_size": 16},  # end tokens come often, and beams meet in the same words
}
NUM_TOKENS = 10
PROMPT_LENGTHS = (1, 4, 11)


@dataclass
class Oracle:
    """A tiny model in both libraries' hands, some prompts, and tokens that beams of these prompts like to take."""

    folder: Path
    model: torch.nn.Module
    prompts: list[list[int]]
    end_token_ids: list[int]

    def beams(self, prompt: list[int], n: int, **options) -> list[tuple[list[int], float]]:
        """Return tokens and score of the n best beams that transformers finds."""
        ends = options.get("eos_token_id") or []
        if options["num_beams"] == 1:
            options |= {"length_penalty": None, "early_stopping": None}  # that is greedy decoding, which has neither
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_return_sequences=n,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                pad_token_id=ends[0] if ends else 0,
                **({"max_new_tokens": NUM_TOKENS} | options),
            )
        rows = [row[len(prompt) :] for row in found.sequences.tolist()]
        scores = [None] if found.get("sequences_scores") is None else found.sequences_scores.tolist()
        return [(cut(row, ends), score) for row, score in zip(rows, scores, strict=True)]


def cut(token_ids: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end token, it included: what follows is padding."""
    for i, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[: i + 1]
    return token_ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from transformers import AutoModelForCausalLM

    options = ARCHITECTURES[request.param]
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param.split("-")[0], **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    vocab_size = options.get("vocab_size", 256)
    prompts = [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    oracle = Oracle(folder, model, prompts, [])
    # Tokens of the beams of all prompts, so that searches end early, some beams sooner than others.
    found = [token_ids for prompt in prompts for token_ids, _ in oracle.beams(prompt, 4, num_beams=4)]
    liked = dict.fromkeys(token_ids[place] for place in (3, 5, 7, 2) for token_ids in found)
    oracle.end_token_ids = list(liked)[:10]
    return oracle


def assert_same(results: list, expected: list[tuple[list[int], float | None]], case: object = None) -> None:
    assert [result.token_ids for result in results] == [token_ids for token_ids, _ in expected], case
    assert [result.index for result in results] == list(range(len(expected)))
    for result, (_, score) in zip(results, expected, strict=True):
        assert score is None or result.score == pytest.approx(score, rel=1e-4), case


VARIANTS = list(itertools.product((1, 2, 3, 4), (-1.0, 0.0, 1.0, 2.5), (True, False, "never"), (0, 1, 3, 10)))
"""Width, length penalty, early stopping, number of end tokens."""

NUM_CELLS = 40
"""Cells of each model, drawn from all variants, prompts and block sizes."""


def test_beams_and_scores_are_those_of_transformers(oracle: Oracle):
    rng = random.Random(0)
    engines = {size: watched(oracle.folder, block_size=size, num_blocks=240 // size) for size in (1, 4, 5, 16)}
    seen: Counter[str] = Counter()
    for width, penalty, early, num_ends in rng.sample(VARIANTS, NUM_CELLS):
        prompt, size, ends = rng.choice(oracle.prompts), rng.choice([1, 4, 5, 16]), oracle.end_token_ids[:num_ends]
        n = rng.randint(1, width)
        options = {"length_penalty": penalty, "early_stopping": early}
        expected = oracle.beams(prompt, n, num_beams=width, eos_token_id=ends or None, **options)
        params = SamplingParams(n=n, beam_width=width, stop_token_ids=ends, max_tokens=NUM_TOKENS, **options)
        results = engines[size].generate([prompt], params)
        assert_same(results, expected, (width, penalty, early, ends, prompt, size))
        for result in results:
            ended = result.token_ids[-1] in ends
            assert result.finish_reason == ("stop" if ended else "length")
            assert ended or len(result.token_ids) == NUM_TOKENS
            seen[result.finish_reason] += 1
        seen["early"] += len(engines[size].accounts) < NUM_TOKENS
    assert min(seen["stop"], seen["length"], seen["early"]) >= NUM_CELLS // 10, seen
    assert sum(engine.llm.stats()["copies"] for engine in engines.values()) > 0


def test_every_option_changes_what_is_found_where_end_tokens_are_common(tmp_path: Path):
    """Otherwise the test above could not see an option that is ignored."""
    w = watched(make_tiny_model(tmp_path, vocab_size=16), num_blocks=40)
    options = {"early_stopping": (True, False, "never"), "length_penalty": (-1.0, 0.0, 2.5), "beam_width": (3, 4)}
    every = {(name, pair) for name, values in options.items() for pair in itertools.combinations(values, 2)}
    told_apart = set()
    for first, (name, values) in itertools.product(range(8), options.items()):
        answers = {}
        for value in values:
            changed = {"early_stopping": "never", "length_penalty": 1.0, "beam_width": 3} | {name: value}
            params = SamplingParams(n=3, stop_token_ids=[2, 12, 3], max_tokens=NUM_TOKENS, **changed)
            answers[value] = [result.token_ids for result in w.generate([[first, 5]], params)]
        told_apart |= {
            (name, pair) for pair in itertools.combinations(values, 2) if answers[pair[0]] != answers[pair[1]]
        }
    assert told_apart == every


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Return one model, with a tokenizer, for what does not depend on the architecture."""
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[(5 * i + k) % 250 for i in range(n)] for k, n in enumerate((6, 9, 17))]
    oracle = Oracle(folder, model, prompts, [])
    oracle.end_token_ids = [oracle.beams(prompts[0], 1, num_beams=4)[0][0][4], 258]  # 258 is the tokenizer's own
    return oracle


def test_searches_and_samples_in_one_batch_do_not_change_each_other(llama: Oracle):
    w = watched(llama.folder, num_blocks=120, block_size=4)
    requests = [
        SamplingParams(n=3, beam_width=4, max_tokens=NUM_TOKENS, stop_token_ids=llama.end_token_ids),
        SamplingParams(temperature=1.0, n=3, seed=3, max_tokens=7, ignore_eos=True),
        SamplingParams(n=2, beam_width=2, max_tokens=12, length_penalty=-1.0, ignore_eos=True),
        SamplingParams(temperature=0.9, n=1, best_of=3, seed=4, max_tokens=11, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    prompts = [llama.prompts[i % 3] for i in range(5)]
    alone = [[r.token_ids for r in w.generate([p], each)] for p, each in zip(prompts, requests, strict=True)]
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [1, 0, 4, 2, 3]):
        results = iter(w.generate([prompts[i] for i in order], [requests[i] for i in order]))
        for i in order:
            assert [next(results).token_ids for _ in alone[i]] == alone[i]
    expected = llama.beams(prompts[0], 3, num_beams=4, eos_token_id=llama.end_token_ids)
    assert alone[0] == [token_ids for token_ids, _ in expected]


def test_end_tokens_of_the_model_and_of_the_request_count_together(llama: Oracle, tmp_path: Path):
    folder = shutil.copytree(llama.folder, tmp_path / "model")
    free = llama.beams(llama.prompts[1], 4, num_beams=4)
    own, asked = free[0][0][3], free[1][0][6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [own, 11]}))
    params = SamplingParams(n=3, beam_width=3, max_tokens=NUM_TOKENS, stop_token_ids=[asked])
    results = watched(folder, num_blocks=40).generate([llama.prompts[1]], params)
    expected = llama.beams(llama.prompts[1], 3, num_beams=3, eos_token_id=[own, 11, 258, asked])
    assert_same(results, expected)
    assert "stop" in {result.finish_reason for result in results}


def test_an_end_token_is_in_the_tokens_and_not_in_the_text(llama: Oracle):
    w = watched(llama.folder, num_blocks=40)
    params = SamplingParams(n=4, beam_width=4, max_tokens=NUM_TOKENS, stop_token_ids=llama.end_token_ids, seed=9)
    results = w.generate([llama.prompts[0]], params)
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        ended = result.finish_reason == "stop"
        assert (result.token_ids[-1] in llama.end_token_ids) == ended
        assert result.text == w.llm.tokenizer.decode(result.token_ids[:-1] if ended else result.token_ids)
        assert result.seed == 9 and result.logprobs is None
        metrics = result.metrics
        assert metrics.num_generated_tokens == len(result.token_ids)
        assert 0 < metrics.time_to_first_token <= metrics.total_time


@pytest.mark.parametrize(("min_tokens", "repetition_penalty"), [(3, 1.0), (5, 1.0), (0, 1.7), (6, 1.3)])
def test_bans_and_penalties_are_those_of_transformers(llama: Oracle, min_tokens: int, repetition_penalty: float):
    w = watched(llama.folder, num_blocks=60)
    ends = [llama.beams(llama.prompts[0], 1, num_beams=4)[0][0][2], 258]
    differ = 0
    for prompt in llama.prompts:
        options = {"num_beams": 3, "eos_token_id": ends}
        expected = llama.beams(
            prompt, 3, min_new_tokens=min_tokens or None, repetition_penalty=repetition_penalty, **options
        )
        params = SamplingParams(
            n=3, beam_width=3, max_tokens=NUM_TOKENS, stop_token_ids=ends, min_tokens=min_tokens,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        assert_same(w.generate([prompt], params), expected)
        differ += expected != llama.beams(prompt, 3, **options)
    assert differ, "the option must matter"


def test_temperature_and_filters_do_not_apply(llama: Oracle):
    w = watched(llama.folder, num_blocks=40)
    plain, warm = (
        w.generate([llama.prompts[0]], SamplingParams(n=2, beam_width=3, max_tokens=6, ignore_eos=True, **options))
        for options in ({}, {"temperature": 3.0, "top_k": 2, "top_p": 0.5, "seed": 8})
    )
    assert [r.token_ids for r in plain] == [r.token_ids for r in warm]


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_search_is_cut_at_the_room_and_its_length_counts_in_the_score(llama: Oracle, early_stopping):
    prompt = llama.prompts[0]  # 6 tokens; each beam can have (1 + 8 // 4) blocks = 12 slots, so 7 tokens
    w = watched(llama.folder, num_blocks=9, block_size=4)
    options = {"early_stopping": early_stopping, "length_penalty": 1.5}
    params = SamplingParams(n=4, beam_width=4, max_tokens=50, stop_token_ids=llama.end_token_ids, **options)
    expected = llama.beams(prompt, 4, num_beams=4, max_new_tokens=7, eos_token_id=llama.end_token_ids, **options)
    results = w.generate([prompt], params)
    assert_same(results, expected)
    assert max(len(result.token_ids) for result in results) == 7
    one = w.generate([prompt * 6], params)  # 36 tokens fill the pool, and the last token needs no slot
    assert [len(result.token_ids) for result in one] == [1] * 4


# -- blocks


def test_dropped_beams_give_their_blocks_back_before_anything_is_written(llama: Oracle):
    """The pool has exactly what four beams of this length can hold, so any block kept too long is missed."""
    w = watched(llama.folder, num_blocks=1 + 4 * 6, block_size=3)
    for prompt in ([3, 1, 4, 1], [3, 1, 4, 1, 5], [2, 7, 1]):
        for _ in range(2):
            w.generate([prompt], SamplingParams(n=4, beam_width=4, max_tokens=16, ignore_eos=True))
    assert w.llm.stats()["copies"] > 10


def test_a_parent_forks_only_for_its_second_child_and_the_accounts_are_right(
    llama: Oracle, monkeypatch: pytest.MonkeyPatch
):
    from minipaged.sharing.beam import BeamSearch

    forks, extra = Counter(), Counter()
    fork, advance = SharingCache.fork, BeamSearch.advance

    def counted_fork(self, parent_id, child_id):
        forks["made"] += 1
        num_free = self.pool.num_free
        fork(self, parent_id, child_id)
        assert self.pool.num_free == num_free

    def counted_advance(self, logprobs):
        survivors = advance(self, logprobs)
        extra["children"] += 0 if self.done else len(survivors) - len({parent for parent, _ in survivors})
        return survivors

    monkeypatch.setattr(SharingCache, "fork", counted_fork)
    monkeypatch.setattr(BeamSearch, "advance", counted_advance)
    w = watched(llama.folder, num_blocks=60, block_size=4)
    w.generate([llama.prompts[2]], SamplingParams(beam_width=4, max_tokens=20, ignore_eos=True))
    assert forks["made"] == extra["children"] > 5
    assert 0 < w.llm.stats()["copies"] <= forks["made"]
    for each in w.accounts[:-1]:
        assert each.num_blocks_without_sharing >= each.num_blocks_used + 3 * (17 // 4), "all share the prompt"
    copies = [each.num_copies for each in w.accounts]
    assert copies == sorted(copies)
    before = w.llm.stats()["copies"]
    w.generate([llama.prompts[2]], SamplingParams(beam_width=1, max_tokens=20, ignore_eos=True))
    assert w.llm.stats()["copies"] == before and forks["made"] == extra["children"]


def test_an_aborted_search_returns_its_best_beams_and_frees_everything(llama: Oracle):
    w = watched(llama.folder, num_blocks=60, block_size=4)
    request = w.llm.engine.add_request(
        llama.prompts[0], SamplingParams(n=2, beam_width=4, max_tokens=20, ignore_eos=True)
    )
    for _ in range(5):
        assert w.llm.engine.step() == []
    search = w.llm.engine.families[request].search
    results = w.llm.engine.abort(request)
    assert [tuple(r.token_ids) for r in results] == [beam.token_ids for beam in search.live[:2]]
    assert [(r.index, r.finish_reason) for r in results] == [(0, "abort"), (1, "abort")]
    assert [r.text for r in results] == [w.llm.tokenizer.decode(r.token_ids) for r in results]
    w.assert_idle()
    assert w.llm.engine.abort(request) == []


def test_the_stream_of_a_search_is_its_results(llama: Oracle):
    w = watched(llama.folder, num_blocks=60)
    params = SamplingParams(n=2, beam_width=3, max_tokens=6, ignore_eos=True)
    chunks = list(w.llm.stream(llama.prompts[0], params))
    results = w.generate([llama.prompts[0]], params)
    assert [chunk.result.token_ids for chunk in chunks] == [result.token_ids for result in results]
    assert [chunk.text for chunk in chunks] == [result.text for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
def test_beams_on_a_gpu_are_those_of_the_cpu(llama: Oracle, tier: str):
    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(n=3, beam_width=4, max_tokens=NUM_TOKENS, stop_token_ids=llama.end_token_ids)
    expected = watched(llama.folder, num_blocks=120, block_size=4).generate(llama.prompts, params)
    w = watched(llama.folder, num_blocks=120, block_size=4, device="cuda", tier=tier)
    results = w.generate(llama.prompts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert [r.score for r in results] == pytest.approx([r.score for r in expected], rel=1e-3)
    assert w.llm.stats()["copies"] > 0
