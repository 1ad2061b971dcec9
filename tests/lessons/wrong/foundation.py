"""Plausible wrong solutions of lesson 00, each with a piece of the message that its check must give."""

from itertools import pairwise
from typing import Any

import torch

from minipaged.foundation import reference
from minipaged.lessons.exercises import foundation as checks
from minipaged.shapes import Tensor


def rows_that_never_grow(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Forget that each step has one token more."""
    return num_prompt_tokens * num_output_tokens


def rows_with_the_last_token(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Count the new token in the step that chooses it."""
    return sum(num_prompt_tokens + step for step in range(1, num_output_tokens + 1))


def layer_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Any:
    """Take the mean away first, as another norm does."""
    total = x if residual is None else x + residual
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return normed if residual is None else (normed, total)


def norm_beside_the_residual(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Any:
    """Norm x alone and add the residual to the other result only."""
    normed = reference.rms_norm(x, weight, eps)
    return normed if residual is None else (normed, x + residual)


def norm_in_the_dtype_of_x(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Any:
    """Square numbers of half precision as they are."""
    total = x if residual is None else x + residual
    normed = total * (total.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
    return normed if residual is None else (normed, total)


def norm_with_eps_outside_the_root(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Any:
    """Add eps to the root and not to the mean."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight
    return normed if residual is None else (normed, total)


def attend_across_sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, window: int | None
) -> Any:
    """Take the whole flat axis for one sequence."""
    return reference.causal_attention(q, k, v, starts[[0, -1]], scale=scale, window=window)


def attend_to_heads_in_turn(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, window: int | None
) -> Any:
    """Let query head h read KV head h % K."""
    group = q.shape[1] // k.shape[1]
    return reference.causal_attention(
        q, k.repeat(1, group, 1), v.repeat(1, group, 1), starts, scale=scale, window=window
    )


def attend_in_the_dtype_of_q(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *, scale: float, window: int | None
) -> Any:
    """Compute in bfloat16 where the inputs are in it."""
    out, group = torch.empty_like(q), q.shape[1] // k.shape[1]
    for start, end in pairwise(starts.tolist()):
        keys, values = (each[start:end].repeat_interleave(group, 1) for each in (k, v))
        hidden = ~reference.visible_keys(end - start, 0, 0, window)
        scores = torch.einsum("thd,lhd->htl", q[start:end], keys) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("htl,lhd->thd", weights, values)
    return out


def intensity_of_multiplications(num_rows: int, num_in: int, num_out: int, bytes_per_number: int) -> float:
    """Forget the additions."""
    moved = num_rows * num_in + num_in * num_out + num_rows * num_out
    return num_rows * num_in * num_out / (moved * bytes_per_number)


def intensity_of_the_matrix_alone(num_rows: int, num_in: int, num_out: int, bytes_per_number: int) -> float:
    """Forget the rows that go in and come out."""
    return 2 * num_rows / bytes_per_number


WRONG = [
    (checks.check_rows, rows_that_never_grow, "a prompt of 3 tokens and an answer of 4"),
    (checks.check_rows, rows_with_the_last_token, "a prompt of 5 tokens and an answer of 1"),
    (checks.check_rms_norm, layer_norm, "x = [[3, 4]]"),
    (checks.check_rms_norm, norm_beside_the_residual, "The norm is taken of the sum"),
    (checks.check_rms_norm, norm_in_the_dtype_of_x, "too large for float16"),
    (checks.check_rms_norm, norm_with_eps_outside_the_root, "before the root is taken"),
    (checks.check_causal_attention, attend_across_sequences, "must not see the one before it"),
    (checks.check_causal_attention, attend_to_heads_in_turn, "Query heads 0 and 1 read KV head 0"),
    (checks.check_causal_attention, attend_in_the_dtype_of_q, "bfloat16 has 8 bits of precision"),
    (checks.check_intensity, intensity_of_multiplications, "a multiplication and an addition"),
    (checks.check_intensity, intensity_of_the_matrix_alone, "num_rows = 1, num_in = 4, num_out = 4"),
]
