"""The choice of tokens in plain PyTorch: the readable truth that the kernels are held to.

The filters and the noise are `minipaged.foundation.filters` and `minipaged.foundation.philox`.
"""

import math

import torch

from minipaged.foundation.filters import RandomRows, choose_tokens
from minipaged.shapes import Float, Int, Tensor

SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny
"""Rounding a tiny temperature to 0 would make the best token's score 0 / 0."""


def sample_tokens(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"] | None,
    top_p: Float[Tensor, " B"] | None,
    min_p: Float[Tensor, " B"] | None,
    seeds: Int[Tensor, " B"],
    output_indices: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Take the largest logit, and for rows with a temperature what `choose_tokens` says; see `ops.sample_tokens`."""
    raw = logits.float()
    best = raw.max(dim=-1)  # the first of equals, and NaN wherever a row holds one
    is_valid = best.values.isfinite()
    chosen = best.indices.where(is_valid, -1)
    rows = ((temperature != 0) & is_valid).nonzero()[:, 0]
    if len(rows):
        # First the subtraction: a logit divided by a small temperature may leave fp32's range, 0 does not. By way of
        # the absolute value, or else 0 and -0 would give two scores, and one of them would be the better.
        gaps = (raw[rows] - best.values[rows, None]).abs_()
        scores = gaps / -temperature[rows, None].clamp(min=SMALLEST_TEMPERATURE)
        top_k, top_p, min_p = (None if limit is None else limit[rows] for limit in (top_k, top_p, min_p))
        chosen[rows] = choose_tokens(_prepare_rows(scores, top_k, top_p, min_p, seeds[rows], output_indices[rows]))
    return chosen


def _prepare_rows(
    scores: Float[Tensor, "B V"],
    top_k: Int[Tensor, " B"] | None,
    top_p: Float[Tensor, " B"] | None,
    min_p: Float[Tensor, " B"] | None,
    seeds: Int[Tensor, " B"],
    output_indices: Int[Tensor, " B"],
) -> RandomRows:
    num_rows, vocab_size = scores.shape
    limits = [0] * num_rows if top_k is None else top_k.tolist()
    return RandomRows(
        scores=scores,
        top_k=[limit if 0 < limit < vocab_size else vocab_size for limit in limits],
        top_p=[1.0] * num_rows if top_p is None else top_p.tolist(),
        lowest_score=[
            math.log(share) if share else -math.inf for share in ([0] * num_rows if min_p is None else min_p.tolist())
        ],
        seeds=seeds,
        output_indices=output_indices,
    )
