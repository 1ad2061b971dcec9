"""config.json as transformers reads it: defaults, places and types of the rotary settings, windows, refusals."""

import math
from typing import Any

import pytest
import torch

from minipaged.errors import UserError
from minipaged.foundation.config import ModelConfig
from minipaged.foundation.rope import RopeConfig
from tests.tiny_models import CONFIG_NAMES

YARN_4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3_8 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear 4": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3_8,
    "llama3, all pairs slow or blended": {**LLAMA3_8, "original_max_position_embeddings": 64},
    "yarn 4": YARN_4,
    "yarn, short": {**YARN_4, "original_max_position_embeddings": 64},
    "yarn, mscale": {**YARN_4, "mscale": 1.5, "mscale_all_dim": 0.5},
    "yarn, one mscale": {**YARN_4, "mscale": 1.5},
    "yarn, borders": {**YARN_4, "beta_fast": 16, "beta_slow": 2},
    "yarn, borders not rounded": {**YARN_4, "truncate": False},
    "yarn, attention factor": {**YARN_4, "attention_factor": 1.25},
    "yarn 1": {**YARN_4, "factor": 1.0},
}


def transformers_config(architecture: str, **keys: Any) -> Any:
    import transformers

    return getattr(transformers, CONFIG_NAMES[architecture])(**keys)


def transformers_rope(architecture: str, **keys: Any) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers_config(architecture, **keys)
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


@pytest.mark.parametrize("architecture", CONFIG_NAMES)
def test_absent_keys_take_the_defaults_of_transformers(architecture: str) -> None:
    theirs = transformers_config(architecture)
    ours = ModelConfig.from_dict({"model_type": architecture})
    eos = theirs.eos_token_id
    assert ours.architecture == type(theirs).__name__.replace("Config", "ForCausalLM")
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (ours.intermediate_size, ours.vocab_size) == (theirs.intermediate_size, theirs.vocab_size)
    assert ours.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert ours.eos_token_ids == (() if eos is None else (eos,))
    assert ours.layer_windows == (getattr(theirs, "sliding_window", None),) * ours.num_layers


def test_mistral_has_a_window_of_4096_unless_told_otherwise() -> None:
    def windows(**keys: Any) -> set[int | None]:
        return set(ModelConfig.from_dict({"model_type": "mistral", **keys}).layer_windows)

    assert windows() == {4096}
    assert windows(sliding_window=None) == {None}
    assert windows(sliding_window=8) == {8}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"sliding_window": 8},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ],
)
def test_windows_of_qwen_layers_equal_those_of_transformers(architecture: str, keys: dict[str, Any]) -> None:
    keys = {"num_hidden_layers": 4, **keys}
    theirs = transformers_config(architecture, **keys)
    expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(ModelConfig.from_dict({"model_type": architecture, **keys}).layer_windows) == expected


def test_null_kv_heads_mean_one_per_query_head_and_absent_ones_the_default() -> None:
    config = {"model_type": "mistral", "num_attention_heads": 16}
    assert ModelConfig.from_dict(config).num_kv_heads == 8
    assert ModelConfig.from_dict({**config, "num_key_value_heads": None}).num_kv_heads == 16


def test_biases_belong_to_the_families_that_have_them() -> None:
    def biases(architecture: str, **keys: Any) -> tuple[bool, bool, bool]:
        config = ModelConfig.from_dict({"model_type": architecture, **keys})
        return config.has_qkv_bias, config.has_output_bias, config.has_mlp_bias

    all_on = {"attention_bias": True, "mlp_bias": True}
    assert biases("llama") == (False, False, False)
    assert biases("llama", attention_bias=True) == (True, True, False)
    assert biases("llama", **all_on) == (True, True, True)
    assert biases("qwen2") == biases("qwen2", **all_on) == (True, False, False)
    assert biases("qwen3", **all_on) == (True, True, False)
    assert biases("mistral", **all_on) == (False, False, False)


