"""What the sampler's kernels share: how they read a row's settings and logits, scores and keys, and the noise."""

# Pyright takes what tl.max and its like return for a tuple.
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

TILE = tl.constexpr(2048)  # tokens that a program holds at a time; it changes no result but by rounding

# Scores are counted down to 28 below the best, where weights end: 2^40 exp(-28) is below 1. Noise lies between -2.82
# and 16.64, so it lifts no token from beyond over the best one.
REACH = tl.constexpr(28.0)
BINS = tl.constexpr(256)  # of a count: counting costs time with every bin
BEYOND = tl.constexpr(255)  # the bin behind what is counted; bin 0 lies before it
WEIGHT_SCALE = tl.constexpr(2.0**40)  # as in `minipaged.foundation.filters`

NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def load_limits(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, VOCAB: tl.constexpr):
    """Return top_k, top_p, min_p as a score, and whether they ask anything of this row; a greedy row has no filters."""
    top_k = tl.full([], VOCAB, tl.int32)
    top_p = tl.full([], 1.0, tl.float64)
    lowest = tl.full([], float("-inf"), tl.float32)
    if top_k_ptr is not None:
        limit = tl.load(top_k_ptr + row)
        top_k = tl.where((limit > 0) & (limit < VOCAB), limit, VOCAB)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row)
    if min_p_ptr is not None:
        share = tl.load(min_p_ptr + row)
        lowest = tl.where(share > 0, tl.log(tl.where(share > 0, share, 1.0)).to(tl.float32), float("-inf"))
    asks = (top_k < VOCAB) | (top_p < 1) | (lowest > float("-inf"))
    return top_k, top_p, lowest, asks & (tl.load(temperature_ptr + row) > 0)


@triton.jit
def load_plan(plans_ptr, row):
    """Return the first and the last bin of a row's bracket, and the number of tokens before it and in it."""
    at = plans_ptr + row * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_window(windows_ptr, row):
    """Return where a row's bins begin, below the best score, and how many there are in one unit."""
    return tl.load(windows_ptr + row * 2), tl.load(windows_ptr + row * 2 + 1)


@triton.jit
def load_logits(logits_ptr, row, token, VOCAB: tl.constexpr):
    """Return logits in fp32: -inf behind the row, and +inf for NaN, so that the maximum shows it: tl.max may not."""
    x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def row_maximum(maxima_ptr, row, NUM_TILES: tl.constexpr, TILES: tl.constexpr):
    """Return the largest logit of a row."""
    tile = tl.arange(0, TILES)
    return tl.max(tl.load(maxima_ptr + row * NUM_TILES + tile, mask=tile < NUM_TILES, other=float("-inf")), axis=0)


@triton.jit
def is_finite(x):
    """Return whether x is a number, and no infinite one."""
    return tl.abs(x) < float("inf")


@triton.jit
def divisor(temperature):
    """Return what scores are divided by. Rounding a tiny temperature to 0 would make the best score 0 / 0."""
    return tl.where(temperature > 0, tl.maximum(temperature, 2.0**-126), 1.0)


@triton.jit
def gaps(x, best, temperature):
    """Return how far scores are below the best one. As integers, the bits of these numbers have the same order."""
    return tl.abs(tl.div_rn(x - best, divisor(temperature)))


@triton.jit
def bin_of(gap, start, per_unit):
    """Return the bin of a token. The arithmetic is the same everywhere, so a token never changes its bin."""
    return tl.minimum(tl.maximum((gap - start) * per_unit + 1, 0.0), BEYOND).to(tl.int32)


@triton.jit
def weight_of(gap):
    """Return a token's weight as an integer."""
    return (tl.exp(-gap) * WEIGHT_SCALE).to(tl.int64)


@triton.jit
def make_keys(gap, token, ID_BITS: tl.constexpr):
    """Return the places of tokens in the order of falling score, then rising id."""
    return (gap.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) + token


@triton.jit
def gap_of_key(key, ID_BITS: tl.constexpr):
    """Return how far below the best score a key's token is."""
    return (key >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def weight_of_key(key, ID_BITS: tl.constexpr):
    """Return the weight of a key's token."""
    return weight_of(gap_of_key(key, ID_BITS))


@triton.jit
def best_token(score, token):
    """Return the token of the largest score, of equals the lowest id, or NO_TOKEN if none has a chance."""
    best = tl.max(score, axis=0)
    best = tl.where(best > float("-inf"), best, float("inf"))
    return tl.min(tl.where(score == best, token, NO_TOKEN), axis=0)


@triton.jit
def tile_noise(seeds_ptr, output_indices_ptr, row, start):
    """Return the noise of every token of the tile that begins at ``start``; four neighbours share a counter."""
    a, b, c, d = random_words(seeds_ptr, output_indices_ptr, row, start // 4 + tl.arange(0, TILE // 4))
    return to_gumbel(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)))


@triton.jit
def noise_at(seeds_ptr, output_indices_ptr, row, token):
    """Return the noise of single tokens: the numbers that `tile_noise` has for them."""
    a, b, c, d = random_words(seeds_ptr, output_indices_ptr, row, token // 4)
    word = token % 4
    return to_gumbel(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def random_words(seeds_ptr, output_indices_ptr, row, group):
    """Return the four words that Philox makes of each counter; see `minipaged.foundation.philox`."""
    output_index = tl.load(output_indices_ptr + row).to(tl.uint32)
    return tl.philox(tl.load(seeds_ptr + row), group, output_index, 0, 0)


@triton.jit
def to_gumbel(word):
    """Turn random words into Gumbel noise, by way of a uniform number between 0 and 1."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (2.0**-23)
    return -tl.log(-tl.log(uniform))
