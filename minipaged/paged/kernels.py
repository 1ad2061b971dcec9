"""Rung 2's operations as Triton kernels. Next to rung 1's, attention has one more step: the look-up of the block."""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from minipaged.contiguous.kernels import (
    SPLIT,
    attend_tile,
    first_visible,
    fold,
    load_group,
    no_keys,
    no_sums,
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
    """Program (j, b) computes the group of query heads that share KV head j, for sequence b."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    q = load_group(q_ptr, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)
    out = attend_sequence(
        q, k_pool_ptr, v_pool_ptr, block_tables_ptr + seq.to(tl.int64) * table_width, kv_head,
        tl.load(seq_lens_ptr + seq), scale,
        SLOTS, NUM_KV_HEADS, HEAD_DIM, WINDOW, TILE_GROUP, TILE_KEYS, TILE_DIM,
    )  # fmt: skip
    store_group(out_ptr, out, seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP, TILE_DIM)


@triton.jit
def attend_sequence(
    q, k_pool_ptr, v_pool_ptr, table_ptr, kv_head, seq_len, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Return the attention of a sequence's newest token, for the group of query heads of one KV head.

    The same walk as rung 1's kernel, with the same bits: cut at multiples of SPLIT, folded from left to right.

    Loop invariant: the state holds the pieces before ``split``.
    """
    first = first_visible(seq_len, WINDOW)
    row_max, row_sum, acc = no_keys(TILE_GROUP, TILE_DIM)
    for split in range(first // SPLIT * SPLIT, seq_len, SPLIT):
        split_max, split_sum, split_acc = attend_split(
            q, k_pool_ptr, v_pool_ptr, table_ptr, kv_head, split, first, seq_len, scale,
            SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_GROUP, TILE_KEYS, TILE_DIM,
        )  # fmt: skip
        row_max, row_sum, acc = fold(row_max, row_sum, acc, split_max, split_sum, split_acc)
    return normalized(row_sum, acc)


@triton.jit
def attend_split(
    q, k_pool_ptr, v_pool_ptr, table_ptr, kv_head, split, first, seq_len, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Return the state (max, sum, acc) of a group of query heads over the visible tokens of one piece.

    Loop invariant: the state holds the piece's visible tokens before ``start``, which is a multiple of TILE_KEYS.
    """
    row_max, _, acc = no_keys(TILE_GROUP, TILE_DIM)
    row_sums = no_sums(TILE_GROUP)
    begin = tl.maximum(split, first // TILE_KEYS * TILE_KEYS)
    for start in range(begin, tl.minimum(split + SPLIT, seq_len), TILE_KEYS):
        token = start + tl.arange(0, TILE_KEYS)
        visible = (token >= first) & (token < seq_len)
        k, v = load_tokens(
            k_pool_ptr, v_pool_ptr, table_ptr, kv_head, token, visible, SLOTS, NUM_KV_HEADS, HEAD_DIM, TILE_DIM
        )
        row_max, row_sums, acc = attend_tile(q, k, v, visible, scale, row_max, row_sums, acc)
    return row_max, the_sum(row_sums), acc


@triton.jit
def load_tokens(
    k_pool_ptr, v_pool_ptr, table_ptr, kv_head, token, visible,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Load the keys and values of a tile of tokens, [keys, D] each; ``visible`` may be None, which is all of them.

    Every token looks up its own block, so any block size fits any tile. Hidden tokens are looked up nowhere and give
    zeros: a weight of 0 times NaN is NaN.
    """
    dim = tl.arange(0, TILE_DIM)
    mask = (dim < HEAD_DIM)[None, :]
    if visible is None:
        block_id = tl.load(table_ptr + token // SLOTS).to(tl.int64)
    else:
        block_id = tl.load(table_ptr + token // SLOTS, mask=visible, other=0).to(tl.int64)
        mask = visible[:, None] & mask
    slot = block_id * SLOTS + token % SLOTS
    at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    return tl.load(k_pool_ptr + at, mask=mask, other=0.0), tl.load(v_pool_ptr + at, mask=mask, other=0.0)
