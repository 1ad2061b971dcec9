"""Rung 5's operation as Triton kernels.

Decode cuts a sequence into pieces, sums each piece on its own and folds the sums from left to right. A piece that
many sequences share can thus be summed for all of them at once, as one tall matrix product, and each sequence folds
the result where it would have folded its own: the same bits for a fraction of the reading.

| kernel | one program | if |
|---|---|---|
| `prefix_splits_kernel` | writes states of some pieces of a prefix, for many sequences | a prefix fits the tables |
| `own_splits_kernel` | writes states of some of a sequence's own pieces | rows are few: see `programs_per_row` |
| `own_rows_kernel` | folds what is written, walks the pieces that are not, stores the result | always |
"""

# Options of a launch, such as num_warps, are no parameters of the kernel, and constants go in as plain values.
# pyright: reportCallIssue=false, reportArgumentType=false

import torch
import triton
import triton.language as tl

from minipaged.contiguous.kernels import COARSE_FROM, COARSE_PIECE, load_group, num_pieces, piece_of, store_group
from minipaged.foundation.kernels import find_sequence, normalized
from minipaged.launch import (
    LOG2_E,
    check_heads,
    check_indices,
    check_tensors,
    decode_tiles,
    padded,
    prefix_tiles,
    programs_per_row,
    split_tiles,
)
from minipaged.paged.kernels import attend_pieces, empty_states, fold_states, share_of, write_states
from minipaged.prefix.ops import SHARED_UNIT
from minipaged.shapes import Float, Int, Tensor

assert COARSE_FROM.value == SHARED_UNIT and SHARED_UNIT % COARSE_PIECE.value == 0, "a prefix ends at a cut"

STATES_AT_ONCE = tl.constexpr(4)
"""So many states of pieces are on their way at a time when they are folded, each of all heads of a group."""

MANY_PROGRAMS = 16 * 132
"""So many programs keep a large GPU busy to the end with prefixes. More would only begin and find nothing to do."""


