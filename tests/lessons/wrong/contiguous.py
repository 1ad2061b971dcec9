"""Plausible wrong solutions of lesson 01, each with a piece of the message that its check must give."""

from typing import Any

import torch

from minipaged.contiguous import reference
from minipaged.contiguous.arena import Reservation
from minipaged.lessons.exercises import contiguous as checks
from minipaged.shapes import Tensor


def bytes_of_the_usual_formula(config: Any, dtype: torch.dtype) -> int:
    """Take the width of the model, as if every query head had its own key and value."""
    return 2 * config.num_layers * config.hidden_size * dtype.itemsize


def bytes_of_keys_alone(config: Any, dtype: torch.dtype) -> int:
    """Forget the values."""
    return config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def attend_without_the_newest(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Count the tokens without the new one."""
    return reference.contiguous_attention(q, k, v, (seq_lens - 1).clamp(min=0), scale=scale, window=window)


def attend_with_weights_of_zero(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Give what lies behind a sequence the weight 0, and multiply it all the same."""
    group = q.shape[1] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    hidden = torch.arange(k.shape[1]) >= seq_lens[:, None]
    scores = torch.einsum("bhd,blhd->bhl", q, keys) * scale
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhl,blhd->bhd", weights, values)


def attend_with_another_scale(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Scale by the size of a head, whatever is asked for."""
    return reference.contiguous_attention(q, k, v, seq_lens, scale=q.shape[-1] ** -0.5, window=window)


def attend_in_the_dtype_of_q(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    """Compute in bfloat16 where the inputs are in it."""
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(0, length - window)
        keys, values = (each[row, first:length].repeat_interleave(group, 1) for each in (k, v))
        weights = (torch.einsum("hd,lhd->hl", q[row], keys) * scale).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, values)
    return out


class Allocator:
    """What the lesson gives; the subclasses are wrong in `find` alone."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.allocated: dict[int, int] = {}

    def find(self, size: int) -> int | None:
        """Return where a range of ``size`` slots is free."""
        raise NotImplementedError

    def is_free(self, start: int, size: int) -> bool:
        """Return whether no taken range touches the slots from ``start`` on."""
        return all(start + size <= other or other + length <= start for other, length in self.allocated.items())

    def allocate(self, num_slots: int) -> int | None:
        """Take a range."""
        size = 1 << (num_slots - 1).bit_length()
        if (start := self.find(size)) is not None:
            self.allocated[start] = size
        return start

    def can_allocate(self, num_slots: int) -> bool:
        """Return whether a range is free."""
        return self.find(1 << (num_slots - 1).bit_length()) is not None

    def free(self, start: int) -> None:
        """Give a range back."""
        del self.allocated[start]


class OverhangingAllocator(Allocator):
    """Try every multiple of the size inside the arena, also the last one, where the range ends outside."""

    def find(self, size: int) -> int | None:
        """Return the first multiple of ``size`` whose range no other touches."""
        return next((start for start in range(0, self.num_slots, size) if self.is_free(start, size)), None)


class BumpAllocator(Allocator):
    """Go on behind the last range, and never look at what was given back."""

    def find(self, size: int) -> int | None:
        """Return the first multiple of ``size`` behind all ranges."""
        end = max((start + length for start, length in self.allocated.items()), default=0)
        start = -(-end // size) * size
        return start if start + size <= self.num_slots else None


class UnalignedAllocator(Allocator):
    """Take the first gap that is large enough, wherever it begins."""

    def find(self, size: int) -> int | None:
        """Return the first place where the range fits."""
        places = range(self.num_slots - size + 1)
        return next((start for start in places if self.is_free(start, size)), None)


def waste_without_a_future(own: Reservation, output_length: int) -> tuple[int, int, int, int]:
    """Call every empty slot reserved."""
    return own.num_tokens, own.num_reserved - own.num_tokens, 0, own.length - own.num_reserved


def waste_with_rounding_inside(own: Reservation, output_length: int) -> tuple[int, int, int, int]:
    """Count what rounding took as internal."""
    used_later = own.num_prompt_tokens + output_length - own.num_tokens
    return own.num_tokens, used_later, own.length - own.num_tokens - used_later, 0


WRONG = [
    (checks.check_kv_bytes, bytes_of_the_usual_formula, "for each of 8 KV heads"),
    (checks.check_kv_bytes, bytes_of_keys_alone, "A key and a value"),
    (checks.check_contiguous_attention, attend_without_the_newest, "It sees seq_lens[b] tokens"),
    (checks.check_contiguous_attention, attend_with_weights_of_zero, "NaN lies behind them"),
    (checks.check_contiguous_attention, attend_with_another_scale, "Use the scale that is given"),
    (checks.check_contiguous_attention, attend_in_the_dtype_of_q, "bfloat16 has 8 bits of precision"),
    (checks.check_allocator, BumpAllocator, "expected one of"),
    (checks.check_allocator, OverhangingAllocator, "8 of 20 slots are wanted"),
    (checks.check_allocator, UnalignedAllocator, "starts at a multiple of its size"),
    (checks.check_waste, waste_without_a_future, "still to be written"),
    (checks.check_waste, waste_with_rounding_inside, "rounded up"),
]
