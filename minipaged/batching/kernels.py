"""Rung 4's operations as Triton kernels.

A mixed batch takes two kernels, since they want different tiles: one for sequences with one query token, whose
arithmetic is that of decode, and one for the rest, whose arithmetic is that of whole prompts. Which sequence is which
stands on the GPU only, so both are launched for all of them, and programs without work end at once.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import math

import torch
import triton
import triton.language as tl

from minipaged.contiguous.kernels import SPLIT, first_visible, fold, load_group, no_keys, store_group
from minipaged.errors import UserError
from minipaged.foundation.kernels import absorb, find_sequence, normalized
from minipaged.launch import (
    LOG2_E,
    check_heads,
    check_indices,
    check_tensors,
    decode_tiles,
    heads_per_tile,
    padded,
    prefill_tiles,
    takes_one_program_per_split,
)
from minipaged.paged.kernels import attend_sequence, attend_split, load_tokens
from minipaged.shapes import Float, Int, Tensor


def ragged_paged_attention(
    q: Float[Tensor, "T H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    query_starts: Int[Tensor, " B+1"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "T H D"]:
    """Launch the kernels of prefill and of decode rows; see `ops.ragged_paged_attention`."""
    check_tensors("ragged_paged_attention", q, k_pool, v_pool)
    check_indices("ragged_paged_attention", q, torch.int32, block_tables, query_starts, seq_lens)
    check_heads("ragged_paged_attention", q, k_pool)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    num_seqs, table_width = block_tables.shape
    out = torch.empty_like(q)
    if num_tokens > 1:  # a single query is a decode row
        tiles = prefill_tiles(q)
        tile_heads = heads_per_tile(tiles, num_heads // num_kv_heads)
        # An upper bound, as in `causal_attention`.
        grid = (num_tokens // (tiles.queries // tile_heads) + num_seqs, num_heads // tile_heads)
        prefill_rows_kernel[grid](
            q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, num_seqs, table_width, LOG2_E * scale,
            SLOTS=block_size, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, WINDOW=window,
            TILE_QUERIES=tiles.queries, TILE_HEADS=tile_heads, TILE_KEYS=tiles.keys,
            TILE_DIM=padded(head_dim, minimum=16),
            **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
    if num_tokens:
        _decode_rows(q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, LOG2_E * scale, window)
    return out


def _decode_rows(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, block_tables: Tensor, query_starts: Tensor,
    seq_lens: Tensor, scale: float, window: int | None,
) -> None:  # fmt: skip
    """Launch one program per sequence and KV head; where those are few, one per piece, and one to fold its pieces."""
    num_heads, head_dim = q.shape[1:]
    num_seqs, table_width = block_tables.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    tiles = decode_tiles(q, num_heads // num_kv_heads)
    heads = {"NUM_KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "HEAD_DIM": head_dim, "WINDOW": window}
    sizes = {"TILE_GROUP": tiles.queries, "TILE_DIM": padded(head_dim, minimum=16)}
    num_splits = triton.cdiv(table_width * block_size, SPLIT.value)
    if window is not None:
        num_splits = min(num_splits, triton.cdiv(window - 1, SPLIT.value) + 1)
    if not takes_one_program_per_split(num_seqs * num_kv_heads, num_splits):
        decode_rows_kernel[(num_kv_heads, num_seqs)](
            q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, table_width, scale,
            SLOTS=block_size, TILE_KEYS=tiles.keys, **heads, **sizes, **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
        return
    states = [
        torch.empty(num_splits, num_seqs, num_heads, *sizes_of_one, dtype=torch.float32, device=q.device)
        for sizes_of_one in ((), (), (head_dim,))  # max, sum, acc
    ]
    decode_splits_kernel[(num_kv_heads, num_seqs, num_splits)](
        q, k_pool, v_pool, *states, block_tables, query_starts, seq_lens, table_width, num_seqs, scale,
        SLOTS=block_size, TILE_KEYS=tiles.keys, **heads, **sizes, **tiles.options, enable_fp_fusion=False,
    )  # fmt: skip
    fold_splits_kernel[(num_kv_heads, num_seqs)](
        *states, out, query_starts, seq_lens, num_seqs, **heads, **sizes, num_warps=4, enable_fp_fusion=False
    )


@triton.jit(do_not_specialize=["num_seqs", "table_width"])
def prefill_rows_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
    num_seqs, table_width, scale,
    SLOTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_KEYS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes tile i of the batch's query tokens for the j-th TILE_HEADS query heads.

    Tiles of queries are laid out as in `causal_attention_kernel`, counted from a sequence's first query. Tiles of keys
    start at multiples of TILE_KEYS in the sequence, wherever the queries begin: that, and that a tile of keys which a
    row does not see leaves its sums as they are, makes all ways to cut a prompt agree.

    Loop invariant: ``acc / row_sum`` is the attention of every row over the keys before ``start``. Keys that all rows
    see come first and need no mask; the tiles on the diagonal follow.
    """
    TILE_TOKENS: tl.constexpr = TILE_QUERIES // TILE_HEADS
    tile = tl.program_id(0)
    seq = find_sequence(query_starts_ptr, num_seqs, tile, TILE_TOKENS)
    query_start = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query_start
    first_query = (tile - (query_start // TILE_TOKENS + seq)) * TILE_TOKENS
    if (num_queries < 2) | (first_query >= num_queries):  # a decode row, or past the end
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first_token = seq_len - num_queries + first_query
    end = tl.minimum(first_token + TILE_TOKENS, seq_len)

    row = tl.arange(0, TILE_QUERIES)
    token = first_token + row // TILE_HEADS
    query = query_start + first_query + row // TILE_HEADS
    head = tl.program_id(1) * TILE_HEADS + row % TILE_HEADS
    kv_head = tl.program_id(1) * TILE_HEADS // (NUM_HEADS // NUM_KV_HEADS)
    dim = tl.arange(0, TILE_DIM)
    q_at = (query.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q_mask = ((row < TILE_TOKENS * TILE_HEADS) & (token < seq_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    table_ptr = block_tables_ptr + tl.cast(seq, tl.int64) * table_width
    row_max, row_sum, acc = no_keys(TILE_QUERIES, TILE_DIM)
    first_key = 0
    first_masked = 0
    if WINDOW is None:
        first_masked = (first_token + 1) // TILE_KEYS * TILE_KEYS
        for start in range(0, first_masked, TILE_KEYS):
            k, v = load_tokens(
                k_pool_ptr, v_pool_ptr, table_ptr, kv_head, start + tl.arange(0, TILE_KEYS), None,
                SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_DIM,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    else:
        first_key = tl.maximum(first_token - WINDOW + 1, 0)  # blocks before may have been given back
        first_masked = first_key // TILE_KEYS * TILE_KEYS
    for start in range(first_masked, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, table_ptr, kv_head, key, (key >= first_key) & (key < end),
            SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_DIM,
        )  # fmt: skip
        visible = key[None, :] <= token[:, None]
        if WINDOW is not None:
            visible &= key[None, :] > token[:, None] - WINDOW
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    tl.store(out_ptr + q_at, normalized(row_sum, acc).to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["table_width"])
def decode_rows_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b) does what it does in rung 2's kernel, if sequence b has one query."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    if tl.load(query_starts_ptr + seq + 1) - query != 1:
        return
    q = load_group(q_ptr, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    out = attend_sequence(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        tl.load(seq_lens_ptr + seq), scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    store_group(out_ptr, out, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def decode_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
    table_width, num_seqs, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b, i) writes the state of KV head j's group over the i-th piece that sequence b's query sees.

    States lie as ``[splits, B, H]`` and ``[splits, B, H, D]``.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    if tl.load(query_starts_ptr + seq + 1) - query != 1:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first = first_visible(seq_len, WINDOW)
    split = (first // SPLIT + tl.program_id(2)) * SPLIT
    if split >= seq_len:
        return
    q = load_group(q_ptr, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = attend_split(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        split, first, seq_len, scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    part = tl.program_id(2) * num_seqs + seq
    row = tl.arange(0, TILE_GROUP)
    at = (part * NUM_KV_HEADS + kv_head) * GROUP + row
    tl.store(max_ptr + at, row_max, mask=row < GROUP)
    tl.store(sum_ptr + at, row_sum, mask=row < GROUP)
    store_group(acc_ptr, acc, part, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit(do_not_specialize=["num_seqs"])
def fold_splits_kernel(
    max_ptr, sum_ptr, acc_ptr, out_ptr, query_starts_ptr, seq_lens_ptr, num_seqs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b) folds the states of sequence b's pieces from left to right, as `attend_sequence` does.

    Loop invariant: the state holds the first ``i`` pieces.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    if tl.load(query_starts_ptr + seq + 1) - query != 1:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    row = tl.arange(0, TILE_GROUP)
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    for i in range(tl.cdiv(seq_len, SPLIT) - first_visible(seq_len, WINDOW) // SPLIT):
        part = i * num_seqs + seq
        at = (part * NUM_KV_HEADS + kv_head) * GROUP + row
        split_max = tl.load(max_ptr + at, mask=row < GROUP, other=float("-inf"))
        split_sum = tl.load(sum_ptr + at, mask=row < GROUP, other=0.0)
        split_acc = load_group(acc_ptr, part, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
        row_max, row_sum, acc = fold(row_max, row_sum, acc, split_max, split_sum, split_acc)
    out = normalized(row_sum, acc)
    store_group(out_ptr, out, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


def merge_states(
    out_a: Float[Tensor, "T H D"],
    lse_a: Float[Tensor, "T H"],
    out_b: Float[Tensor, "T H D"],
    lse_b: Float[Tensor, "T H"],
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T H"]]:
    """Launch `merge_states_kernel`; see `ops.merge_states`."""
    check_tensors("merge_states", out_a, out_b)
    check_tensors("merge_states", lse_a, lse_b)
    assert lse_a.dtype == torch.float32 and lse_a.device == out_a.device, "merge_states: logarithms must be float32"
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if lse.numel():
        tile_dim = padded(out.shape[-1])
        tile_rows = max(1, 1024 // tile_dim)
        merge_states_kernel[(triton.cdiv(lse.numel(), tile_rows),)](
            out_a, lse_a, out_b, lse_b, out, lse, lse.numel(),
            HEAD_DIM=out.shape[-1], TILE_ROWS=tile_rows, TILE_DIM=tile_dim, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["num_rows"])
def merge_states_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_rows,
    HEAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program i merges rows ``i * TILE_ROWS`` and on; a row is one head of one token."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, TILE_DIM)
    at = row.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    lse_a = tl.load(lse_a_ptr + row, mask=row < num_rows, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + row, mask=row < num_rows, other=float("-inf"))
    top = tl.maximum(lse_a, lse_b)
    pivot = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    share_a, share_b = tl.exp(lse_a - pivot), tl.exp(lse_b - pivot)
    total = tl.where(top == float("-inf"), 1.0, share_a + share_b)
    # What stands beside -inf is not even read: it may be NaN, and 0 times NaN is NaN.
    has_a, has_b = (lse_a != float("-inf"))[:, None], (lse_b != float("-inf"))[:, None]
    out_a = tl.load(out_a_ptr + at, mask=has_a & (dim < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + at, mask=has_b & (dim < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    out = (out_a * share_a[:, None] + out_b * share_b[:, None]) / total[:, None]
    out_mask = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
    tl.store(lse_ptr + row, tl.where(top == float("-inf"), top, pivot + tl.log(total)), mask=row < num_rows)


def gather_blocks(pool: Float[Tensor, "*planes N S K D"], ids: Int[Tensor, " P"], staging: Tensor) -> None:
    """Launch `swap_blocks_kernel` from the pool to staging; see `ops.gather_blocks`."""
    _swap_blocks("gather_blocks", pool, ids, staging, to_pool=False)


def scatter_blocks(pool: Float[Tensor, "*planes N S K D"], ids: Int[Tensor, " P"], staging: Tensor) -> None:
    """Launch `swap_blocks_kernel` from staging to the pool; see `ops.scatter_blocks`."""
    _swap_blocks("scatter_blocks", pool, ids, staging, to_pool=True)


def _swap_blocks(op: str, pool: Tensor, ids: Tensor, staging: Tensor, to_pool: bool) -> None:
    """Launch once for K and V of all layers. A GPU reaches pinned memory of the CPU by its address."""
    check_tensors(op, pool)
    check_indices(op, pool, torch.int64, ids)
    is_within_reach = staging.device == pool.device or staging.is_pinned() or not staging.numel()
    if not is_within_reach:
        raise UserError(
            f"{op}: staging on the {staging.device.type} must be pinned memory, or the kernel cannot reach it"
        )
    assert staging.is_contiguous() and staging.dtype == pool.dtype, f"{op}: staging must be contiguous {pool.dtype}"
    width = pool.shape[-3] * pool.shape[-2] * pool.shape[-1]
    tile = min(4096, padded(width))
    if ids.shape[0]:
        swap_blocks_kernel[(ids.shape[0], math.prod(pool.shape[:-4]), triton.cdiv(width, tile))](
            pool, ids, staging, pool.shape[-4], ids.shape[0],
            TO_POOL=to_pool, WIDTH=width, TILE=tile, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks", "num_ids"])
def swap_blocks_kernel(
    pool_ptr, ids_ptr, staging_ptr, num_blocks, num_ids,
    TO_POOL: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, plane, j) copies the j-th TILE entries of block ``ids[i]``, in one plane.

    The pool is seen as ``[planes, N, WIDTH]`` and staging as ``[planes, P, WIDTH]``, as in `copy_blocks_kernel`.
    """
    i = tl.program_id(0)
    block_id = tl.load(ids_ptr + i).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    in_pool = pool_ptr + (plane * num_blocks + block_id) * WIDTH + columns
    in_staging = staging_ptr + (plane * num_ids + i) * WIDTH + columns
    if TO_POOL:
        tl.store(in_pool, tl.load(in_staging, mask=columns < WIDTH, other=0.0), mask=columns < WIDTH)
    else:
        tl.store(in_staging, tl.load(in_pool, mask=columns < WIDTH, other=0.0), mask=columns < WIDTH)