def test_one_token_of_smollm2_takes_23040_bytes_in_bf16() -> None:
    config = ModelConfig.from_dict(
        {"model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
        | {"num_key_value_heads": 3}
    )
    assert config.kv_bytes_per_token(torch.bfloat16) == 23_040
    assert config.kv_bytes_per_token(torch.float32) == 46_080


def test_end_tokens_are_read_from_either_form() -> None:
    for given, expected in ((None, ()), (3, (3,)), ([3, 4], (3, 4))):
        config = ModelConfig.from_dict({"model_type": "llama", "eos_token_id": given})
        assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_scaling": {"rope_theta": 1e6, "type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}},
    ],
)
def test_theta_is_found_in_every_place_it_has_had(keys: dict[str, Any]) -> None:
    rope = ModelConfig.from_dict({"model_type": "llama", **keys}).rope
    assert rope.theta == 1e6
    assert rope.inverse_frequencies(64)[1].item() == pytest.approx(0.649382, abs=1e-6)


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_the_old_rope_scaling_is_read_with_either_name_of_its_type(name: str) -> None:
    config = {"model_type": "llama", "rope_theta": 1e6, "rope_scaling": {name: "linear", "factor": 4}}
    assert ModelConfig.from_dict(config).rope == RopeConfig(type="linear", theta=1e6, factor=4.0)


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("case", ROPE_CASES)
def test_inverse_frequencies_equal_those_of_transformers(case: str, theta: float, head_dim: int) -> None:
    def keys() -> dict[str, Any]:  # made anew for each reader: transformers writes into the table it is given
        parameters = {**ROPE_CASES[case], "rope_theta": theta}
        return {"head_dim": head_dim, "max_position_embeddings": 131072, "rope_parameters": parameters}

    frequencies, attention_factor = transformers_rope("llama", **keys())
    rope = ModelConfig.from_dict({"model_type": "llama", **keys()}).rope
    torch.testing.assert_close(rope.inverse_frequencies(head_dim), frequencies, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(attention_factor, abs=1e-12)


def test_yarn_with_factor_4_scales_cos_and_sin_by_1_138629() -> None:
    rope = ModelConfig.from_dict({"model_type": "llama", "rope_parameters": YARN_4}).rope
    assert rope.attention_factor == pytest.approx(1.138629, abs=1e-6)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("original", ["absent", "at top level", "in the table"])
def test_the_trained_length_is_found_where_transformers_finds_it(original: str) -> None:
    table = {"rope_type": "yarn", "factor": 4.0}
    keys: dict[str, Any] = {"max_position_embeddings": 512}
    if original == "at top level":
        keys["original_max_position_embeddings"] = 128
    if original == "in the table":
        table["original_max_position_embeddings"] = 128
    expected, _ = transformers_rope("llama", head_dim=64, rope_parameters=dict(table), **keys)
    rope = ModelConfig.from_dict({"model_type": "llama", "rope_parameters": table, **keys}).rope
    assert rope.original_max_len == (512 if original == "absent" else 128)
    torch.testing.assert_close(rope.inverse_frequencies(64), expected, rtol=1e-6, atol=0)


def test_dynamic_rope_ends_at_the_trained_length_and_equals_default_until_there() -> None:
    table = {"rope_type": "dynamic", "factor": 2.0}
    config = ModelConfig.from_dict({"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": table})
    assert config.max_model_len == 64
    assert torch.equal(config.rope.inverse_frequencies(16), RopeConfig().inverse_frequencies(16))
    table["original_max_position_embeddings"] = 32
    shorter = ModelConfig.from_dict({"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": table})
    assert shorter.max_model_len == 32


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        "'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM, Qwen2ForCausalLM",
    ),
    "another type alone": (
        {"model_type": "gemma3"},
        "'gemma3' is not supported; supported are LlamaForCausalLM",
    ),
    "no architecture": ({"model_type": None}, "None is not supported"),
    "another head": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "'LlamaForSequenceClassification'",
    ),
    "an activation": ({"hidden_act": "gelu"}, "activation 'gelu' is not supported; supported is silu"),
    "quantized weights": ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights .here gptq"),
    "an odd head": ({"head_dim": 15}, "head_dim must be even.* not 15"),
    "a width that heads do not divide": (
        {"hidden_size": 100, "num_attention_heads": 8},
        "100 is not a multiple",
    ),
    "heads that groups do not divide": (
        {"num_attention_heads": 9, "num_key_value_heads": 2},
        "9 must be a multiple",
    ),
    "a count in words": ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number"),
    "no layers": (
        {"num_hidden_layers": 0},
        "num_hidden_layers must be a whole number of at least 1 and at most 10,000, not 0",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "partial rotary in the table": (
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "partial_rotary_factor 0.25",
    ),
    "longrope": (
        {"rope_scaling": {"type": "longrope"}},
        "rope type 'longrope' is not supported; supported are default",
    ),
    "an unknown rope": ({"rope_parameters": {"rope_type": "mystery"}}, "rope type 'mystery'"),
    "an unknown rope setting": (
        {"rope_parameters": {"mrope_section": [1, 2]}},
        "rope setting 'mrope_section'",
    ),
    "rope per layer type": ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one flat table"),
    "no factor": (
        {"rope_parameters": {"rope_type": "linear"}},
        "factor must be a number of at least 1.0 and at most .*, not None",
    ),
    "a factor in words": ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor must be a number"),
    "llama3 half told": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "llama3 borders crossed": (
        {"rope_scaling": {**LLAMA3_8, "low_freq_factor": 4.0}},
        "low_freq_factor 4.0 must be less than high_freq_factor 4.0",
    ),
    "two places that disagree": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e6}},
        "rope_scaling and rope_parameters that disagree",
    ),
    "a window of nothing": (
        {"model_type": "mistral", "sliding_window": 0},
        "sliding_window must be a whole number",
    ),
    "a window without its size": (
        {"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "does not fit sliding_window None",
    ),
    "other layers": (
        {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "full_attention or sliding_attention",
    ),
    "layers of two kinds in Mistral": (
        {
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "does not fit sliding_window 4096 of a mistral model",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_change_the_numbers_is_refused_by_name(case: str) -> None:
    keys, message = REFUSALS[case]
    with pytest.raises(UserError, match=message):
        ModelConfig.from_dict({"model_type": "llama", **keys})


def test_the_class_name_decides_where_the_model_type_is_absent() -> None:
    assert ModelConfig.from_dict({"architectures": ["Qwen3ForCausalLM"]}).has_qk_norm
