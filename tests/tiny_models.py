"""Tiny random models, saved by transformers, for tests that compare with it or need a model at all."""

from pathlib import Path
from typing import Any

import torch

CONFIG_NAMES = {
    "llama": "LlamaConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "mistral": "MistralConfig",
}

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 272,  # 256 bytes and room for special tokens
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path | str,
    architecture: str = "llama",
    *,
    with_tokenizer: bool = False,
    weights_seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Save a random fp32 model that decodes decisively, and return its folder.

    The weights are large enough that the two best logits are about one apart and that greedy decoding wanders
    through the vocabulary. Norm weights and biases are random too, so that a forgotten one shows.

    Args:
        architecture: "llama", "qwen2", "qwen3" or "mistral".
        with_tokenizer: Also save a tokenizer that makes one token of each byte, and a chat template.
        config_overrides: Keys of the config class that replace `TINY_SIZES`. None means null.

    Example:
        >>> folder = make_tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)  # doctest: +SKIP
    """
    import transformers

    folder = Path(folder)
    config_class = getattr(transformers, CONFIG_NAMES[architecture])
    config = config_class(**{**TINY_SIZES, **config_overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _fill_with_large_values(model, weights_seed)
    model.save_pretrained(folder)
    if with_tokenizer:
        save_byte_tokenizer(folder)
    return folder


def _fill_with_large_values(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(noise)
            else:
                # Each layer must outweigh the embedding in the residual, or a tied model repeats its last token.
                gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.5
                weight.copy_(noise * gain * weight.shape[1] ** -0.5)


def save_byte_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose ids 0..255 are bytes and 256..258 the markers of `CHAT_TEMPLATE`."""
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_level_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_level_alphabet() -> list[str]:
    """Return the printable character that the ByteLevel pre-tokenizer writes for each byte, in byte order."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(256 + moved.index(byte)) for byte in range(256)]
