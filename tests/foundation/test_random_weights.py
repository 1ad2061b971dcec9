"""Models with random weights: the shapes are exact, the weights repeat, and nothing but a config is read."""

import tomllib
from pathlib import Path

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.errors import UserError
from minipaged.foundation import random_weights
from minipaged.foundation.model import weight_shapes
from minipaged.foundation.packing import can_pack
from minipaged.foundation.random_weights import find_random_model, is_random, list_random_models, make_weights
from minipaged.foundation.weights import load_config, load_model, resolve_model, weights_identity
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Ship another shape, small enough for a test, and return its name."""
    folder = tmp_path / "tiny-random"
    make_tiny_model(folder, "qwen2")  # with biases
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(random_weights, "SHAPES", tmp_path)
    return folder.name


def num_weights(name: str) -> int:
    config, _ = load_config(resolve_model(name))
    return sum(torch.Size(shape).numel() for shape in weight_shapes(config).values())


def test_the_shapes_are_those_of_the_real_models():
    # The parameters that the two model cards count: 0.6 billion, 0.44 without the embedding; and 8.03 billion.
    assert num_weights("qwen3-0.6b-random") == 596_049_920
    assert num_weights("llama-3.1-8b-random") == 8_030_261_248
    qwen, _ = load_config(resolve_model("qwen3-0.6b-random"))
    llama, _ = load_config(resolve_model("llama-3.1-8b-random"))
    assert (qwen.num_layers, qwen.num_heads, qwen.num_kv_heads, qwen.head_dim) == (28, 16, 8, 128)
    assert (llama.num_layers, llama.num_heads, llama.num_kv_heads, llama.head_dim) == (32, 32, 8, 128)
    assert (qwen.rope.type, qwen.rope.theta, qwen.max_model_len, qwen.rms_norm_eps) == ("default", 1e6, 40_960, 1e-6)
    rope = llama.rope
    assert (rope.type, rope.theta, rope.factor, rope.original_max_len) == ("llama3", 5e5, 8.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert (llama.max_model_len, llama.rms_norm_eps, llama.tie_word_embeddings) == (131_072, 1e-5, False)
    assert qwen.tie_word_embeddings


def test_the_tiny_shape_takes_the_token_ids_of_the_default_model_and_groups_heads_as_it_does(smollm2_folder: Path):
    tiny, _ = load_config(resolve_model("random"))
    default, _ = load_config(smollm2_folder)
    assert num_weights("random") < 10_000_000
    assert (tiny.vocab_size, tiny.max_model_len) == (default.vocab_size, default.max_model_len)
    assert tiny.num_heads // tiny.num_kv_heads == default.num_heads // default.num_kv_heads == 3


def test_an_unknown_shape_is_refused_with_the_names_of_those_that_there_are():
    with pytest.raises(UserError, match=r"'gpt-random'; there is llama-3\.1-8b-random, qwen3-0\.6b-random, random"):
        LLM("gpt-random")


@pytest.mark.parametrize("name", ["somebody/model-random", "qwen3-0.6b", "smollm2"])
def test_names_of_other_models_are_left_alone(name: str):
    assert find_random_model(name) is None


def test_a_folder_of_ones_own_may_have_such_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make_tiny_model(tmp_path / "my-random")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("my-random") == Path("my-random")
    assert not is_random(folder)


def test_a_revision_is_refused_since_a_shape_has_none():
    with pytest.raises(UserError, match="is local"):
        resolve_model("qwen3-0.6b-random", revision="v1")


def test_weights_are_the_same_on_every_start_and_of_the_dtype_that_is_asked_for(tiny_shape: str):
    config, _ = load_config(resolve_model(tiny_shape))
    first, second = (make_weights(config, torch.bfloat16, CPU) for _ in range(2))
    assert first.keys() == weight_shapes(config).keys()
    for name, weight in first.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, second[name])
    layer = "model.layers.0."
    assert not torch.equal(first[layer + "mlp.gate_proj.weight"], first[layer + "mlp.up_proj.weight"])
    assert first[layer + "input_layernorm.weight"].eq(1).all()
    assert first[layer + "self_attn.q_proj.bias"].eq(0).all()


def test_logits_have_a_spread_of_about_one(tiny_shape: str):
    model = load_model(resolve_model(tiny_shape), dtype=torch.float32)
    logits = model.forward(torch.arange(40), torch.arange(40), lambda layer, q, k, v: q)
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2


def test_a_model_runs_without_tokenizer_and_finds_its_prompts_again(tiny_shape: str):
    llm = LLM(tiny_shape, num_blocks=16, device="cpu", dtype="float32", block_size=4)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    first, second = (llm.generate([list(range(20))], params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert llm.stats()["hit_tokens"] == 16
    with pytest.raises(UserError, match="no tokenizer"):
        llm.generate("text", params)


def test_weights_have_an_identity_of_their_own():
    folders = [resolve_model(name) for name in list_random_models()]
    identities = {weights_identity(folder) for folder in folders}
    assert len(identities) == len(folders) == 3


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_packed_weights_give_the_logits_of_plain_ones(tiny_shape: str, is_tied: bool):
    if not can_pack(torch.bfloat16, CPU):
        pytest.skip("needs a GPU or a CPU with bfloat16")
    make_tiny_model(random_weights.SHAPES / tiny_shape, tie_word_embeddings=is_tied)

    def run(is_packed: bool) -> torch.Tensor:
        model = load_model(resolve_model(tiny_shape), dtype=torch.bfloat16, is_packed=is_packed)
        assert model.output_matrix.is_mkldnn is is_packed
        return model.forward(torch.arange(5), torch.arange(5), lambda layer, q, k, v: q).float()

    plain, packed = run(False), run(True)
    assert (plain - packed).abs().max() <= 0.05 * plain.abs().max()


def test_the_chat_refuses_before_it_draws_weights(run_python):
    done = run_python("-m", "minipaged.chat", "--model", "llama-3.1-8b-random", "--prompt", "Hi", timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "llama-3.1-8b-random has random weights and no tokenizer, so it cannot chat" in done.stderr


def test_the_configs_are_installed_with_the_package():
    project = Path(__file__).resolve().parents[2]
    data = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    home = project / "minipaged" / "foundation"
    packed = {path for pattern in data["minipaged.foundation"] for path in home.glob(pattern)}
    assert packed == {random_weights.SHAPES / name / "config.json" for name in list_random_models()}
