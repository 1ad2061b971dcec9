"""Rung 5's operation as Triton kernels.

Decode cuts a sequence into pieces of SPLIT tokens, sums each piece on its own and folds the sums from left to right.
A piece that many sequences share can thus be summed for all of them at once, as one tall matrix product, and each
sequence folds the result where it would have folded its own: the same bits for a fraction of the reading.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from minipaged.contiguous.kernels import (
    SPLIT,
    attend_tile,
    fold,
    load_group,
    no_keys,
    no_sums,
    store_group,
    the_sum,
)
from minipaged.foundation.kernels import find_sequence, normalized
from minipaged.launch import (
    LOG2_E,
    check_heads,
    check_indices,
    check_tensors,
    decode_tiles,
    padded,
    prefix_tiles,
    takes_one_program_per_split,
)
from minipaged.paged.kernels import attend_split, load_tokens
from minipaged.prefix.ops import SHARED_UNIT
from minipaged.shapes import Float, Int, Tensor

assert SPLIT.value == SHARED_UNIT


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
    num_splits = triton.cdiv(table_width * block_size, SPLIT.value)
    states = [
        torch.empty(num_splits, num_seqs, num_heads, *sizes_of_one, dtype=torch.float32, device=q.device)
        for sizes_of_one in ((), (), (head_dim,))  # max, sum, acc
    ]
    sizes = {
        "SLOTS": block_size, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim,
        "TILE_DIM": padded(head_dim, minimum=16), "enable_fp_fusion": False,
    }  # fmt: skip
    tiles = prefix_tiles(q, group)
    if num_splits > 1:  # a piece is shared only if a token of one's own follows
        grid = (num_seqs // (tiles.queries // group) + num_groups, num_kv_heads, num_splits - 1)
        prefix_splits_kernel[grid](
            q, k_pool, v_pool, *states, block_tables, group_starts, prefix_lens,
            num_groups, num_seqs, table_width, LOG2_E * scale,
            TILE_ROWS=tiles.queries, TILE_KEYS=tiles.keys, **sizes, **tiles.options,
        )  # fmt: skip
    tiles = decode_tiles(q, group)
    sizes |= {"TILE_GROUP": tiles.queries, "TILE_KEYS": tiles.keys}
    arguments = (
        *(q, k_pool, v_pool, *states, block_tables, seq_lens, group_starts, prefix_lens),
        *(num_groups, num_seqs, table_width, LOG2_E * scale),
    )
    is_split = takes_one_program_per_split(num_seqs * num_kv_heads, num_splits)
    if is_split:
        own_splits_kernel[(num_kv_heads, num_seqs, num_splits)](*arguments, **sizes, **tiles.options)
    own_rows_kernel[(num_kv_heads, num_seqs)](out, *arguments, IS_SPLIT=is_split, **sizes, **tiles.options)
    return out


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def prefix_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr, block_tables_ptr, group_starts_ptr, prefix_lens_ptr,
    num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (t, j, i) writes the states over the i-th piece of a prefix, of KV head j's queries in tile t.

    Row r of a tile is its sequence ``r // GROUP`` and query head ``r % GROUP``. Tiles are laid out as in
    `causal_attention_kernel`, groups taking the place of prompts. States lie as ``[splits, B, H]`` and
    ``[splits, B, H, D]``.

    Loop invariant: the state holds the piece's tokens before ``start``.
    """
    TILE_SEQS: tl.constexpr = TILE_ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    group = find_sequence(group_starts_ptr, num_groups, tile, TILE_SEQS)
    group_start = tl.load(group_starts_ptr + group)
    group_end = tl.load(group_starts_ptr + group + 1)
    first_seq = group_start + (tile - (group_start // TILE_SEQS + group)) * TILE_SEQS
    split = tl.program_id(2) * SPLIT
    if (split >= tl.load(prefix_lens_ptr + group)) | (first_seq >= group_end):
        return
    row = tl.arange(0, TILE_ROWS)
    seq = first_seq + row // GROUP
    exists = (row < TILE_SEQS * GROUP) & (seq < group_end)
    dim = tl.arange(0, TILE_DIM)
    head = (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row % GROUP
    mask = exists[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)

    table_ptr = block_tables_ptr + group_start.to(tl.int64) * table_width
    row_max, _, acc = no_keys(TILE_ROWS, TILE_DIM)
    row_sums = no_sums(TILE_ROWS)
    for start in range(split, split + SPLIT, TILE_KEYS):
        token = start + tl.arange(0, TILE_KEYS)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, table_ptr, kv_head, token, None, SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_DIM
        )
        row_max, row_sums, acc = attend_tile(q, k, v, None, scale, row_max, row_sums, acc)
    at = tl.program_id(2).to(tl.int64) * num_seqs * (NUM_KV_HEADS * GROUP) + head
    tl.store(max_ptr + at, row_max, mask=exists)
    tl.store(sum_ptr + at, the_sum(row_sums), mask=exists)
    tl.store(acc_ptr + at[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def own_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr,
    block_tables_ptr, seq_lens_ptr, group_starts_ptr, prefix_lens_ptr, num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b, i) writes the state of KV head j's group over sequence b's i-th piece, if it is b's own."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2) * SPLIT
    seq_len = tl.load(seq_lens_ptr + seq)
    if split >= seq_len:
        return
    if split < tl.load(prefix_lens_ptr + find_group(group_starts_ptr, num_groups, seq)):
        return
    q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = attend_split(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        split, 0, seq_len, scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    part = tl.program_id(2) * num_seqs + seq
    row = tl.arange(0, TILE_GROUP)
    at = (part * NUM_KV_HEADS + kv_head) * GROUP + row
    tl.store(max_ptr + at, row_max, mask=row < GROUP)
    tl.store(sum_ptr + at, row_sum, mask=row < GROUP)
    store_group(acc_ptr, acc, part, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit(do_not_specialize=["num_groups", "num_seqs", "table_width"])
def own_rows_kernel(
    out_ptr, q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr,
    block_tables_ptr, seq_lens_ptr, group_starts_ptr, prefix_lens_ptr, num_groups, num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (j, b) folds the states of sequence b's prefix, goes on with its own pieces, and stores its group.

    With IS_SPLIT the states of its own pieces are there too.

    Loop invariants: the state holds the first ``i`` pieces, and the pieces before ``split``.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + seq)
    if IS_SPLIT:
        num_written = tl.cdiv(seq_len, SPLIT)
    else:
        num_written = tl.load(prefix_lens_ptr + find_group(group_starts_ptr, num_groups, seq)) // SPLIT
    row = tl.arange(0, TILE_GROUP)
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    for i in range(num_written):
        part = i * num_seqs + seq
        at = (part * NUM_KV_HEADS + kv_head) * GROUP + row
        split_max = tl.load(max_ptr + at, mask=row < GROUP, other=float("-inf"))
        split_sum = tl.load(sum_ptr + at, mask=row < GROUP, other=0.0)
        split_acc = load_group(acc_ptr, part, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
        row_max, row_sum, acc = fold(row_max, row_sum, acc, split_max, split_sum, split_acc)
    if not IS_SPLIT:
        q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
        for split in range(num_written * SPLIT, seq_len, SPLIT):
            split_max, split_sum, split_acc = attend_split(
                q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
                split, 0, seq_len, scale,
                SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_GROUP, TILE_KEYS, TILE_DIM,
            )  # fmt: skip
            row_max, row_sum, acc = fold(row_max, row_sum, acc, split_max, split_sum, split_acc)
    store_group(
        out_ptr, normalized(row_sum, acc), seq, kv_head,
        NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM,
    )  # fmt: skip


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
