"""Small tokenizers of the usual kinds, and conversations, for tests of text and chat."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from minipaged.foundation.chat_template import ChatTemplate
from minipaged.foundation.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
TEXTS = [
    "Hello world! naïve 日本語 😀 नमस्ते 삼겹살",
    "  two  spaces\n\n1. a  2024",
    "",
    " ",
    "def f(x):\n    return x\n",
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def save(folder: Path, backend: tokenizers.Tokenizer, template: str | None = None, **settings: Any) -> Path:
    """Write a model folder that holds just a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return folder


def sentencepiece_backend(prefix: str = "legacy", **flags: Any) -> tokenizers.Tokenizer:
    """Build a small Llama-style tokenizer: words begin with ``▁``, rare characters are spelled in bytes.

    Args:
        prefix: Where a first ``▁`` is put: "legacy" in front of every stretch between control tokens, "first" in
            front of the whole text.
        flags: Of the control tokens, such as ``rstrip``.
    """
    words = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁"]
    letters = [chr(code) for code in range(33, 127)]
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i"), ("I", "N"), ("<", "s"), ("<s", ">"), ("▁", "▁")]
    vocab = {word: i for i, word in enumerate([*words, *letters, *["".join(m) for m in merges if m[0] != "<s"]])}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prefix == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in words[:3]])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def sentencepiece(prefix: str = "legacy", template: str = LLAMA, **flags: Any) -> Tokenizer:
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(sentencepiece_backend(prefix, **flags), settings, ChatTemplate({"default": template}, settings))


def chatml(backend: tokenizers.Tokenizer, template: str = CHATML) -> Tokenizer:
    """Give a backend ChatML's control tokens and template."""
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"}, ChatTemplate({"default": template}, {}))


def byte_level_backend() -> tokenizers.Tokenizer:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def count(tokenizer: Tokenizer, ids: list[int], token: str) -> int:
    return ids.count(tokenizer.backend.token_to_id(token))
