"""Rung 2's operations as Triton kernels. Next to rung 1's, attention has one more step: the look-up of the block.

Behind them stand the parts with which later rungs let several programs share a sequence: `write_states` writes down
what each of its pieces comes to, and `fold_states` folds that, to the bits that one program arrives at alone.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from minipaged.contiguous.kernels import (
    attend_tile,
    cut_before,
    first_visible,
    fold,
    is_cut,
    is_visible,
    load_group,
    no_keys,
    no_piece,
    piece_of,
    store_group,
    the_sum,
)
from minipaged.foundation.kernels import normalized
from minipaged.launch import LOG2_E, check_heads, check_indices, check_tensors, decode_tiles, padded
from minipaged.shapes import Float, Int, Tensor


def write_slots(
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    """Launch `write_slots_kernel`; see `ops.write_slots`."""
    check_tensors("write_slots", k, v, k_pool, v_pool)
    check_indices("write_slots", k, torch.int64, slot_mapping)
    assert k.shape[1:] == k_pool.shape[2:] and v.shape == k.shape and v_pool.shape == k_pool.shape
    width = k.shape[1] * k.shape[2]
    tile = min(2048, padded(width))
    if k.shape[0]:
        write_slots_kernel[(k.shape[0], triton.cdiv(width, tile))](
            k, v, k_pool, v_pool, slot_mapping, WIDTH=width, TILE=tile, num_warps=4, enable_fp_fusion=False
        )


@triton.jit
def write_slots_kernel(k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program (t, j) copies the j-th TILE entries of token t, all its heads side by side, into the token's slot."""
    token = tl.program_id(0)
    slot = tl.load(slots_ptr + token).to(tl.int64)  # slot x WIDTH passes 2^31 in a large pool
    if slot >= 0:
        columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
        source = token.to(tl.int64) * WIDTH + columns
        target = slot * WIDTH + columns
        k = tl.load(k_ptr + source, mask=columns < WIDTH, other=0.0)
        v = tl.load(v_ptr + source, mask=columns < WIDTH, other=0.0)
        tl.store(k_pool_ptr + target, k, mask=columns < WIDTH)
        tl.store(v_pool_ptr + target, v, mask=columns < WIDTH)


