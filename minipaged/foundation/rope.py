"""Rotary position embedding: what a config says about it, and the angles that follow.

Entry pair i of a head turns by ``position * inverse_frequency[i]``. A model trained to some length is stretched to
a longer one by slowing these turns down; the rope types differ only in which pairs they slow, and how much:

- ``default``: none.   - ``linear``: all, by ``factor``.
- ``llama3``: slow turns by ``factor``, fast ones not at all, a smooth change between two wavelengths.
- ``yarn``: the same idea with the borders counted in turns, and cos and sin scaled up a little.
- ``dynamic``: changes with the length of the text once it passes the trained length. Up to there it equals
  ``default``, and this engine goes no further, because one cached key would need several angles.
"""

import math
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any

import torch

from minipaged.errors import UserError
from minipaged.shapes import Float, Tensor

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
DEFAULT_THETA = 10_000.0
LARGEST = 1e12
"""Of any setting: far beyond every model's, and fp32 can still compute with it."""

_KNOWN_KEYS = {
    *(
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    ),
    *("low_freq_factor", "high_freq_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"),
}


@dataclass(frozen=True)
class RopeConfig:
    """The rotary settings of one model. Fields after ``original_max_len`` belong to llama3 or yarn alone."""

    type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    @classmethod
    def from_dict(cls, config: dict[str, Any], max_position_embeddings: int) -> "RopeConfig":
        """Read the settings from wherever a ``config.json`` keeps them.

        transformers 5 writes everything into ``rope_parameters``; before, ``rope_theta`` stood at top level and
        the rest in ``rope_scaling``. Both places at once must say the same.

        Args:
            max_position_embeddings: The trained length of the types that do not state one.

        Raises:
            UserError: An unknown type or setting, a missing or impossible value, or two places that disagree.
        """
        places = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)]
        found = [cls._from_place(place, config, max_position_embeddings) for place in places or [{}]]
        if found[0] != found[-1]:
            raise UserError("config.json gives rope_scaling and rope_parameters that disagree; keep one of them")
        return found[0]

    @classmethod
    def _from_place(cls, place: Any, config: dict[str, Any], max_len: int) -> "RopeConfig":
        if not isinstance(place, dict) or any(isinstance(value, dict) for value in place.values()):
            raise UserError("rope_parameters must be one flat table; settings per layer type are not supported")
        rope_type = place.get("rope_type") or place.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise UserError(f"rope type {shown(rope_type)} is not supported; supported are {', '.join(ROPE_TYPES)}")
        if unknown := set(place) - _KNOWN_KEYS:
            raise UserError(f"the rope setting {min(unknown)!r} is not supported")
        for partial in (place.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
            if partial not in (None, 1.0):
                raise UserError(f"partial_rotary_factor {shown(partial)} is not supported; all of a head must rotate")
        theta = place.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
        settings: dict[str, Any] = {"theta": _number("rope_theta", theta, above=1.0)}
        if rope_type in ("linear", "llama3", "yarn", "dynamic"):
            settings["factor"] = _number("factor", place.get("factor"), above=1.0)
        if rope_type in ("llama3", "yarn", "dynamic"):
            original = place.get("original_max_position_embeddings") or max_len
            if rope_type != "dynamic":
                # The top-level key, where it exists, wins in transformers too.
                original = config.get("original_max_position_embeddings") or original
            settings["original_max_len"] = int(_number("original_max_position_embeddings", original, above=1))
        if rope_type == "llama3":
            settings |= _llama3_settings(place)
        if rope_type == "yarn":
            if settings["theta"] == 1.0:  # all pairs turn alike, so there is no border between fast and slow ones
                raise UserError("rope setting rope_theta must be more than 1 where the rope type is yarn")
            settings |= _yarn_settings(place, settings["factor"])
        return cls(type=rope_type, **settings)

    def inverse_frequencies(self, head_dim: int) -> Float[Tensor, " D_half"]:
        """Return the angle per position of each pair of entries of a head, in fp32.

        Example:
            >>> RopeConfig(theta=1e6).inverse_frequencies(64)[:2]
            tensor([1.0000, 0.6494])
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            return self._llama3(frequencies)
        if self.type == "yarn":
            return self._yarn(frequencies, head_dim)
        return frequencies

    def _llama3(self, frequencies: Float[Tensor, " D_half"]) -> Float[Tensor, " D_half"]:
        """Slow each pair by how many turns it makes over the trained length: few turns fully, many not at all.

        Source: the Llama 3.1 release, function ``apply_scaling``.
        """
        turns = self.original_max_len * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _blend(frequencies, frequencies / self.factor, kept.clamp(0, 1))

    def _yarn(self, frequencies: Float[Tensor, " D_half"], head_dim: int) -> Float[Tensor, " D_half"]:
        """Keep the pairs before ``low``, slow those after ``high``, and blend between.

        Source: YaRN (arXiv 2309.00071), section 3.2.
        """

        def pair_with_turns(turns: float) -> float:
            """Return the index of the pair that makes this many turns over the trained length."""
            wavelength = self.original_max_len / (turns * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001  # equal borders: a step instead of a division by zero
        kept = 1 - ((torch.arange(head_dim // 2) - low) / width).clamp(0, 1)
        return _blend(frequencies, frequencies / self.factor, kept)


def _blend(fast: Tensor, slow: Tensor, kept: Tensor) -> Tensor:
    return kept * fast + (1 - kept) * slow


def _llama3_settings(place: dict[str, Any]) -> dict[str, Any]:
    low, high = (_number(key, place.get(key), above=0) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise UserError(f"rope setting low_freq_factor {low} must be less than high_freq_factor {high}")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _yarn_settings(place: dict[str, Any], factor: float) -> dict[str, Any]:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    weights = [_number(key, place[key], above=0) if place.get(key) else None for key in ("mscale", "mscale_all_dim")]
    attention_factor = place.get("attention_factor")
    if attention_factor is None:
        attention_factor = mscale(weights[0]) / mscale(weights[1]) if weights[0] and weights[1] else mscale(1.0)
    truncate = place.get("truncate", True)
    if not isinstance(truncate, bool | None):
        raise UserError(f"rope setting truncate must be true or false, not {shown(truncate)}")
    return {
        "attention_factor": _number("attention_factor", attention_factor, above=0),
        "beta_fast": _number("beta_fast", place.get("beta_fast") or 32, above=0.001),
        "beta_slow": _number("beta_slow", place.get("beta_slow") or 1, above=0.001),
        "truncate": bool(truncate),
    }


def _number(key: str, value: Any, above: float) -> float:
    """Return ``value`` as a float, or say that the setting is missing or out of range."""
    # A stretch of exactly 1 is allowed: it changes nothing.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not above <= value <= LARGEST or value <= 0:
        least = f"at least {above}" if above else "more than 0"
        raise UserError(f"rope setting {key} must be a number of {least} and at most {LARGEST:g}, not {shown(value)}")
    return float(value)
