"""Where the filters cut a row, as kernels: count, bracket, collect, find the cut.

The launches follow each other as `minipaged.foundation.sampler.kernels` says. They leave for each other, per row::

    counts   [2, BINS]    tokens per bin, in both rounds
    sums     [4]          all weights; those behind the window of round 1; those before the bracket; keys collected
    windows  [2]          where the bins begin, as a distance below the best score, and how many there are in a unit
    plans    [4]          first and last bin of the bracket, number of tokens before it and in it
    keys     [CAPACITY]   the tokens in the bracket, in any order
    cuts     []           the last key to keep, or -1 if only the tokens before the bracket are kept
"""

# Pyright takes what tl.max and its like return for a tuple.
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

from minipaged.foundation.sampler.rows.kernels import (
    BEYOND,
    BINS,
    TILE,
    WEIGHT_SCALE,
    bin_of,
    gaps,
    is_finite,
    load_limits,
    load_logits,
    load_plan,
    load_window,
    make_keys,
    row_maximum,
    weight_of,
    weight_of_key,
)

CAPACITY = tl.constexpr(1024)  # keys that a row may collect; comparing them all costs the square of it
FEW = tl.constexpr(256)  # so many go into a smaller tile
PAIRS = tl.constexpr(8192)  # of keys that are compared at a time: more do not fit into the registers
NO_KEY = tl.constexpr(2**62)
SLACK = tl.constexpr(1e-4)  # keeps the bounds of `find_bracket_kernel` bounds when they are rounded


@triton.jit
def count_bins_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, counts_ptr, sums_ptr, windows_ptr,
    plans_ptr, VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Program (i, b) counts the tokens per bin in every n-th tile of row b, from the i-th on, n programs to a row.

    Round 0 sums all weights too. Round 1, for rows whose bracket holds too much, has its bins in that bracket, and
    sums the weights behind them.

    Loop invariant: ``counts`` and ``weights`` hold the program's tiles before ``begin``.
    """
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    _, top_p, _, is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    best = row_maximum(maxima_ptr, row, NUM_TILES, TILES)
    is_counted = is_filtered & is_finite(best)
    if ROUND == 1:
        is_counted &= load_plan(plans_ptr, row)[3] > CAPACITY
    if is_counted:
        start, per_unit = load_window(windows_ptr, row)
        counts = tl.zeros([BINS], tl.int32)
        weights = tl.zeros([TILE], tl.int64)
        for begin in range(tl.program_id(0) * TILE, VOCAB, tl.num_programs(0) * TILE):
            gap = gaps(load_logits(logits_ptr, row, begin + tl.arange(0, TILE), VOCAB), best, temperature)
            bins = bin_of(gap, start, per_unit)
            counts += tl.histogram(bins, BINS)
            if top_p < 1:
                weights += tl.where((bins == BEYOND) | (ROUND == 0), weight_of(gap), 0)
        bins = tl.arange(0, BINS)
        at = counts_ptr + (row * 2 + ROUND) * BINS + bins
        tl.atomic_add(at, counts, mask=(counts > 0) & (bins < BEYOND))
        tl.atomic_add(sums_ptr + row * 4 + ROUND, tl.sum(weights, axis=0))


@triton.jit
def find_bracket_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, counts_ptr, sums_ptr, windows_ptr, plans_ptr,
    VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Program b finds the bins of row b in which the kept tokens end.

    top_k ends in one known bin, and so does min_p. top_p drops tokens from the far end, up to a known weight. What a
    bin weighs is known between two bounds, as if all its tokens stood at the one edge or at the other: in round 0 a
    tenth apart, so top_p ends somewhere in the bins that hold a tenth of what is dropped. Where top_k cuts too, the
    weight to drop is not known before all that top_k keeps is: the bracket begins with the best token.

    A bracket that holds more than can be collected becomes the window of the next round.
    """
    row = tl.program_id(0)
    top_k, top_p, lowest, is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    is_open = is_filtered & is_finite(row_maximum(maxima_ptr, row, NUM_TILES, TILES))
    if ROUND == 1:
        is_open &= load_plan(plans_ptr, row)[3] > CAPACITY
    if is_open:
        start, per_unit = load_window(windows_ptr, row)
        bins = tl.arange(0, BINS)
        counts = tl.load(counts_ptr + (row * 2 + ROUND) * BINS + bins)  # 0 beyond
        last = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
        is_limited = (last < BEYOND) & (top_k < VOCAB)  # or else top_k keeps every token that matters
        last = tl.minimum(last, BEYOND - 1)
        first = tl.where(is_limited, last, BEYOND)
        if (top_p < 1) & is_limited:
            first = tl.full([], 1, tl.int32)
        else:
            if top_p < 1:
                all_weights, behind = tl.load(sums_ptr + row * 4), tl.load(sums_ptr + row * 4 + 1)
                dropped = (1 - top_p) * all_weights.to(tl.float64) - behind.to(tl.float64)
                p_first, p_last = bracket_weight(
                    counts, (dropped / WEIGHT_SCALE).to(tl.float32), start, per_unit, VOCAB
                )
                first, last = p_first, tl.minimum(p_last, last)
            last = tl.minimum(last, bin_of(-lowest, start, per_unit))
        first = tl.maximum(tl.minimum(first, last + 1), 1)
        num_before = tl.sum(tl.where(bins < first, counts, 0), axis=0)
        num_keys = tl.sum(tl.where((bins >= first) & (bins <= last), counts, 0), axis=0)
        tl.store(plans_ptr + row * 4, first)
        tl.store(plans_ptr + row * 4 + 1, last)
        tl.store(plans_ptr + row * 4 + 2, num_before)
        tl.store(plans_ptr + row * 4 + 3, num_keys)
        if (num_keys > CAPACITY) & (ROUND == 0):
            low, high = bracket_edges(first, last, start, per_unit)
            tl.store(windows_ptr + row * 2, low)
            tl.store(windows_ptr + row * 2 + 1, 1 / (high - low) * (BEYOND - 1))


