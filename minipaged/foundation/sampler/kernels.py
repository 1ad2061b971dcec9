"""Choosing tokens as Triton kernels: several programs a row, no sort of the vocabulary, no word to the CPU.

A row without filters takes two launches: one program per tile of the row keeps the best of its tokens, noise added,
and one program per row takes the best of those. So each logit is read once.

Filters keep the first tokens in the order of falling score, then rising id, and the question is how many. A *key* is
a token's place in that order. The launches in between find the last key; rows without filters leave them at once::

    best_of_tile    the largest logit of each tile; the best token, noise added, where there are no filters
    count_bins      how many tokens per bin, a bin being a small range of scores; and the sum of all weights
    find_bracket    tokens before these bins are kept, tokens behind them are not, so the last key lies in them
                    ... both once more, with finer bins, if the bracket holds too much
    collect         the keys in the bracket, in any order, and the sum of the weights before it
    find_cut        compares these keys, and finds the last one exactly
    choose_kept     the best token of each tile up to there, noise added
    fold            the best of the tiles' best tokens

What several programs add up are integers, and what they collect is compared and not counted on to have an order. So
neither the order of adding shows, nor how many programs there are, nor how many rows.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel; constants go in as plain numbers; and pyright
# takes what tl.max and its like return for a tuple.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl

from minipaged.foundation.sampler.cut.kernels import (
    CAPACITY,
    collect_kernel,
    count_bins_kernel,
    find_bracket_kernel,
    find_cut_kernel,
)
from minipaged.foundation.sampler.rows.kernels import (
    BEYOND,
    BINS,
    NO_TOKEN,
    REACH,
    TILE,
    best_token,
    bin_of,
    divisor,
    gaps,
    is_finite,
    load_limits,
    load_logits,
    load_plan,
    load_window,
    make_keys,
    noise_at,
    row_maximum,
    tile_noise,
)
from minipaged.launch import FEW_PROGRAMS, check_indices, check_tensors, padded
from minipaged.shapes import Float, Int, Tensor


def sample_tokens(
    logits: Float[Tensor, "B V"],
    temperature: Float[Tensor, " B"],
    top_k: Int[Tensor, " B"] | None,
    top_p: Float[Tensor, " B"] | None,
    min_p: Float[Tensor, " B"] | None,
    seeds: Int[Tensor, " B"],
    output_indices: Int[Tensor, " B"],
) -> Int[Tensor, " B"]:
    """Launch the kernels of this module; see `ops.sample_tokens`. Which ones, and how, depends on shapes alone."""
    check_tensors("sample_tokens", logits)
    check_indices("sample_tokens", logits, torch.float32, temperature)
    check_indices("sample_tokens", logits, torch.int64, seeds, output_indices)
    check_indices("sample_tokens", logits, torch.int32, *(() if top_k is None else (top_k,)))
    check_indices("sample_tokens", logits, torch.float64, *(limit for limit in (top_p, min_p) if limit is not None))
    chosen = torch.empty_like(seeds)
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return chosen
    num_tiles = triton.cdiv(vocab_size, TILE.value)
    of_rows, draws = (temperature, top_k, top_p, min_p), (seeds, output_indices)
    maxima = logits.new_empty(num_rows, num_tiles, dtype=torch.float32)
    ids = torch.empty_like(maxima, dtype=torch.int32)
    has_limits = any(limit is not None for limit in (top_k, top_p, min_p))
    counts, sums, windows, plans, keys, cuts = _make_rooms(logits) if has_limits else (None,) * 6
    # Multiply-adds stay two operations, or else a token could change its bin from one kernel to the next.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    best_of_tile_kernel[(num_tiles, num_rows)](
        logits, *of_rows, *draws, maxima, ids, counts, sums, windows, VOCAB=vocab_size, **options
    )
    sizes = options | {"VOCAB": vocab_size, "NUM_TILES": num_tiles, "TILES": padded(num_tiles)}
    if has_limits:
        one, spans = (num_rows,), (min(num_tiles, triton.cdiv(2 * FEW_PROGRAMS, num_rows)), num_rows)
        left = (maxima, counts, sums, windows, plans)
        for count in (0, 1):
            count_bins_kernel[spans](logits, *of_rows, *left, **sizes, ROUND=count)
            find_bracket_kernel[one](*of_rows, *left, **sizes, ROUND=count)
        with_ids = sizes | {"ID_BITS": max(1, (vocab_size - 1).bit_length())}
        left = (maxima, sums, windows, plans, keys)
        collect_kernel[spans](logits, *of_rows, *left, **with_ids)
        find_cut_kernel[one](logits, *of_rows, *left, cuts, **with_ids | {"num_warps": 16})
        choose_kept_kernel[spans](logits, *of_rows, *draws, maxima, windows, plans, cuts, ids, **with_ids)
    fold_kernel[(num_rows,)](logits, temperature, *draws, maxima, ids, chosen, **sizes)
    return chosen


def _make_rooms(logits: Float[Tensor, "B V"]) -> tuple[Tensor, ...]:
    """Make room for what the launches leave for each other about every row; see `cut.kernels`."""
    num_rows = logits.shape[0]
    return (
        logits.new_empty(num_rows, 2, BINS.value, dtype=torch.int32),  # counts
        logits.new_empty(num_rows, 4, dtype=torch.int64),  # sums
        logits.new_empty(num_rows, 2, dtype=torch.float32),  # windows
        logits.new_empty(num_rows, 4, dtype=torch.int32),  # plans
        logits.new_empty(num_rows, CAPACITY.value, dtype=torch.int64),  # keys
        logits.new_empty(num_rows, dtype=torch.int64),  # cuts
    )


@triton.jit
def best_of_tile_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, output_indices_ptr,
    maxima_ptr, ids_ptr, counts_ptr, sums_ptr, windows_ptr, VOCAB: tl.constexpr,
):  # fmt: skip
    """Program (i, b) finds the largest logit of tile i of row b, and its token of the largest score plus noise.

    The row's maximum is not known yet, so scores count from the tile's; `fold_kernel` compares tiles by their scores
    in the row. Of rows with filters only the maximum is taken, and what is to be summed and counted is set to 0.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    x = load_logits(logits_ptr, row, token, VOCAB)
    largest = tl.max(x, axis=0)
    at = row * tl.num_programs(0) + tile
    tl.store(maxima_ptr + at, largest)
    is_filtered = tl.full([], False, tl.int1)
    if counts_ptr is not None:
        is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)[3]
        if is_filtered & (tile == 0):
            tl.store(counts_ptr + row * 2 * BINS + tl.arange(0, 2 * BINS), tl.zeros([2 * BINS], tl.int32))
            tl.store(sums_ptr + row * 4 + tl.arange(0, 4), tl.zeros([4], tl.int64))
            tl.store(windows_ptr + row * 2, 0.0)
            tl.store(windows_ptr + row * 2 + 1, (BEYOND - 1) / REACH)
    if not is_filtered:
        temperature = tl.load(temperature_ptr + row)
        score = tl.div_rn(x - tl.where(is_finite(largest), largest, 0.0), divisor(temperature))
        if temperature > 0:
            score += tile_noise(seeds_ptr, output_indices_ptr, row, tile * TILE)
        tl.store(ids_ptr + at, best_token(score, token))


