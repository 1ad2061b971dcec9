"""Model folders with a wrong value somewhere: each is refused in one sentence that names the place."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.errors import UserError
from minipaged.foundation import default_model
from minipaged.foundation.config import ModelConfig
from minipaged.foundation.control_tokens import FIRST_STAND_IN, LAST_STAND_IN, StandIns
from minipaged.foundation.tokenizer import Tokenizer, load_tokenizer
from minipaged.foundation.weights import find_tensors, load_config, load_model, resolve_model
from tests.small_tokenizers import byte_level_backend, save

YARN = {"rope_type": "yarn", "factor": 4.0}
SLIDING = {"model_type": "qwen2", "use_sliding_window": True}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    *[({"rms_norm_eps": value}, "rms_norm_eps must be") for value in (None, "x", True, -1, float("nan"), 10**400)],
    *[({"layer_types": value}, "layer_types must name") for value in (5, [[], []], "ab", {"a": 1})],
    *[({"eos_token_id": value}, "eos_token_id must be") for value in (1.5, [[1]], "x", {"a": 1}, True, -1, ["x"])],
    *[({"architectures": value}, "architectures must be a list") for value in (5, [[]], "LlamaForCausalLM", 0)],
    ({"model_type": []}, "model_type must be a text"),
    ({"quantization_config": "abc"}, r"quantized weights \(here 'abc'\)"),
    ({"compression_config": {"quant_method": "x"}}, r"quantized weights \(here x\)"),
    *[({**SLIDING, "max_window_layers": value}, "max_window_layers must be") for value in (None, "x", -1)],
    ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    ({"attention_bias": []}, "attention_bias must be true or false"),
    ({"num_hidden_layers": 10**7}, "num_hidden_layers must be .* at most 10,000, not 10000000"),
    ({"hidden_size": 10**400}, "hidden_size must be"),
    ({"rope_theta": 10**400}, "rope_theta must be a number"),
    ({"rope_theta": float("inf")}, "rope_theta must be a number"),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta must be more than 1"),
    ({"rope_scaling": {**YARN, "mscale": "x"}}, "mscale must be a number"),
    ({"rope_scaling": {**YARN, "mscale": 1, "mscale_all_dim": []}, "rope_theta": "x"}, "rope_theta must be a number"),
    ({"rope_scaling": {**YARN, "mscale": 1, "mscale_all_dim": [1]}}, "mscale_all_dim must be a number"),
    ({"rope_scaling": {**YARN, "truncate": "no"}}, "truncate must be true or false"),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": 10**30}}, "original_max_position_embeddings must"),
    ({"rope_scaling": 5}, "rope_parameters must be one flat table"),
]
TOKENIZERS: list[tuple[str, Any, str]] = [
    ("tokenizer_config.json", [], "must hold a JSON object, not"),
    ("special_tokens_map.json", "x", "must hold a JSON object, not 'x'"),
    ("special_tokens_map.json", b"{", "cannot be read as JSON"),
    *[
        ("tokenizer_config.json", {"added_tokens_decoder": value}, "added_tokens_decoder")
        for value in ([1], {"x": {"content": "a"}}, {"1": 5}, {"1": {}}, {"1": {"content": "a", "lstrip": "no"}})
    ],
    *[
        ("tokenizer_config.json", {"chat_template": value}, "chat_template must be a text or a list")
        for value in (5, [5], [{"name": "a"}], [{"name": [], "template": "x"}], {"default": 5})
    ],
    ("chat_template.json", b"{", "cannot be read as JSON"),
    ("chat_template.json", [], "must hold a JSON object"),
    ("chat_template.json", {"other": 1}, "chat_template must be a text or a list"),
    ("chat_template.jinja", b"\xff\xfe", "cannot be read as UTF-8 text"),
    ("tokenizer_config.json", {"eos_token": "\ud800"}, "has a value that cannot be used"),
]


def write(path: Path, content: Any) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def check_one_sentence(error: UserError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize(("keys", "message"), CONFIGS)
def test_a_wrong_value_in_a_config_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "llama", "num_hidden_layers": 2, **keys})
    with pytest.raises(UserError, match=message) as refusal:
        load_config(tmp_path)
    check_one_sentence(refusal.value)


@pytest.mark.parametrize("value", [1.5, [[1]], "x", {"a": 1}])
def test_wrong_end_tokens_of_a_generation_config_are_refused(value: Any, tmp_path: Path) -> None:
    write(tmp_path / "config.json", {"model_type": "llama"})
    write(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id must be a token id"):
        load_config(tmp_path)


@pytest.mark.parametrize(("name", "content", "message"), TOKENIZERS)
def test_a_wrong_value_beside_a_tokenizer_is_refused_by_name(
    name: str, content: Any, message: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, byte_level_backend())
    write(folder / name, content)
    with pytest.raises(UserError, match=message) as refusal:
        load_tokenizer(folder)
    assert name in str(refusal.value)
    check_one_sentence(refusal.value)


@pytest.mark.parametrize(
    "error",
    [TypeError("a\nb"), ValueError("a"), KeyError("a"), AttributeError("a"), ZeroDivisionError(), OverflowError()],
)
def test_an_error_nobody_foresaw_becomes_one_sentence(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(ModelConfig, "from_dict", fail)
    monkeypatch.setattr(Tokenizer, "from_folder", fail)
    write(tmp_path / "config.json", {})
    write(tmp_path / "tokenizer.json", {})
    for load, name in ((load_config, "config.json"), (load_tokenizer, "tokenizer_config.json")):
        with pytest.raises(
            UserError, match=f"{name} has a value that cannot be used .{type(error).__name__}"
        ) as refusal:
            load(tmp_path)
        check_one_sentence(refusal.value)


@pytest.mark.parametrize("weight_map", [["a"], None, {"a": 1, "b": "c.safetensors"}, {"a": []}])
def test_a_wrong_weight_map_is_refused(weight_map: Any, tmp_path: Path) -> None:
    (tmp_path / "c.safetensors").touch()
    write(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json(: weight_map must be an object| names )"):
        find_tensors(tmp_path)


def test_damaged_weights_are_named_with_their_folder_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    own, default = tmp_path / "own", tmp_path / default_model.FOLDER_NAME
    for folder, remedy in ((own, "download it again"), (default, f"delete the folder {default}")):
        folder.mkdir()
        write(folder / "config.json", {"model_type": "llama"})
        (folder / "model.safetensors").write_bytes(b"x")
        with pytest.raises(UserError) as refusal:
            load_model(folder, dtype=torch.float32)
        assert f"{folder / 'model.safetensors'} is damaged" in str(refusal.value) and remedy in str(refusal.value)
    (own / "model.safetensors").unlink()
    (own / "model.safetensors").mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors must be a file, and is a folder"):
        find_tensors(own)


@pytest.mark.parametrize("name", ["", " ", None, 5, b"x", "x" * 5000, "~nouser-of-this-machine/x", "a\0b"])
def test_a_name_that_can_be_no_model_is_refused(name: Any) -> None:
    with pytest.raises(UserError) as refusal:
        resolve_model(name)
    check_one_sentence(refusal.value)


def test_a_conversation_that_leaves_no_stand_in_is_refused() -> None:
    stand_ins = StandIns({chr(code) for code in range(FIRST_STAND_IN, LAST_STAND_IN + 1)} - {chr(LAST_STAND_IN)})
    assert stand_ins.of("<a>") == chr(LAST_STAND_IN) == stand_ins.of("<a>")
    with pytest.raises(UserError, match=r"holds every character from U\+F0000"):
        stand_ins.of("<b>")
