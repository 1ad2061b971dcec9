"""What a checkpoint's ``config.json`` says, as one checked object.

The four supported families are one decoder with small differences, and this file turns the differences into fields:
the model file never asks for a family by name. A key that is absent takes the default of the family's config
class in transformers, which is what the authors of a checkpoint left it away for.
"""

from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import torch

from minipaged.errors import UserError
from minipaged.foundation.rope import RopeConfig


@dataclass(frozen=True)
class Family:
    """How one architecture differs from the others, and its defaults for absent keys."""

    class_name: str
    defaults: dict[str, Any]
    has_qkv_bias: bool = False
    has_bias_keys: tuple[str, ...] = ()  # which of attention_bias and mlp_bias the family reads
    has_qk_norm: bool = False


_SHARED_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": None,
}
_QWEN_DEFAULTS = {
    **_SHARED_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        {
            **_SHARED_DEFAULTS,
            "vocab_size": 32_000,
            "intermediate_size": 11_008,
            "max_position_embeddings": 2048,
            "eos_token_id": 2,
        },
        has_bias_keys=("attention_bias", "mlp_bias"),
    ),
    "qwen2": Family("Qwen2ForCausalLM", _QWEN_DEFAULTS, has_qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_QWEN_DEFAULTS, "head_dim": 128},
        has_bias_keys=("attention_bias",),
        has_qk_norm=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        {
            **_SHARED_DEFAULTS,
            "vocab_size": 32_000,
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
    ),
}
_LIMITS = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "max_position_embeddings": 10**9,
    "sliding_window": 10**9,
}
_LIMIT = 10**7
"""The largest value of other counts. All are far beyond any model: a larger one is a slip, and would hang a start."""

SUPPORTED = ", ".join(family.class_name for family in FAMILIES.values())


