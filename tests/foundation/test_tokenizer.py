"""Text to ids and back, and the files a tokenizer is read from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from minipaged.errors import UserError
from minipaged.foundation.tokenizer import Tokenizer, load_tokenizer
from tests.small_tokenizers import (
    TEXTS,
    byte_level_backend,
    save,
    sentencepiece,
    sentencepiece_backend,
)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(smollm2_folder)
    assert tokenizer is not None
    return tokenizer


def test_ids_and_text_equal_those_of_transformers(smollm2: Tokenizer, smollm2_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_folder)
    for text in [*TEXTS, "a<|im_end|>b", "1234567", "\t\t\n \n"]:
        ids = smollm2.encode(text)
        assert ids == theirs(text).input_ids
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.vocab_size == len(theirs)
    assert smollm2.eos_token_ids == {theirs.eos_token_id}


@pytest.mark.parametrize("prefix", ["legacy", "first"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_and_spaces_survive_a_sentencepiece_tokenizer(prefix: str, text: str) -> None:
    tokenizer = sentencepiece(prefix)
    # This kind puts no space before a text that begins with one, so decoding takes that one away.
    expected = text.removeprefix(" ") if prefix == "first" else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


def test_a_special_token_is_hidden_or_shown(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hi<|im_end|>")
    assert smollm2.decode(ids) == "Hi"
    assert smollm2.decode(iter(ids), skip_special_tokens=False) == "Hi<|im_end|>"


def test_plain_text_gets_a_begin_token_only_if_the_model_has_one(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)
    assert sentencepiece().encode("hi")[0] == 1
    assert sentencepiece().encode("hi", add_special_tokens=False)[0] != 1


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_only_tokenizer_json_decides_about_the_begin_token(settings: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = save(tmp_path, sentencepiece_backend(), **named, **settings)
    ids = Tokenizer.from_folder(folder).encode("hi")
    assert ids[0] == 1
    assert ids == AutoTokenizer.from_pretrained(folder)("hi").input_ids


def test_truncation_and_padding_from_training_are_dropped() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("abcde")) == 5


@pytest.mark.parametrize("text", ["a\ud800b", 5, None, ["a"]])
def test_what_is_not_text_is_refused(smollm2: Tokenizer, text: Any) -> None:
    with pytest.raises(UserError):
        smollm2.encode(text)


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_the_end_token_is_read_from_either_file_and_in_either_form(eos: Any, file: str, tmp_path: Path) -> None:
    save(tmp_path, sentencepiece_backend(), eos_token=None)
    (tmp_path / file).write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {2}


def test_without_an_end_token_the_set_is_empty(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), eos_token="<not in the vocabulary>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == frozenset()
    assert tokenizer.vocab_size == 256


def test_tokens_that_only_the_settings_list_are_added(tmp_path: Path) -> None:
    listed = {"256": {"content": "<|im_end|>", "special": True, "normalized": False}}
    save(tmp_path, byte_level_backend(), eos_token="<|im_end|>", added_tokens_decoder=listed)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<|im_end|>")[1:] == [256]
    assert tokenizer.eos_token_ids == {256}


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(file: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend())
    (tmp_path / file).write_text('{"version":')
    with pytest.raises(UserError, match=file):
        load_tokenizer(tmp_path)


def test_an_older_kind_of_tokenizer_is_built_by_transformers(tmp_path: Path) -> None:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"he": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("he") == [256]
    assert tokenizer.eos_token_ids == {257}


def test_an_older_kind_that_cannot_be_built_gives_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(UserError, match=r"has no tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_loading_and_chatting_import_neither_torch_nor_transformers(smollm2_folder: Path) -> None:
    script = (
        "import sys; from minipaged.foundation.tokenizer import load_tokenizer; "
        f"t = load_tokenizer({str(smollm2_folder)!r}); "
        "assert 'jinja2' not in sys.modules; "
        "t.apply_chat_template([{'role': 'user', 'content': 'Hi<|im_end|>'}]); "
        "import minipaged.foundation.default_model; "
        "assert not {'torch', 'transformers', 'gguf', 'numpy'} & set(sys.modules)"
    )
    project = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=project, check=True, timeout=60)
