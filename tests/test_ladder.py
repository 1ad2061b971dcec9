"""The identity matrix: every rung gives the same greedy tokens as rung 0, and as transformers; see `tests.identity`."""

from pathlib import Path

import pytest
import torch

from minipaged import LLM, SamplingParams, use
from minipaged.batching.reference import ragged_paged_attention
from minipaged.foundation.reference import causal_attention
from minipaged.llm import RUNGS
from minipaged.paged.reference import paged_attention
from tests.identity import (
    ARCHITECTURES,
    CELLS,
    GREEDY,
    Oracle,
    SameTokens,
    count_cells,
    counting_comparison,
    make_oracle,
)
from tests.tiny_models import make_tiny_model


@pytest.fixture
def same_tokens(request: pytest.FixtureRequest) -> SameTokens:
    return counting_comparison(request.node.nodeid)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp("tiny"), request.param)


CACHE_SHAPES = [(1, 64), (4, 16), (5, 13), (16, 4), (64, 1)]
"""Block size and blocks: about 64 slots, so that eight sequences never fit at once."""

SMALL = {"block_size": 4, "num_blocks": 64}
"""A cache that holds all sequences of a test at once."""


def llms(oracle: Oracle, rung: str, **options):
    """Yield the model on a rung, once for each shape of its cache."""
    shapes = [{}] if rung == "foundation" else [{"block_size": size, "num_blocks": num} for size, num in CACHE_SHAPES]
    for shape in shapes:
        yield LLM(oracle.folder, rung=rung, dtype="float32", **shape, **options)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_gives_the_tokens_of_transformers(oracle: Oracle, rung: str, same_tokens, poisoned_caches, request):
    for llm in llms(oracle, rung, device="cpu"):
        together = llm.generate(oracle.prompts, GREEDY)
        same_tokens([result.token_ids for result in together], oracle.answers)
        # Alone, a prompt finds the slots that another one has left.
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in reversed(oracle.prompts)]
        same_tokens(alone, oracle.answers[::-1])
        assert llm.stats()["free_blocks"] == llm.stats()["num_blocks"]
    assert CELLS[request.node.nodeid] == (2 if rung == "foundation" else 10)


READABLE = {
    "foundation": {"causal_attention": causal_attention},
    "sharing": {"causal_attention": causal_attention, "paged_attention": paged_attention},
    "batching": {"ragged_paged_attention": ragged_paged_attention},
    "prefix": {"ragged_paged_attention": ragged_paged_attention},
}
"""The loops that define the attention of a rung."""


@pytest.mark.parametrize("rung", READABLE)
def test_the_readable_loops_give_the_same_tokens(oracle: Oracle, rung: str, same_tokens, poisoned_caches):
    calls = dict.fromkeys(READABLE[rung], 0)

    def count(name, function):
        def run(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return run

    shape = {} if rung == "foundation" else SMALL
    with use(**{name: count(name, function) for name, function in READABLE[rung].items()}):
        llm = LLM(oracle.folder, rung=rung, dtype="float32", device="cpu", **shape)
        results = llm.generate(oracle.prompts, GREEDY)
    same_tokens([result.token_ids for result in results], oracle.answers)
    assert min(calls.values()) > 0


@pytest.mark.parametrize("rung", RUNGS)
def test_a_seeded_sample_does_not_depend_on_rung_or_company(oracle: Oracle, rung: str, same_tokens, poisoned_caches):
    params = SamplingParams(temperature=0.8, top_k=20, seed=42, max_tokens=12, ignore_eos=True)
    company = SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)
    reference = LLM(oracle.folder, rung="foundation", dtype="float32", device="cpu")
    expected = reference.generate([oracle.prompts[3]], params)[0].token_ids
    llm = LLM(oracle.folder, rung=rung, dtype="float32", device="cpu", **({} if rung == "foundation" else SMALL))
    for place in range(3):
        prompts = oracle.prompts[4:6]
        each = [company, SamplingParams(temperature=0.5, seed=7, max_tokens=15)]
        prompts.insert(place, oracle.prompts[3])
        each.insert(place, params)
        same_tokens([llm.generate(prompts, each)[place].token_ids], [expected])