def paged_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H D"]:
    """Launch `paged_attention_kernel`; see `ops.paged_attention`."""
    check_tensors("paged_attention", q, k_pool, v_pool)
    check_indices("paged_attention", q, torch.int32, block_tables, seq_lens)
    check_heads("paged_attention", q, k_pool)
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    group = num_heads // num_kv_heads
    tiles = decode_tiles(q, group)
    out = torch.empty_like(q)
    if num_seqs:
        paged_attention_kernel[(num_kv_heads, num_seqs)](
            q, k_pool, v_pool, out, block_tables, seq_lens, block_tables.shape[1], LOG2_E * scale,
            SLOTS=block_size, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
            WINDOW=window, TILE_GROUP=tiles.queries,
            TILE_KEYS=tiles.keys, TILE_DIM=padded(head_dim, minimum=16),
            **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_width"])
def paged_attention_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b) computes the group of query heads that share KV head j, for sequence b.

    The loop, with its invariant, is that of `attend_pieces`. It reads this sequence's length, row of the table and
    blocks, and nothing of its neighbours'.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    first = first_visible(seq_len, WINDOW)
    q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = attend_pieces(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        first // TILE_KEYS * TILE_KEYS, first, seq_len, scale, row_max, row_sum, acc,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    out = normalized(row_sum, acc)
    store_group(out_ptr, out, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit
def attend_pieces(
    q, k_pool_ptr, v_pool_ptr, table_ptr, kv_head, begin, first, seq_len, scale, row_max, row_sum, acc,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Take all visible tokens from ``begin`` on into the state of the query heads of one KV head.

    The same walk as rung 1's kernel, with the same bits: cut at the same tokens, folded from left to right.

    Loop invariant: the two states together hold the visible tokens before ``start``; the second those of the piece
    that ``start`` lies in. ``block_id`` says where the tile at ``start`` lies.
    """
    piece_max, piece_sums, piece_acc = no_piece(TILE_GROUP, TILE_DIM)
    block_id = look_up(table_ptr, begin, first, seq_len, SLOTS, WINDOW, TILE_KEYS)
    for start in range(begin, seq_len, TILE_KEYS):
        visible = is_visible(tl.arange(0, TILE_KEYS), first - start, seq_len - start, WINDOW)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, block_id, kv_head, start, visible,
            SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        block_id = look_up(table_ptr, start + TILE_KEYS, first, seq_len, SLOTS, WINDOW, TILE_KEYS)
        piece_max, piece_sums, piece_acc = attend_tile(q, k, v, visible, scale, piece_max, piece_sums, piece_acc)
        if is_cut(start + TILE_KEYS, seq_len):
            row_max, row_sum, acc = fold(row_max, row_sum, acc, piece_max, the_sum(piece_sums), piece_acc)
            piece_max, piece_sums, piece_acc = no_piece(TILE_GROUP, TILE_DIM)
    return row_max, row_sum, acc


@triton.jit
def look_up(table_ptr, start, first, end, SLOTS: tl.constexpr, WINDOW: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Return the block of every visible token of the tile at ``start``; others are looked up nowhere.

    Every token looks up its own block, so any block size fits any tile. A loop does it one tile ahead: otherwise each
    tile would wait for its ids before it could ask for its keys, and only one tile at a time would be on its way.
    """
    token = start + tl.arange(0, TILE_KEYS)
    at = token.to(tl.uint32) // SLOTS  # without a sign, this is a shift
    return tl.load(table_ptr + at, mask=is_visible(token, first, end, WINDOW), other=0)


@triton.jit
def load_tokens(
    k_pool_ptr, v_pool_ptr, block_id, kv_head, start, visible,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of the tile at ``start``, a multiple of TILE_KEYS: [keys, D] each.

    ``visible`` may be None, which is all of them. Hidden tokens give zeros: a weight of 0 times NaN is NaN. Only the
    place of a block can pass 2^31, so only that is computed in 64 bits. Where blocks fill tiles evenly, all else is
    the same for every tile, and computed once.
    """
    dim = tl.arange(0, TILE_DIM)
    mask = (dim < HEAD_DIM)[None, :]
    if visible is not None:
        mask = visible[:, None] & mask
    key = tl.arange(0, TILE_KEYS)
    slot = key % SLOTS if TILE_KEYS % SLOTS == 0 else ((start + key).to(tl.uint32) % SLOTS).to(tl.int32)
    in_block = ((slot * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
    block = (block_id.to(tl.int64) * (SLOTS * NUM_KV_HEADS * HEAD_DIM))[:, None]
    k = tl.load(k_pool_ptr + in_block + block, mask=mask, other=0.0)
    v = tl.load(v_pool_ptr + in_block + block, mask=mask, other=0.0)
    return k, v


def empty_states(num_pieces: int, q: Float[Tensor, "T H D"], num_seqs: int) -> list[Tensor]:
    """Return room for (max, sum, acc) of every piece: ``[pieces, B, H]`` twice and ``[pieces, B, H, D]``."""
    return [
        torch.empty(num_pieces, num_seqs, q.shape[1], *sizes, dtype=torch.float32, device=q.device)
        for sizes in ((), (), q.shape[2:])
    ]


@triton.jit
def share_of(first, end):
    """Return where this program's share of the tokens from ``first`` to ``end`` begins and ends, both at cuts.

    The programs that differ in their last id alone take all tokens between them. Where two shares would begin at the
    same cut, nothing is left for the first of them.
    """
    share = tl.cdiv(end - first, tl.num_programs(2))
    begin = first + tl.program_id(2) * share
    next_begin = begin + share
    share_end = tl.where(next_begin < end, cut_before(next_begin), end)
    return cut_before(begin), tl.where(begin < end, share_end, 0)


@triton.jit
def write_states(
    q, head, exists, max_ptr, sum_ptr, acc_ptr, num_heads,
    k_pool_ptr, v_pool_ptr, table_ptr, kv_head, begin, end, first, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Write the states of some queries over each piece between ``begin`` and ``end``, of the tokens from ``first`` on.

    Both are cuts, but for the ``end`` of the keys. ``head`` says which of the ``num_heads`` heads of all sequences a
    row of ``q`` is, if it ``exists``. The piece that ``first`` lies in is number 0.

    Loop invariant: the states of the pieces before ``start`` are written, but for the piece that ``start`` lies in,
    whose visible tokens so far the state holds. ``block_id`` says where the tile at ``start`` lies.
    """
    dim = tl.arange(0, TILE_DIM)
    row_max, row_sums, acc = no_piece(TILE_ROWS, TILE_DIM)
    begin = tl.maximum(begin, first // TILE_KEYS * TILE_KEYS)
    block_id = look_up(table_ptr, begin, first, end, SLOTS, WINDOW, TILE_KEYS)
    for start in range(begin, end, TILE_KEYS):
        visible = is_visible(tl.arange(0, TILE_KEYS), first - start, end - start, WINDOW)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, block_id, kv_head, start, visible,
            SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        block_id = look_up(table_ptr, start + TILE_KEYS, first, end, SLOTS, WINDOW, TILE_KEYS)
        row_max, row_sums, acc = attend_tile(q, k, v, visible, scale, row_max, row_sums, acc)
        if is_cut(start + TILE_KEYS, end):
            at = (piece_of(start) - piece_of(first)) * tl.cast(num_heads, tl.int64) + head
            tl.store(max_ptr + at, row_max, mask=exists)
            tl.store(sum_ptr + at, the_sum(row_sums), mask=exists)
            mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
            tl.store(acc_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
            row_max, row_sums, acc = no_piece(TILE_ROWS, TILE_DIM)


@triton.jit
def fold_states(
    max_ptr, sum_ptr, acc_ptr, num_heads, count, head, exists,
    HEAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return the state of some query heads over the first ``count`` pieces, folded as in `attend_pieces`.

    ``num_heads``, ``head`` and ``exists`` are those of `write_states`.

    Loop invariant: the state holds the first ``base`` pieces. AT_ONCE states are read at a time: one after the other,
    each would take as long to arrive as a whole tile of keys. A piece past the last is folded too, as one without
    keys, which changes nothing.
    """
    dim = tl.arange(0, TILE_DIM)
    row_max, row_sum, acc = no_keys(TILE_ROWS, TILE_DIM)
    for base in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # pyright: ignore[reportGeneralTypeIssues]
            at = (base + i) * tl.cast(num_heads, tl.int64) + head
            mask = exists & (at < count * tl.cast(num_heads, tl.int64))
            piece_max = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
            piece_sum = tl.load(sum_ptr + at, mask=mask, other=0.0)
            mask = mask[:, None] & (dim < HEAD_DIM)[None, :]
            piece_acc = tl.load(acc_ptr + at[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
            row_max, row_sum, acc = fold(row_max, row_sum, acc, piece_max, piece_sum, piece_acc)
    return row_max, row_sum, acc
