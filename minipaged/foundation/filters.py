"""top_k, top_p and min_p, and the Gumbel-max choice among the tokens they keep.

A row without top_k and top_p draws noise for the whole vocabulary and takes the best sum. A row with one of
them keeps few tokens, so only its best tokens are looked up, in order, and only these draw noise: the same
numbers that they have in the whole row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from minipaged.foundation.philox import gumbel_noise, gumbel_noise_at
from minipaged.shapes import Bool, Float, Int, Tensor

# Rows with top_k or top_p sort this many of their best tokens, and more only when these do not hold all that
# the filters keep. The numbers change the time, never the result.
_CANDIDATES = (512, 8192)

# top_p sums the weights exp(x) <= 1 as integers of this scale, since integer sums do not depend on the order
# of adding. 2^40 leaves room for 2^22 tokens in an int64.
_WEIGHT_SCALE = 2.0**40


@dataclass(frozen=True)
class RandomRows:
    """The rows of a batch that have a temperature, ready for the filters; each list has one value per row.

    Args:
        scores: (logit - maximum) / temperature: at most 0, and 0 for the best token.
        top_k: V where there is no limit.
        top_p: 1 where there is no limit.
        lowest_score: min_p as a score, its logarithm; -inf where there is no limit.
        seeds: See `minipaged.foundation.philox`, as for output_indices.
    """

    scores: Float[Tensor, "B V"]
    top_k: Sequence[int]
    top_p: Sequence[float]
    lowest_score: Sequence[float]
    seeds: Int[Tensor, " B"]
    output_indices: Int[Tensor, " B"]

    def select(self, rows: list[int]) -> "RandomRows":
        """Return some of the rows."""
        index = torch.tensor(rows, device=self.scores.device)
        return RandomRows(
            scores=self.scores[index],
            top_k=[self.top_k[row] for row in rows],
            top_p=[self.top_p[row] for row in rows],
            lowest_score=[self.lowest_score[row] for row in rows],
            seeds=self.seeds[index],
            output_indices=self.output_indices[index],
        )

    def column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """Return one number per row as a tensor that broadcasts over the row's tokens."""
        return torch.tensor(values, dtype=dtype, device=self.scores.device)[:, None]  # [B, 1]


def choose_tokens(rows: RandomRows) -> Int[Tensor, " B"]:
    """Choose one token per row: the best of score + noise among those that the row's filters keep."""
    num_rows, vocab_size = rows.scores.shape
    filtered = [row for row in range(num_rows) if rows.top_k[row] < vocab_size or rows.top_p[row] != 1]
    unfiltered = sorted(set(range(num_rows)).difference(filtered))
    chosen = torch.empty_like(rows.seeds)
    if unfiltered:
        chosen[unfiltered] = _choose_from_all(rows.select(unfiltered))
    for width in (*_CANDIDATES, vocab_size):
        if filtered:
            token_ids, is_complete = _choose_from_best(rows.select(filtered), min(width, vocab_size))
            chosen[filtered] = token_ids
            filtered = [row for row, done in zip(filtered, is_complete.tolist(), strict=True) if not done]
    return chosen


def _choose_from_all(rows: RandomRows) -> Int[Tensor, " B"]:
    """Choose for rows that have neither top_k nor top_p: nothing has to be sorted."""
    noisy = rows.scores + gumbel_noise(rows.seeds, rows.output_indices, rows.scores.shape[-1], rows.scores.device)
    lowest_score = rows.column(rows.lowest_score, torch.float32)
    return noisy.masked_fill_(rows.scores < lowest_score, -math.inf).max(dim=-1).indices


def _choose_from_best(rows: RandomRows, width: int) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Choose among each row's ``width`` best tokens.

    Returns:
        The token ids, and whether all tokens that the row's filters keep are among the ``width`` best. Where
        not, the id means nothing.
    """
    vocab_size = rows.scores.shape[-1]
    scores, token_ids = best_tokens(rows.scores, width)  # [B, C]
    top_k, top_p = rows.column(rows.top_k, torch.int64), rows.column(rows.top_p, torch.float64)
    is_kept = torch.arange(width, device=scores.device) < top_k
    weights = _weights(scores) * is_kept
    has_limit = top_k < vocab_size
    total = torch.where(has_limit, weights.sum(-1, keepdim=True), _weights(rows.scores).sum(-1, keepdim=True))
    # A token stays while those before it do not reach top_p yet, so the best one always does. With top_p = 1
    # only tokens of weight 0 may go, over 27 below the best; no noise lifts a score by more than 20 above
    # another.
    weight_before = weights.cumsum(dim=-1) - weights
    is_kept &= weight_before < top_p * total
    is_kept &= scores >= rows.column(rows.lowest_score, torch.float32)
    noisy = (scores + _noise_at(rows, token_ids)).masked_fill_(~is_kept, -math.inf)
    is_best = noisy == noisy.amax(dim=-1, keepdim=True)
    chosen = torch.where(is_best, token_ids, vocab_size).amin(dim=-1)
    # A limit beyond the width leaves the total of its weights unknown.
    is_complete = (top_k <= width) | (~has_limit & ~is_kept[:, -1:])
    return chosen, is_complete[:, 0]


def _weights(scores: Float[Tensor, "B C"]) -> Int[Tensor, "B C"]:
    return (scores.exp() * _WEIGHT_SCALE).to(torch.int64)


def _noise_at(rows: RandomRows, token_ids: Int[Tensor, "B C"]) -> Float[Tensor, "B C"]:
    vocab_size, device = rows.scores.shape[-1], rows.scores.device
    if 4 * token_ids.shape[-1] < vocab_size:
        return gumbel_noise_at(rows.seeds, rows.output_indices, token_ids)
    return gumbel_noise(rows.seeds, rows.output_indices, vocab_size, device).gather(-1, token_ids)


def best_tokens(scores: Float[Tensor, "B V"], width: int) -> tuple[Float[Tensor, "B C"], Int[Tensor, "B C"]]:
    """Return the best scores and their token ids, best first, equal scores by rising id.

    `torch.topk` promises no order among equals. So it gets integers that are never equal: the score's bits in
    front (read as an integer they keep the order of positive floats and turn that of negative ones round),
    the token id counted down behind.
    """
    bits = scores.contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    last = scores.shape[-1] - 1
    keys = (ordered << 32) + torch.arange(last, -1, -1, device=scores.device)
    token_ids = last - (keys.topk(width, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(-1, token_ids), token_ids
