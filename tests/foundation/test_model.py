"""The one model file against transformers, for each architecture and each way a config can vary."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.foundation import reference
from minipaged.foundation.model import Attend, DecoderModel, weight_shapes
from minipaged.foundation.ops import causal_attention
from minipaged.foundation.weights import load_model
from tests.tiny_models import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {**LLAMA3, "rope_theta": 5e5},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many KV heads": ("llama", {"num_key_value_heads": 4}),
    "llama, head_dim from width": ("llama", {"head_dim": None}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, one layer": ("llama", {"num_hidden_layers": 1, "rms_norm_eps": 1e-2}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, narrow heads": ("qwen2", {"head_dim": 8}),
    "qwen2, window in the upper layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, attention bias": ("qwen3", {"attention_bias": True}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 32}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "mistral": ("mistral", {}),
    "mistral, tied": ("mistral", {"tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
} | {
    f"{architecture}, {rope}": (architecture, {"rope_parameters": table})
    for architecture in ("llama", "qwen2", "qwen3", "mistral")
    for rope, table in ROPE_TYPES.items()
}


def random_tokens(count: int, vocab_size: int = 272) -> torch.Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(count))


def run_whole(model: DecoderModel, *sequences: torch.Tensor, logits_at: torch.Tensor | None = None) -> torch.Tensor:
    """Run whole sequences in one flat batch and return the logits of every token, or of those asked for."""
    lengths = [len(sequence) for sequence in sequences]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    windows = model.config.layer_windows

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, starts, window=windows[layer], tier=model.tier)

    positions = torch.cat([torch.arange(length) for length in lengths])
    return model.forward(torch.cat(sequences), positions, attend, logits_at)


class GrowingKeys:
    """The simplest cache there can be, to feed one sequence in pieces."""

    def __init__(self, model: DecoderModel) -> None:
        self.windows = model.config.layer_windows
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer in self.kept:
            k, v = (torch.cat(pair) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        # Pad the queries to the length of the keys; only the last rows are real.
        padded = torch.cat((q.new_zeros(len(k) - len(q), *q.shape[1:]), q))
        starts = torch.tensor([0, len(k)])
        return reference.causal_attention(padded, k, v, starts, window=self.windows[layer])[-len(q) :]


def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens[None]).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[variant]
    folder = make_tiny_model(tmp_path, architecture, **overrides)
    tokens = random_tokens(100)
    ours = run_whole(load_model(folder, dtype=torch.float32), tokens)
    theirs = transformers_logits(folder, tokens)
    assert theirs.std() > 1, "the logits are too flat to tell models apart"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rope", ROPE_TYPES)
def test_a_model_with_limit_64_decodes_to_its_last_position(rope: str, tmp_path: Path) -> None:
    table = dict(ROPE_TYPES[rope])
    if "original_max_position_embeddings" in table:
        table["original_max_position_embeddings"] = 16
    folder = make_tiny_model(tmp_path, max_position_embeddings=64, rope_parameters=table)
    model = load_model(folder, dtype=torch.float32)
    assert model.config.max_model_len == 64
    tokens = random_tokens(64)
    cache = GrowingKeys(model)
    rows = [model.forward(tokens[:60], torch.arange(60), cache.attend)]
    rows += [model.forward(tokens[i : i + 1], torch.tensor([i]), cache.attend) for i in range(60, 64)]
    torch.testing.assert_close(torch.cat(rows), transformers_logits(folder, tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pieces", [[7], [3, 3, 1], [1] * 7])
@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_a_window_gives_the_same_logits_in_one_go_in_chunks_and_token_by_token(
    architecture: str, pieces: list[int], tmp_path: Path
) -> None:
    keys = {"use_sliding_window": True, "max_window_layers": 0} if architecture == "qwen3" else {}
    folder = make_tiny_model(tmp_path, architecture, sliding_window=4, **keys)
    model = load_model(folder, dtype=torch.float32)
    tokens = random_tokens(7)
    cache = GrowingKeys(model)
    rows, start = [], 0
    for size in pieces:
        piece = slice(start, start + size)
        rows.append(model.forward(tokens[piece], torch.arange(start, start + size), cache.attend))
        start += size
    torch.testing.assert_close(torch.cat(rows), transformers_logits(folder, tokens), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_model(make_tiny_model(tmp_path_factory.mktemp("tiny")), dtype=torch.float32)


def test_a_sequences_logits_do_not_depend_on_its_neighbours(tiny_model: DecoderModel) -> None:
    prompts = [random_tokens(length) for length in (1, 40, 7, 16, 33, 2, 25, 12)]
    alone = [run_whole(tiny_model, prompt) for prompt in prompts]
    together = run_whole(tiny_model, *prompts).split([len(prompt) for prompt in prompts])
    reversed_order = run_whole(tiny_model, *prompts[::-1]).split([len(prompt) for prompt in prompts[::-1]])
    for single, in_batch, in_reverse in zip(alone, together, reversed_order[::-1], strict=True):
        torch.testing.assert_close(in_batch, single, rtol=0, atol=1e-4)
        torch.testing.assert_close(in_reverse, single, rtol=0, atol=1e-4)


def test_logits_at_gives_the_rows_asked_for_in_the_order_asked(tiny_model: DecoderModel) -> None:
    tokens = random_tokens(9)
    rows = torch.tensor([8, 0, 3])
    some = run_whole(tiny_model, tokens, logits_at=rows)
    assert some.shape == (3, 272)
    torch.testing.assert_close(some, run_whole(tiny_model, tokens)[rows], rtol=0, atol=1e-5)


def test_forward_calls_attend_once_per_layer_in_order_and_leaves_the_weights_alone(
    tiny_model: DecoderModel,
) -> None:
    before = {name: weight.clone() for name, weight in tiny_model.weights.items()}
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append((layer, tuple(q.shape), tuple(v.shape)))
        return torch.zeros_like(q)

    checked: Attend = attend
    logits = tiny_model.forward(random_tokens(5), torch.arange(5), checked)
    assert calls == [(0, (5, 4, 16), (5, 2, 16)), (1, (5, 4, 16), (5, 2, 16))]
    assert not logits.requires_grad
    assert all(torch.equal(weight, before[name]) for name, weight in tiny_model.weights.items())


def test_every_expected_weight_matters(tiny_model: DecoderModel) -> None:
    # A weight that is loaded and never used would pass every check of names.
    tokens = random_tokens(6)
    expected = run_whole(tiny_model, tokens)
    for name in weight_shapes(tiny_model.config):
        changed = {**tiny_model.weights, name: tiny_model.weights[name] * 1.1}
        if name.endswith("embed_tokens.weight"):
            changed[name] = tiny_model.weights[name].roll(1, dims=0)
        difference = run_whole(DecoderModel(tiny_model.config, changed), tokens) - expected
        assert difference.abs().max() > 1e-3, f"{name} does not matter"


def test_logits_come_in_the_models_dtype(tiny_model: DecoderModel) -> None:
    weights = {name: weight.bfloat16() for name, weight in tiny_model.weights.items()}
    model = DecoderModel(tiny_model.config, weights)
    tokens = random_tokens(12)
    logits = run_whole(model, tokens)
    assert logits.dtype == model.dtype == torch.bfloat16
    error = (logits.float() - run_whole(tiny_model, tokens)).abs().mean()
    assert 0 < error < 0.5


def test_40_greedy_tokens_of_smollm2_equal_those_of_transformers(smollm2_folder: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    prompt = torch.tensor([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198])
    length = {"max_new_tokens": 40, "min_new_tokens": 40}
    tokens = theirs.generate(prompt[None], do_sample=False, pad_token_id=2, **length)[0]
    model = load_model(smollm2_folder, dtype=torch.float32)
    rows = torch.arange(len(prompt) - 1, len(tokens) - 1)
    logits = run_whole(model, tokens, logits_at=rows)  # each row predicts the token after it
    # min_new_tokens forbids the end token, id 2, so it is left out here too.
    logits[:, 2] = float("-inf")
    assert len(rows) == 40
    assert logits.argmax(dim=-1).tolist() == tokens[len(prompt) :].tolist()
