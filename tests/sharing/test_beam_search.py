"""Beam search in the engine: the beams, tokens and scores of transformers, on shared blocks."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from minipaged import LLM, SamplingParams, UserError
from minipaged.foundation.sequence import Result
from tests.tiny_models import make_tiny_model

ARCHITECTURES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mistral": {"sliding_window": 7},
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
        return [(cut(row, ends), score) for row, score in zip(rows, found.sequences_scores.tolist(), strict=True)]


def cut(token_ids: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first end token, it included: what follows is padding."""
    for i, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[: i + 1]
    return token_ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), request.param, **ARCHITECTURES[request.param])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    oracle = Oracle(folder, model, prompts, [])
    # Tokens of the beams of all prompts, so that searches end early, some beams sooner than others.
    found = [token_ids for prompt in prompts for token_ids, _ in oracle.beams(prompt, 4, num_beams=4)]
    for place in (3, 5, 7, 2):
        oracle.end_token_ids.extend(dict.fromkeys(token_ids[place] for token_ids in found))
    oracle.end_token_ids = list(dict.fromkeys(oracle.end_token_ids))
    return oracle


def engine(oracle: Oracle, **options) -> LLM:
    return LLM(oracle.folder, rung="sharing", dtype="float32", device="cpu", **({"num_blocks": 64} | options))


def test_try(oracle):
    llm = engine(oracle, block_size=4)
    print(oracle.end_token_ids)
    n = 0
    lens = []
    import time
    for w, lp, es, ne in itertools.product((1,2,3,4), (-1.5,0.0,1.0,2.0), (True, False, "never"), (0,1,2,5,12)):
        ends = oracle.end_token_ids[:ne]
        for prompt in oracle.prompts[:2]:
            if w == 1: continue
            exp = oracle.beams(prompt, w, num_beams=w, length_penalty=lp, early_stopping=es, eos_token_id=ends or None)
            got = llm.generate([prompt], SamplingParams(n=w, beam_width=w, length_penalty=lp, early_stopping=es, stop_token_ids=ends, max_tokens=NUM_TOKENS))
            assert [g.token_ids for g in got] == [e[0] for e in exp], (w, lp, es, ne)
            assert [g.score for g in got] == pytest.approx([e[1] for e in exp], rel=1e-4)
            n += 1; lens += [len(g.token_ids) for g in got]
    from collections import Counter
    print(n, sorted(Counter(lens).items()))