@triton.jit
def bracket_weight(counts, dropped, start, per_unit, VOCAB: tl.constexpr):
    """Return the first and the last bin in which the weight of all tokens from there to the last bin is ``dropped``."""
    bins = tl.arange(0, BINS)
    inner = tl.where(bins > 0, counts, 0)
    most = tl.cumsum(inner * tl.exp(-(start + (bins - 1) / per_unit)), axis=0, reverse=True)
    least = tl.cumsum(inner * tl.exp(-(start + bins / per_unit)), axis=0, reverse=True)
    rounded_down = VOCAB / WEIGHT_SCALE  # weights are integers, so each may lose one unit
    first = tl.sum(((least > dropped * (1 + SLACK) + rounded_down) & (bins > 0)).to(tl.int32), axis=0)
    last = tl.sum(((most > dropped * (1 - SLACK)) & (bins > 0)).to(tl.int32), axis=0)
    return first, last


@triton.jit
def bracket_edges(first, last, start, per_unit):
    """Return two gaps between which all tokens of a bracket lie, with something to spare for rounding."""
    return (start + (first - 1) / per_unit) * (1 - SLACK), (start + last / per_unit) * (1 + SLACK)


@triton.jit
def collect_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, sums_ptr, windows_ptr, plans_ptr,
    keys_ptr, VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Program (i, b) collects the keys of row b in the bracket and sums the weights before it, tiles as above.

    Programs take places in ``keys`` as they come: which key lies where means nothing.

    Loop invariant: ``keys`` and ``weights`` hold what the program's tiles before ``begin`` have to give.
    """
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    _, top_p, _, is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    best = row_maximum(maxima_ptr, row, NUM_TILES, TILES)
    first, last, _, num_keys = load_plan(plans_ptr, row)
    if is_filtered & is_finite(best) & (num_keys <= CAPACITY):
        start, per_unit = load_window(windows_ptr, row)
        weights = tl.zeros([TILE], tl.int64)
        for begin in range(tl.program_id(0) * TILE, VOCAB, tl.num_programs(0) * TILE):
            token = begin + tl.arange(0, TILE)
            gap = gaps(load_logits(logits_ptr, row, token, VOCAB), best, temperature)
            bins = bin_of(gap, start, per_unit)
            if top_p < 1:
                weights += tl.where(bins < first, weight_of(gap), 0)
            is_taken = (bins >= first) & (bins <= last)
            num_taken = tl.sum(is_taken.to(tl.int32), axis=0)
            if num_taken > 0:
                place = tl.atomic_add(sums_ptr + row * 4 + 3, num_taken.to(tl.int64))
                place += tl.cumsum(is_taken.to(tl.int32), axis=0) - 1
                tl.store(keys_ptr + row * CAPACITY + place, make_keys(gap, token, ID_BITS), mask=is_taken)
        tl.atomic_add(sums_ptr + row * 4 + 2, tl.sum(weights, axis=0))


@triton.jit
def find_cut_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, sums_ptr, windows_ptr, plans_ptr,
    keys_ptr, cuts_ptr, VOCAB: tl.constexpr, NUM_TILES: tl.constexpr, TILES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Program b finds the last key that top_k and top_p keep of row b.

    The last resort is to search the row itself, when there are more keys than room: a thousand logits that are equal
    at the cut, or a top_k of a thousand together with top_p.
    """
    row = tl.program_id(0)
    top_k, top_p, _, is_filtered = load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB)
    best = row_maximum(maxima_ptr, row, NUM_TILES, TILES)
    first, last, num_before, num_keys = load_plan(plans_ptr, row)
    if is_filtered & is_finite(best):
        if num_keys <= FEW:
            cut = compare_all(row, top_k, top_p, sums_ptr, keys_ptr, num_before, num_keys, ID_BITS, FEW)
        elif num_keys <= CAPACITY:
            cut = compare_all(row, top_k, top_p, sums_ptr, keys_ptr, num_before, num_keys, ID_BITS, CAPACITY)
        else:
            temperature = tl.load(temperature_ptr + row)
            start, per_unit = load_window(windows_ptr, row)
            low, high = bracket_edges(first, last, start, per_unit)
            low, cut = make_keys(low, 0, ID_BITS), make_keys(high, 0, ID_BITS)
            whole = tl.load(sums_ptr + row * 4)
            if num_before + num_keys >= top_k:
                cut = search_row(logits_ptr, row, best, temperature, low, cut, top_k, 0.0, VOCAB, ID_BITS)
                whole = sum_row(logits_ptr, row, best, temperature, cut, VOCAB, ID_BITS)[1]
            if top_p < 1:
                weight = top_p * whole.to(tl.float64)
                cut = search_row(logits_ptr, row, best, temperature, low, cut, 0, weight, VOCAB, ID_BITS)
        tl.store(cuts_ptr + row, cut)