def shared_prefix_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    group_starts: Int[Tensor, " groups+1"],
    prefix_lens: Int[Tensor, " groups"],
    *,
    scale: float,
) -> Float[Tensor, "B H D"]:
    """Sum the pieces of the prefixes, then fold and go on; see `ops.shared_prefix_attention`.

    Nothing is read back from the GPU. How many pieces and how many tiles there are is an upper bound: a prefix is
    shorter than its table, and cutting B sequences of some groups into tiles leaves one part-filled tile per group.
    """
    check_tensors("shared_prefix_attention", q, k_pool, v_pool)
    check_indices("shared_prefix_attention", q, torch.int32, block_tables, seq_lens, group_starts, prefix_lens)
    check_heads("shared_prefix_attention", q, k_pool)
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    num_groups, table_width = prefix_lens.shape[0], block_tables.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(q)
    if not num_seqs:
        return out
    num_states = num_pieces(table_width * block_size)
    states = empty_states(num_states, q, num_seqs)
    sizes = {
        "SLOTS": block_size, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim,
        "TILE_DIM": padded(head_dim, minimum=16), "enable_fp_fusion": False,
    }  # fmt: skip
    tiles = prefix_tiles(q, group)
    if table_width * block_size > SHARED_UNIT:  # tokens are shared only if one of one's own follows
        num_tiles = num_seqs // (tiles.queries // group) + num_groups
        grid = (num_tiles, num_kv_heads, min(num_states - 1, triton.cdiv(MANY_PROGRAMS, num_tiles * num_kv_heads)))
        prefix_splits_kernel[grid](
            q, k_pool, v_pool, *states, block_tables, group_starts, prefix_lens,
            num_groups, num_seqs, table_width, LOG2_E * scale,
            TILE_ROWS=tiles.queries, TILE_KEYS=tiles.keys, **sizes, **tiles.options,
        )  # fmt: skip
    tiles = decode_tiles(q, group)  # and as many keys and rows in `split_tiles`
    sizes |= {"TILE_GROUP": tiles.queries, "TILE_KEYS": tiles.keys}
    arguments = (
        *(q, k_pool, v_pool, *states, block_tables, seq_lens, group_starts, prefix_lens),
        *(num_groups, num_seqs, table_width, LOG2_E * scale),
    )
    num_programs = programs_per_row(num_seqs * num_kv_heads, num_states)
    if num_programs > 1:
        own_splits_kernel[(num_kv_heads, num_seqs, num_programs)](*arguments, **sizes, **split_tiles(q, group).options)
    own_rows_kernel[(num_kv_heads, num_seqs)](out, *arguments, IS_SPLIT=num_programs > 1, **sizes, **tiles.options)
    return out


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def prefix_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr, block_tables_ptr, group_starts_ptr, prefix_lens_ptr,
    num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (t, j, i) writes the states over the i-th share of a prefix, of KV head j's queries in tile t.

    Row r of a tile is its sequence ``r // GROUP`` and query head ``r % GROUP``. Tiles are laid out as in
    `causal_attention_kernel`, groups taking the place of prompts. The programs of a tile take equally many
    tokens, as in `decode_splits_kernel`.

    A row's states do not depend on the other rows of its tile: each row of a matrix product is summed on its own, in
    the same order in a tile of any height.
    """
    TILE_SEQS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    group = find_sequence(group_starts_ptr, num_groups, tile, TILE_SEQS)
    group_start = tl.load(group_starts_ptr + group)
    group_end = tl.load(group_starts_ptr + group + 1)
    prefix_len = tl.load(prefix_lens_ptr + group)
    first_seq = group_start + (tile - (group_start // TILE_SEQS + group)) * TILE_SEQS
    begin, end = share_of(0, prefix_len)
    if (begin >= end) | (first_seq >= group_end):
        return
    row = tl.arange(0, TILE_ROWS)
    seq = first_seq + row // GROUP
    exists = (row < TILE_SEQS * GROUP) & (seq < group_end)
    dim = tl.arange(0, TILE_DIM)
    head = (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row % GROUP
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    write_states(
        tl.load(q_ptr + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0), head, exists,
        max_ptr, sum_ptr, acc_ptr, num_seqs * (NUM_KV_HEADS * GROUP),
        k_pool_ptr, v_pool_ptr, block_tables_ptr + group_start.to(tl.int64) * table_width, kv_head,
        begin, end, 0, scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, None, TILE_ROWS, TILE_KEYS, TILE_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def own_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr,
    block_tables_ptr, seq_lens_ptr, group_starts_ptr, prefix_lens_ptr, num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b, i) writes the states of KV head j's group over the i-th share of sequence b's own pieces."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    prefix_len = tl.load(prefix_lens_ptr + find_group(group_starts_ptr, num_groups, seq))
    begin, end = share_of(prefix_len, seq_len)
    if begin >= end:
        return
    row = tl.arange(0, TILE_GROUP)
    write_states(
        load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM),
        (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row, row < GROUP,
        max_ptr, sum_ptr, acc_ptr, num_seqs * (NUM_KV_HEADS * GROUP),
        k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        begin, end, 0, scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, None, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def own_rows_kernel(
    out_ptr, q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr,
    block_tables_ptr, seq_lens_ptr, group_starts_ptr, prefix_lens_ptr, num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (j, b) folds the states of sequence b's prefix, goes on with its own pieces, and stores its group.

    With IS_SPLIT the states of its own pieces are there too, and all are folded. The loops are those of `fold_states`
    and `attend_pieces`: together they fold all pieces from left to right, as plain decode does.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    written = seq_len
    if not IS_SPLIT:
        written = tl.load(prefix_lens_ptr + find_group(group_starts_ptr, num_groups, seq))
    row = tl.arange(0, TILE_GROUP)
    row_max, row_sum, acc = fold_states(
        max_ptr, sum_ptr, acc_ptr, num_seqs * (NUM_KV_HEADS * GROUP),
        tl.where(written > 0, piece_of(written - 1) + 1, 0),
        (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row, row < GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM,
        STATES_AT_ONCE,
    )  # fmt: skip
    if not IS_SPLIT:
        q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
        row_max, row_sum, acc = attend_pieces(
            q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
            written, 0, seq_len, scale, row_max, row_sum, acc,
            SLOTS, NUM_KV_HEADS, HEAD_DIM, None, TILE_GROUP, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
    out = normalized(row_sum, acc)
    store_group(out_ptr, out, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit
def find_group(group_starts_ptr, num_groups, seq):
    """Return the group of a sequence: the last one that begins at or before it. ``[low, high)`` contains it."""
    low = 0
    high = num_groups
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(group_starts_ptr + middle) <= seq:
            low = middle
        else:
            high = middle
    return low