@pytest.mark.parametrize("rung", RUNGS[RUNGS.index("sharing") :])
def test_forked_samples_give_the_tokens_of_rung_0(oracle: Oracle, rung: str, same_tokens, poisoned_caches):
    reference = LLM(oracle.folder, rung="foundation", dtype="float32", device="cpu")
    llm = LLM(oracle.folder, rung=rung, dtype="float32", device="cpu", **SMALL)
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=10, ignore_eos=True)
    results = llm.generate(oracle.prompts[1:4], params)
    assert llm.stats()["copies"] > 0
    alone = [SamplingParams(temperature=0.9, seed=each.seed, max_tokens=10, ignore_eos=True) for each in results]
    expected = reference.generate([each.prompt_token_ids for each in results], alone)
    same_tokens([each.token_ids for each in results], [each.token_ids for each in expected])
    assert len({tuple(result.token_ids) for result in results}) > 3


@pytest.fixture(scope="module")
def default_oracle(smollm2_folder: Path) -> Oracle:
    """Return the default model with forty tokens that transformers gives."""
    from transformers import AutoModelForCausalLM

    from minipaged.foundation.tokenizer import load_tokenizer

    prompt = load_tokenizer(smollm2_folder).encode("Paged attention keeps keys and values in blocks. A block table")
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    answer = model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None)
    return Oracle(smollm2_folder, [prompt], answer[:, len(prompt) :].tolist())


@pytest.mark.parametrize("rung", RUNGS)
def test_the_default_model_gives_forty_tokens_of_transformers(default_oracle: Oracle, rung: str, same_tokens):
    shape = {} if rung == "foundation" else {"num_blocks": 8}
    llm = LLM(default_oracle.folder, rung=rung, dtype="float32", device="cpu", **shape)
    results = llm.generate(default_oracle.prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    same_tokens([result.token_ids for result in results], default_oracle.answers)


INTERPRETED_PAIRS = [
    ("llama", "foundation"),
    ("qwen2", "contiguous"),
    ("qwen3", "paged"),
    ("mistral", "paged"),
    ("llama", "sharing"),
    ("qwen2", "paged"),
    ("qwen3", "batching"),
    ("mistral", "prefix"),
]
"""Every rung and every architecture once: the interpreter is slow."""


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a GPU to be absent: kernels are compiled where there is one"
)
@pytest.mark.parametrize(("architecture", "rung"), INTERPRETED_PAIRS)
def test_the_kernels_give_the_tokens_of_the_torch_tier_in_the_interpreter(
    tmp_path: Path, architecture: str, rung: str, same_tokens, poisoned_caches
):
    options = dict(ARCHITECTURES[architecture], num_hidden_layers=1, hidden_size=32, intermediate_size=48)
    folder = make_tiny_model(tmp_path, architecture, **options)
    prompts = [[5, 9, 200, 31, 7], [77, 3]]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    shape = {} if rung == "foundation" else {"block_size": 4, "num_blocks": 16, "max_model_len": 16}
    answers = {}
    for tier in ("torch", "triton"):
        llm = LLM(folder, rung=rung, tier=tier, dtype="float32", device="cpu", **shape)
        answers[tier] = [result.token_ids for result in llm.generate(prompts, params)]
    same_tokens(answers["triton"], answers["torch"])
    assert len(answers["triton"][0]) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["torch", "triton"])
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_and_tier_gives_the_tokens_of_transformers_on_a_gpu(
    oracle: Oracle, rung: str, tier: str, same_tokens, poisoned_caches, request
):
    for llm in llms(oracle, rung, tier=tier, device="cuda"):
        same_tokens([result.token_ids for result in llm.generate(oracle.prompts, GREEDY)], oracle.answers)
        alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in oracle.prompts]
        same_tokens(alone, oracle.answers)
    assert CELLS[request.node.nodeid] == (2 if rung == "foundation" else 10)


def test_the_matrix_has_at_least_390_cells(request: pytest.FixtureRequest, record_property):
    """Count what ran, not what was meant to run."""
    num_cells = count_cells(request)
    record_property("identity matrix, cells compared", num_cells)
    assert num_cells >= 390