@triton.jit
def compare_all(
    row, top_k, top_p, sums_ptr, keys_ptr, num_before, num_keys, ID_BITS: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Return the last of up to SIZE collected keys that top_k and top_p keep, or -1: compare each with all.

    Loop invariant: ``rank`` and ``before`` are the tokens, and their weights, that come before each key, as far as
    they lie before the bracket or among the keys before ``begin``.
    """
    place = tl.arange(0, SIZE)
    key = tl.load(keys_ptr + row * CAPACITY + place, mask=place < num_keys, other=NO_KEY)
    rank = tl.full([SIZE], num_before, tl.int32)
    before = tl.zeros([SIZE], tl.int64) + tl.load(sums_ptr + row * 4 + 2)
    for begin in range(0, num_keys, PAIRS // SIZE):
        column = begin + tl.arange(0, PAIRS // SIZE)
        other = tl.load(keys_ptr + row * CAPACITY + column, mask=column < num_keys, other=NO_KEY)
        is_before = other[None, :] < key[:, None]
        rank += tl.sum(is_before.to(tl.int32), axis=1)
        if top_p < 1:
            before += tl.sum(tl.where(is_before, weight_of_key(other, ID_BITS)[None, :], 0), axis=1)
    is_kept = (key < NO_KEY) & (rank < top_k)
    if top_p < 1:
        whole = tl.load(sums_ptr + row * 4)
        if num_before + num_keys >= top_k:
            kept_weight = tl.where(is_kept, weight_of_key(key, ID_BITS), 0)
            whole = tl.load(sums_ptr + row * 4 + 2) + tl.sum(kept_weight, axis=0)
        is_kept &= before.to(tl.float64) < top_p * whole.to(tl.float64)
    return tl.max(tl.where(is_kept, key, -1), axis=0)


@triton.jit
def search_row(
    logits_ptr, row, best, temperature, low, high, num_tokens, weight, VOCAB: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return the first key up to which a row has so many tokens and so much weight, by halving.

    Loop invariant: it lies in [low, high].
    """
    while low < high:
        middle = (low + high) // 2
        tokens_there, weight_there = sum_row(logits_ptr, row, best, temperature, middle, VOCAB, ID_BITS)
        if (tokens_there >= num_tokens) & (weight_there.to(tl.float64) >= weight):
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def sum_row(logits_ptr, row, best, temperature, key, VOCAB: tl.constexpr, ID_BITS: tl.constexpr):
    """Return the number of tokens of a row up to ``key``, and the sum of their weights."""
    counts = tl.zeros([TILE], tl.int32)
    weights = tl.zeros([TILE], tl.int64)
    for begin in range(0, VOCAB, TILE):
        token = begin + tl.arange(0, TILE)
        gap = gaps(load_logits(logits_ptr, row, token, VOCAB), best, temperature)
        is_counted = make_keys(gap, token, ID_BITS) <= key
        counts += is_counted.to(tl.int32)
        weights += tl.where(is_counted, weight_of(gap), 0)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)
