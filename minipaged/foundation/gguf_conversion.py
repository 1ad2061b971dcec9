"""Turn the default model's GGUF file into a folder in the Hugging Face layout.

Only that one file is known to convert exactly, so nothing here tries to be general. Two of its facts are easy
to get wrong and give a model that talks, but badly:

- The rows of the query and key matrices stand in another order (see `unpermute_rows`).
- ``tokenizer.ggml.pre = smollm`` means that digits are split one by one before the usual byte-level step.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minipaged.errors import UserError

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF's token types that stand for added tokens: hidden in decoded text, and shown."""


def convert(gguf_file: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the weights in bfloat16, the configs, the tokenizer and the chat template into ``folder``.

    Raises:
        UserError: The file is not a Llama-shaped model with the ``smollm`` tokenizer.

    Cost:
        Some seconds. One matrix at a time is unpacked to fp32; the bfloat16 copies stay in memory to the end.
    """
    from gguf import GGUFReader

    progress("reading the GGUF file")
    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _check_supported(gguf_file, fields)
    _write_weights(reader, fields, folder, progress)
    config = model_config(fields)
    _write_json(folder / "config.json", config)
    token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(folder / "generation_config.json", {name: config[name] for name in token_ids})
    progress("writing the tokenizer")
    build_tokenizer(fields).save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    # safetensors makes its file private to one user; a cache that several share needs the usual rights.
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
    template = fields["tokenizer.chat_template"]
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _check_supported(gguf_file: Path, fields: dict[str, Any]) -> None:
    kind = tuple(fields.get(name) for name in ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise UserError(f"{gguf_file.name} is a GGUF file of the kind {kind}; only the default model's is converted")


def hugging_face_name(gguf_name: str) -> str:
    """Return the name that a Llama checkpoint gives to a tensor.

    Example:
        >>> hugging_face_name("blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'
    """
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    _, layer, part, suffix = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def unpermute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Put a query or key matrix's rows back into the order that rotating by halves needs.

    GGUF stores the two rows that rotate together next to each other; a Llama checkpoint keeps them half a
    head apart.

    Args:
        weight: Shape [num_heads * D, E].
        num_heads: Query heads for the query matrix, KV heads for the key matrix.

    Example:
        One head of four rows:

        >>> unpermute_rows(np.array([[0], [1], [2], [3]]), num_heads=1).tolist()
        [[0], [2], [1], [3]]
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])  # [H, D/2, 2, E]
    return pairs.swapaxes(1, 2).reshape(weight.shape)  # [H * D, E]


def unpacked_tensors(reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor in fp32 under the name and in the row order of a Llama checkpoint."""
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute_rows(weight, heads[part])
        yield hugging_face_name(tensor.name), weight


def _write_weights(reader: Any, fields: dict[str, Any], folder: Path, progress: Callable[[str], None]) -> None:
    import torch
    from safetensors.torch import save_file

    tensors, shown = {}, 0
    for name, weight in unpacked_tensors(reader, fields):
        # A copy: tensors that were not packed are read-only views of the file, which torch warns about.
        tensors[name] = torch.from_numpy(np.array(weight)).to(torch.bfloat16)
        percent = 100 * len(tensors) // len(reader.tensors)
        if percent >= shown + 10:
            shown = percent - percent % 10
            progress(f"converting the weights: {shown} %")
    # transformers refuses a file that does not say which framework wrote it.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``config.json``."""
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": fields["llama.block_count"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # GGUF keeps these two in fp32; six digits bring back the round numbers that they were.
        "rms_norm_eps": _round_to_six_digits(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _round_to_six_digits(fields["llama.rope.freq_base"]),
        },
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def build_tokenizer(fields: dict[str, Any]) -> Any:
    """Return a `tokenizers.Tokenizer` that gives the ids the model was trained on.

    No token is put before plain text: the original tokenizer adds none either.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``tokenizer_config.json``."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # The general class takes tokenizer.json as it is; one named after a model may rebuild parts of it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def _round_to_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