@triton.jit
def choose_kept_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, output_indices_ptr,
    maxima_ptr, windows_ptr, plans_ptr, cuts_ptr, ids_ptr,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Program (i, b) finds the best kept token, noise added, of every n-th tile of row b with filters, from i on.

    n is the number of programs per row. Tiles that hold no kept token draw no noise.
    """
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    _, _, lowest, is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    best = row_maximum(maxima_ptr, row, NUM_TILES, TILES)
    if is_filtered & is_finite(best):
        first = load_plan(plans_ptr, row)[0]
        cut = tl.load(cuts_ptr + row)
        start, per_unit = load_window(windows_ptr, row)
        for begin in range(tl.program_id(0) * TILE, VOCAB, tl.num_programs(0) * TILE):
            token = begin + tl.arange(0, TILE)
            gap = gaps(load_logits(logits_ptr, row, token, VOCAB), best, temperature)
            is_kept = (bin_of(gap, start, per_unit) < first) | (make_keys(gap, token, ID_BITS) <= cut)
            score = tl.where(is_kept & (-gap >= lowest), -gap, float("-inf"))
            if tl.max(score, axis=0) > float("-inf"):
                score += tile_noise(seeds_ptr, output_indices_ptr, row, begin)
            tl.store(ids_ptr + row * NUM_TILES + begin // TILE, best_token(score, token))


@triton.jit
def fold_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, output_indices_ptr, maxima_ptr, ids_ptr, chosen_ptr,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program b takes the best of the tiles' best tokens of row b, or -1 if the row's maximum is not finite."""
    row = tl.program_id(0)
    best = row_maximum(maxima_ptr, row, NUM_TILES, TILES)
    if is_finite(best):
        temperature = tl.load(temperature_ptr + row)
        tile = tl.arange(0, TILES)
        token = tl.load(ids_ptr + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=NO_TOKEN)
        score = -gaps(load_logits(logits_ptr, row, token, VOCAB), best, temperature)
        if temperature > 0:
            score += noise_at(seeds_ptr, output_indices_ptr, row, token)
        tl.store(chosen_ptr + row, best_token(score, token))
    else:
        tl.store(chosen_ptr + row, -1)
