"""Rung 1's operation as a Triton kernel, and the parts of decode attention that every later rung shares.

A sequence's keys are cut into pieces. Each piece is summed on its own, and the pieces are folded together from left to
right. Where the cuts are depends on the token's position alone: whether one program walks all pieces or several
programs take some each, the same numbers are added in the same order, so the result has the same bits.

    token    0   128  256  384  512  640  768  896  1,024          1,536          2,048
    piece    | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |       8      |       9      |  ...
"""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from minipaged.foundation.kernels import normalized, weigh
from minipaged.launch import LOG2_E, check_heads, check_indices, check_tensors, decode_tiles, padded, split_tiles
from minipaged.shapes import Float, Int, Tensor

FINE_PIECE = tl.constexpr(128)
"""Tokens between two cuts at the beginning of a sequence, a multiple of every TILE_KEYS.

A short sequence needs short pieces to keep many programs busy. In a long one, short pieces would leave many states
to write down and to fold, and longer ones are many enough.
"""

COARSE_PIECE = tl.constexpr(512)
"""Tokens between two cuts from COARSE_FROM on."""

COARSE_FROM = tl.constexpr(1024)
"""Where pieces become longer, a multiple of both."""

SUM_COLUMNS = tl.constexpr(16)
"""A matrix product has no fewer columns: so many times is each row sum computed."""