@dataclass(frozen=True)
class ModelConfig:
    """Everything the model file and the caches need to know about a checkpoint.

    ``layer_windows`` holds one entry per layer: how many newest keys a token sees, itself included, or None for
    all. ``max_model_len`` is the longest sequence, prompt and output together, that the model was made for.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    rope: RopeConfig
    max_model_len: int
    layer_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes that keys and values of one token take over all layers.

        Example:
            SmolLM2-135M in bf16: 2 x 30 layers x 3 KV heads x 64 entries x 2 bytes = 23,040 bytes.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelConfig":
        """Read a ``config.json``.

        Raises:
            UserError: The architecture, or a setting that would change the numbers, is not supported.
        """
        model_type, family = _find_family(config)
        values = {**family.defaults, **config}
        _refuse_other_arithmetic(values)
        num_heads = _count(values, "num_attention_heads")
        num_kv_heads = num_heads if values["num_key_value_heads"] is None else _count(values, "num_key_value_heads")
        if num_heads % num_kv_heads:
            raise UserError(f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}")
        max_model_len = _count(values, "max_position_embeddings")
        rope = RopeConfig.from_dict(config, max_model_len)
        if rope.type == "dynamic":  # beyond the trained length its angles would change while a sequence grows
            max_model_len = min(max_model_len, rope.original_max_len)
        bias = {key: key in family.has_bias_keys and _flag(values, key) for key in ("attention_bias", "mlp_bias")}
        return cls(
            architecture=family.class_name,
            num_layers=_count(values, "num_hidden_layers"),
            hidden_size=_count(values, "hidden_size"),
            intermediate_size=_count(values, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(values, num_heads),
            vocab_size=_count(values, "vocab_size"),
            rms_norm_eps=_epsilon(values),
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            has_qkv_bias=family.has_qkv_bias or bias["attention_bias"],
            has_output_bias=bias["attention_bias"],
            has_mlp_bias=bias["mlp_bias"],
            has_qk_norm=family.has_qk_norm,
            rope=rope,
            max_model_len=max_model_len,
            layer_windows=_layer_windows(model_type, values),
            eos_token_ids=token_ids_of(values["eos_token_id"], "config.json: eos_token_id"),
        )


def _find_family(config: dict[str, Any]) -> tuple[str, Family]:
    """Return the family that ``model_type`` names, or that ``architectures`` names where the former is absent."""
    by_class = {family.class_name: model_type for model_type, family in FAMILIES.items()}
    classes = config.get("architectures")
    classes = [] if classes is None else classes
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise UserError(f"config.json: architectures must be a list of class names, not {shown(classes)}")
    named = config.get("model_type")
    if not isinstance(named, str | None):
        raise UserError(f"config.json: model_type must be a text, not {shown(named)}")
    named = named or next((by_class[name] for name in classes if name in by_class), None)
    refused = next((name for name in classes if name not in by_class), None)
    if refused is not None or named is None or named not in FAMILIES:
        raise UserError(f"architecture {refused or named!r} is not supported; supported are {SUPPORTED}")
    return named, FAMILIES[named]


def _refuse_other_arithmetic(values: dict[str, Any]) -> None:
    settings = values.get("quantization_config") or values.get("compression_config")
    if settings:
        method = settings.get("quant_method", "unnamed") if isinstance(settings, dict) else shown(settings)
        raise UserError(f"checkpoints with quantized weights (here {method}) are not supported; use the original one")
    if values["hidden_act"] not in ("silu", "swish"):
        raise UserError(f"activation {shown(values['hidden_act'])} is not supported; supported is silu")


def _count(values: dict[str, Any], key: str, least: int = 1) -> int:
    value, most = values[key], _LIMITS.get(key, _LIMIT)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"a whole number of at least {least} and at most {most:,}"
        raise UserError(f"config.json: {key} must be {allowed}, not {shown(value)}")
    return value


def _flag(values: dict[str, Any], key: str) -> bool:
    if not isinstance(values[key], bool | None):
        raise UserError(f"config.json: {key} must be true or false, not {shown(values[key])}")
    return bool(values[key])


def _epsilon(values: dict[str, Any]) -> float:
    value = values["rms_norm_eps"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise UserError(f"config.json: rms_norm_eps must be a number from 0 to 1, not {shown(value)}")
    return float(value)


def _head_dim(values: dict[str, Any], num_heads: int) -> int:
    if values["head_dim"] is not None:
        head_dim = _count(values, "head_dim")
    else:
        head_dim, rest = divmod(_count(values, "hidden_size"), num_heads)
        if rest:
            raise UserError(f"hidden_size {values['hidden_size']} is not a multiple of the {num_heads} attention heads")
    if head_dim % 2:
        raise UserError(f"head_dim must be even, since rotary embedding turns pairs of entries, not {head_dim}")
    return head_dim


def _layer_windows(model_type: str, values: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window: Mistral's in all layers, Qwen's in the upper ones when switched on, Llama's none."""
    num_layers = _count(values, "num_hidden_layers")
    window = None
    is_on = model_type == "mistral" or (model_type.startswith("qwen") and _flag(values, "use_sliding_window"))
    if is_on and values["sliding_window"] is not None:
        window = _count(values, "sliding_window")
    has_first = model_type.startswith("qwen") and window is not None
    first = _count(values, "max_window_layers", least=0) if has_first else 0
    is_sliding = [window is not None and layer >= first for layer in range(num_layers)]
    types = values.get("layer_types")
    if types is None:
        return tuple(window if sliding else None for sliding in is_sliding)
    names = {"full_attention": False, "attention": False, "sliding_attention": True}
    is_list = isinstance(types, list | tuple) and all(isinstance(name, str) for name in types)
    if not is_list or len(types) != num_layers or any(name not in names for name in types):
        raise UserError(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    listed = [names[name] for name in types]
    # Only Qwen reads the list; where another family's list says something else, its meaning is unclear.
    if (any(listed) and window is None) or (not model_type.startswith("qwen") and listed != is_sliding):
        raise UserError(f"layer_types does not fit sliding_window {window} of a {model_type} model")
    return tuple(window if sliding else None for sliding in listed)


def token_ids_of(value: Any, field: str = "eos_token_id") -> tuple[int, ...]:
    """Return what a config says under ``eos_token_id`` and the like, no, one or several ids, as a tuple.

    Args:
        field: How a refusal names the value.

    Raises:
        UserError: It is something else.

    Example:
        >>> token_ids_of(None), token_ids_of(2), token_ids_of([7, 9])
        ((), (2,), (7, 9))
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0 for entry in ids):
        raise UserError(f"{field} must be a token id of at least 0, a list of such ids, or null, not {shown(value)}")
    return tuple(ids)
