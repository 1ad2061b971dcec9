"""Rung 4's operations as Triton kernels.

A mixed batch takes two ways, since they want different tiles: one for sequences with one query token, whose
arithmetic is that of decode, and one for the rest, whose arithmetic is that of whole prompts. Which sequence is which
stands on the GPU only, so both are launched for all of them, and programs without work end at once.

| sequences | kernel | one program computes |
|---|---|---|
| two or more queries | `prefill.kernels.prefill_rows_kernel` | a tile of query tokens |
| one query, many rows | `decode_rows_kernel` | the query heads of a KV head |
| one query, few rows | `decode_splits_kernel` | the same over some pieces of the sequence: a split |
| | then `fold_splits_kernel` | a query head, from the states of all pieces |

What is few and what is many says the table of `programs_per_row`. It looks at the whole batch, and may: the pieces and
the order in which they are folded are the same in both ways.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel, and constants go in as plain values.
# pyright: reportCallIssue=false, reportArgumentType=false

import math

import torch
import triton
import triton.language as tl

from minipaged.batching.prefill.kernels import prefill_rows_kernel
from minipaged.contiguous.kernels import first_visible, load_group, max_pieces, no_keys, piece_of, store_group
from minipaged.errors import UserError
from minipaged.foundation.kernels import normalized, wait_for_inputs
from minipaged.launch import (
    LOG2_E,
    check_heads,
    check_indices,
    check_tensors,
    decode_tiles,
    early_start,
    heads_per_tile,
    padded,
    prefill_tiles,
    programs_per_row,
    split_tiles,
)
from minipaged.paged.kernels import attend_pieces, empty_states, fold_states, share_of, write_states
from minipaged.shapes import Float, Int, Tensor

STATES_AT_ONCE = tl.constexpr(8)
"""So many states of pieces are on their way at a time when they are folded, each of one query head."""


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
    max_query_len: int | None = None,
) -> Float[Tensor, "T H D"]:
    """Launch the kernels of prefill and of decode rows; see `ops.ragged_paged_attention`."""
    check_tensors("ragged_paged_attention", q, k_pool, v_pool)
    check_indices("ragged_paged_attention", q, torch.int32, block_tables, query_starts, seq_lens)
    check_heads("ragged_paged_attention", q, k_pool)
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    num_seqs, table_width = block_tables.shape
    out = torch.empty_like(q)
    if not num_tokens or not num_seqs:  # without sequences, all tokens are padding
        return out
    if num_tokens > 1 and max_query_len != 1:  # a single query is a decode row
        tiles = prefill_tiles(q)
        tile_heads = heads_per_tile(tiles, num_heads // num_kv_heads)
        tile_tokens = tiles.queries // tile_heads
        # Programs without a tile cost time too. The prompts of a batch that is mostly decode rows have few tiles: a
        # guess will do, if a program goes on with the next one where it was too low. Otherwise, an upper bound.
        is_mostly_decode = num_tokens <= 2 * num_seqs
        num_tiles = num_tokens // tile_tokens + min(num_seqs, 8 if is_mostly_decode else num_tokens // 2)
        prefill_rows_kernel[(num_tiles * (num_heads // tile_heads),)](
            q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, num_seqs, table_width, LOG2_E * scale,
            SLOTS=block_size, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, WINDOW=window,
            TILE_QUERIES=tiles.queries, TILE_HEADS=tile_heads, TILE_KEYS=tiles.keys,
            TILE_DIM=padded(head_dim, minimum=16), IS_LOOP=is_mostly_decode,
            **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
    _decode_rows(q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, LOG2_E * scale, window)
    return out


def _decode_rows(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, out: Tensor, block_tables: Tensor, query_starts: Tensor,
    seq_lens: Tensor, scale: float, window: int | None,
) -> None:  # fmt: skip
    """Launch one program per sequence and KV head; where those are few, several, and one per head to fold."""
    num_heads, head_dim = q.shape[1:]
    num_seqs, table_width = block_tables.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    group = num_heads // num_kv_heads
    num_states = max_pieces(table_width * block_size, window)
    num_programs = programs_per_row(num_seqs * num_kv_heads, num_states)
    tiles = decode_tiles(q, group) if num_programs == 1 else split_tiles(q, group)
    options = {
        "SLOTS": block_size, "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "HEAD_DIM": head_dim, "WINDOW": window,
        "TILE_GROUP": tiles.queries, "TILE_KEYS": tiles.keys, "TILE_DIM": padded(head_dim, minimum=16),
        **tiles.options, "enable_fp_fusion": False,
    }  # fmt: skip
    if num_programs == 1:
        # It does not start early: its programs would take the places that are left, and crowd on some processors.
        decode_rows_kernel[(num_kv_heads, num_seqs)](
            q, k_pool, v_pool, out, block_tables, query_starts, seq_lens, table_width, scale, **options
        )
        return
    states = empty_states(num_states, q, num_seqs)
    decode_splits_kernel[(num_kv_heads, num_seqs, num_programs)](
        q, k_pool, v_pool, *states, block_tables, query_starts, seq_lens, table_width, num_seqs, scale,
        **options, **early_start(q.device),
    )  # fmt: skip
    fold_splits_kernel[(num_heads, num_seqs)](
        *states, out, query_starts, seq_lens, num_seqs,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, WINDOW=window, TILE_DIM=padded(head_dim, minimum=16),
        num_warps=1, **early_start(q.device), enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_width"])
def decode_rows_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Program (j, b) computes the group of query heads that share KV head j, if sequence b has one query.

    It is rung 2's program: `attend_pieces`, whose loop reads nothing but this sequence's length and blocks.
    """
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query
    seq_len = tl.load(seq_lens_ptr + seq)
    if num_queries != 1:
        return
    first = first_visible(seq_len, WINDOW)
    q = load_group(q_ptr, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    row_max, row_sum, acc = attend_pieces(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        first // TILE_KEYS * TILE_KEYS, first, seq_len, scale, row_max, row_sum, acc,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    out = normalized(row_sum, acc)
    store_group(out_ptr, out, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit(do_not_specialize=["table_width", "num_seqs"])
def decode_splits_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, max_ptr, sum_ptr, acc_ptr, block_tables_ptr, query_starts_ptr, seq_lens_ptr,
    table_width, num_seqs, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program (j, b, i) writes the states of KV head j's group over the i-th share of the pieces that b's query sees.

    The programs of a row take equally many tokens, but for the cuts: each begins at the last cut before its share.
    The state of a piece is the same whoever writes it, so how many programs there are changes no bit.
    """
    wait_for_inputs(STARTS_EARLY)
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query
    seq_len = tl.load(seq_lens_ptr + seq)
    first = first_visible(seq_len, WINDOW)
    begin, end = share_of(first, seq_len)
    if (num_queries != 1) | (begin >= end):
        return
    row = tl.arange(0, TILE_GROUP)
    write_states(
        load_group(q_ptr, query, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM),
        (seq.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row, row < GROUP,
        max_ptr, sum_ptr, acc_ptr, num_seqs * (NUM_KV_HEADS * GROUP),
        k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        begin, end, first, scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"])
def fold_splits_kernel(
    max_ptr, sum_ptr, acc_ptr, out_ptr, query_starts_ptr, seq_lens_ptr, num_seqs,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_DIM: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program (h, b) folds the states of query head h over sequence b's pieces, and stores the head.

    From left to right, as one program alone would have done (`fold_states`): the same numbers in the same order.
    """
    wait_for_inputs(STARTS_EARLY)
    head = tl.program_id(0)
    seq = tl.program_id(1)
    query = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - query
    seq_len = tl.load(seq_lens_ptr + seq)
    if num_queries != 1:
        return
    count = piece_of(seq_len - 1) + 1 - piece_of(first_visible(seq_len, WINDOW))
    row = tl.arange(0, 1)
    _, row_sum, acc = fold_states(
        max_ptr, sum_ptr, acc_ptr, num_seqs * NUM_HEADS, tl.where(seq_len > 0, count, 0),
        seq.to(tl.int64) * NUM_HEADS + head + row, row < 1, HEAD_DIM, 1, TILE_DIM, STATES_AT_ONCE,
    )  # fmt: skip
    store_group(out_ptr, normalized(row_sum, acc), query, head, NUM_HEADS, 1, HEAD_DIM, 1, TILE_DIM)


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