def contiguous_attention(
    q: Float[Tensor, "B H D"],
    k: Float[Tensor, "B L K D"],
    v: Float[Tensor, "B L K D"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H D"]:
    """Launch `contiguous_attention_kernel`; see `ops.contiguous_attention`."""
    check_tensors("contiguous_attention", q, k, v)
    check_indices("contiguous_attention", q, torch.int32, seq_lens)
    check_heads("contiguous_attention", q, k)
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    group = num_heads // num_kv_heads
    # With a window, the assembler would spill registers if the number were left to it.
    tiles = decode_tiles(q, group) if window is None else split_tiles(q, group)
    out = torch.empty_like(q)
    if num_seqs:
        contiguous_attention_kernel[(num_kv_heads, num_seqs)](
            q, k, v, out, seq_lens, k.shape[1], LOG2_E * scale,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, WINDOW=window,
            TILE_GROUP=tiles.queries, TILE_KEYS=tiles.keys,
            TILE_DIM=padded(head_dim, minimum=16),
            **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["row_length"])
def contiguous_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seq_lens_ptr, row_length, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b) computes the group of query heads that share KV head j, for sequence b.

    The group's heads are the rows of one matrix product, so K and V are read once for all of them. Nothing but this
    sequence's length and rows is read, and no loop depends on anything else: neighbours cannot change a bit.

    Loop invariant: the two states together hold the visible keys before ``start``; the second those of the piece that
    ``start`` lies in. A row without keys runs no loop and gives zeros.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    first = first_visible(seq_len, WINDOW)
    key = tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, TILE_DIM)
    at = (key * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]  # within a tile
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    piece_max, piece_sums, piece_acc = no_piece(TILE_GROUP, TILE_DIM)
    for start in range(first // TILE_KEYS * TILE_KEYS, seq_len, TILE_KEYS):
        visible = is_visible(key, first - start, seq_len - start, WINDOW)
        tile = (seq.to(tl.int64) * row_length + start) * (NUM_KV_HEADS * HEAD_DIM)
        mask = visible[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + tile + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + tile + at, mask=mask, other=0.0)  # zeros where hidden: a weight of 0 times NaN is NaN
        piece_max, piece_sums, piece_acc = attend_tile(q, k, v, visible, scale, piece_max, piece_sums, piece_acc)
        if is_cut(start + TILE_KEYS, seq_len):
            row_max, row_sum, acc = fold(row_max, row_sum, acc, piece_max, the_sum(piece_sums), piece_acc)
            piece_max, piece_sums, piece_acc = no_piece(TILE_GROUP, TILE_DIM)
    out = normalized(row_sum, acc)
    store_group(out_ptr, out, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit
def attend_tile(q, k, v, visible, scale, row_max, row_sums, acc):
    """Take one tile of keys [keys, D] into the state of some query heads. ``visible`` may be None, or a flag per key.

    Row sums are a matrix product with ones. Matrix units add in the same order whatever the height of the tile and
    the number of warps, which `tl.sum` does not; and its threads would have to wait for each other.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if visible is not None:
        # Replaced, not added to: -inf added to a NaN would stay NaN.
        scores = tl.where(visible[None, :], scores, float("-inf"))
    row_max, weights, fade = weigh(scores, row_max)
    weights = weights.to(v.dtype)
    ones = tl.full([k.shape[0], SUM_COLUMNS], 1.0, v.dtype)
    row_sums = tl.dot(weights, ones, row_sums * fade[:, None], input_precision="ieee")
    acc = tl.dot(weights, v, acc * fade[:, None], input_precision="ieee")
    return row_max, row_sums, acc


@triton.jit
def cut_before(token):
    """Return the last cut at or before a token."""
    fine = tl.minimum(token, COARSE_FROM) // FINE_PIECE * FINE_PIECE
    return fine + tl.maximum(token - COARSE_FROM, 0) // COARSE_PIECE * COARSE_PIECE


@triton.jit
def piece_of(token):
    """Return the number of the piece that a token lies in."""
    fine = tl.minimum(token, COARSE_FROM) // FINE_PIECE
    return fine + tl.maximum(token - COARSE_FROM, 0) // COARSE_PIECE


def num_pieces(num_tokens: int) -> int:
    """Return into how many pieces a sequence is cut.

    Example:
        >>> num_pieces(128), num_pieces(129), num_pieces(1024), num_pieces(1025)
        (1, 2, 8, 9)
    """
    fine = triton.cdiv(min(num_tokens, COARSE_FROM.value), FINE_PIECE.value)
    return fine + triton.cdiv(max(num_tokens - COARSE_FROM.value, 0), COARSE_PIECE.value)


def max_pieces(num_tokens: int, window: int | None) -> int:
    """Return how many pieces of a sequence of up to ``num_tokens`` its newest token sees at most.

    A window that begins just before a cut touches one piece more than one that begins at token 0.
    """
    return num_pieces(num_tokens) if window is None else min(num_pieces(num_tokens), num_pieces(window) + 1)


@triton.jit
def is_cut(end, seq_len):
    """Return whether a piece ends with the tile that ends before ``end``: at a cut, or with the keys.

    One loop over all tiles that asks this keeps its reads in flight across cuts; a loop per piece would let them run
    dry at each.
    """
    return (cut_before(end) == end) | (end >= seq_len)


@triton.jit
def no_piece(TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr):
    """Return the state of query heads that have seen no key of a piece, as `attend_tile` takes it: (max, sums, acc)."""
    row_max, _, acc = no_keys(TILE_GROUP, TILE_DIM)
    return row_max, tl.zeros([TILE_GROUP, SUM_COLUMNS], tl.float32), acc


@triton.jit
def the_sum(row_sums):
    """Return one of the equal columns of a tile's row sums."""
    return tl.max(row_sums, axis=1)


@triton.jit
def fold(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """Merge the states of two disjoint sets of keys; either may be empty.

    Invariants:
        Callers fold pieces from left to right. Sums of floats depend on their order, and all programs of all rungs
        that attend to a split sequence must agree on one.
    """
    new_max = tl.maximum(max_a, max_b)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    fade_a = tl.exp2(max_a - pivot)
    fade_b = tl.exp2(max_b - pivot)
    new_sum = sum_a * fade_a + sum_b * fade_b
    return new_max, new_sum, acc_a * fade_a[:, None] + acc_b * fade_b[:, None]


@triton.jit
def no_keys(TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr):
    """Return the state of query heads that have seen no key: (max, sum, acc)."""
    row_max = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    return row_max, row_sum, acc


@triton.jit
def first_visible(seq_len, WINDOW: tl.constexpr):
    """Return the first token that the newest one sees."""
    first = 0
    if WINDOW is not None:
        first = tl.maximum(seq_len - WINDOW, 0)
    return first


@triton.jit
def is_visible(token, first, end, WINDOW: tl.constexpr):
    """Return which tokens stand before ``end`` and, with a window, not before ``first``."""
    visible = token < end
    if WINDOW is not None:
        visible &= token >= first
    return visible


@triton.jit
def group_at(
    seq, kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Return where the query heads of a KV head lie in ``[B, H, D]``, and which of the padded places exist."""
    row = tl.arange(0, TILE_GROUP)
    dim = tl.arange(0, TILE_DIM)
    head = (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row
    return head[:, None] * HEAD_DIM + dim[None, :], (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]


@triton.jit
def load_group(
    q_ptr, seq, kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Load the query heads of a KV head as rows, zeros where padded."""
    at, mask = group_at(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    return tl.load(q_ptr + at, mask=mask, other=0.0)


@triton.jit
def store_group(
    out_ptr, out, seq, kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Store the rows that exist; a padded row would land in the next KV head's."""
    at, mask = group_at(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)
