"""Plausible wrong answers to the exercises of lesson 02b, and a piece of what each check says."""

from typing import Any

import torch
import triton
import triton.language as tl

from minipaged.lessons.exercises import paged_kernel as checks
from minipaged.lessons.exercises.paged_kernel import State
from minipaged.paged import reference
from minipaged.shapes import Tensor


def add_block_without_fading(state: State, scores: Tensor, values: Tensor) -> State:
    top, total, acc = state
    new_top = torch.maximum(top, scores.max(-1).values)
    weights = torch.exp(scores - new_top[:, None])
    return new_top, total + weights.sum(-1), acc + weights @ values


def add_block_that_fades_one_sum(state: State, scores: Tensor, values: Tensor) -> State:
    top, total, acc = state
    new_top = torch.maximum(top, scores.max(-1).values)
    fade = torch.exp(top - new_top)
    weights = torch.exp(scores - new_top[:, None])
    return new_top, total + weights.sum(-1), acc * fade[:, None] + weights @ values


def add_block_that_copies_a_column(state: State, scores: Tensor, values: Tensor) -> State:
    top, total, acc = state
    new_top = torch.maximum(top, scores.max(-1).values)
    fade = torch.exp(top - new_top)
    weights = torch.exp(scores - new_top[:, None])
    return new_top, total * fade + weights.sum(-1), acc * fade[:, None] + weights @ values[:, :1]


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    return torch.softmax(keys @ q * scale, 0) @ values


def walk_with_heads_taken_in_turn(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    out = torch.empty_like(q)
    num_kv_heads, block_size = k_pool.shape[2], k_pool.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        ids = tables[b, : -(-length // block_size)].long()
        for head in range(q.shape[1]):
            rows = [pool[ids, :, head % num_kv_heads].flatten(0, 1)[:length] for pool in (k_pool, v_pool)]
            out[b, head] = attend(q[b, head], rows[0], rows[1], scale)
    return out


def walk_over_whole_blocks(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    out = torch.empty_like(q)
    num_kv_heads, block_size = k_pool.shape[2], k_pool.shape[1]
    for b, length in enumerate(seq_lens.tolist()):
        ids = tables[b, : -(-length // block_size)].long()
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // num_kv_heads)
            rows = [pool[ids, :, kv_head].flatten(0, 1) for pool in (k_pool, v_pool)]
            out[b, head] = attend(q[b, head], rows[0], rows[1], scale)
    return out


def walk_that_returns_float32(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    return reference.paged_attention(q, k_pool, v_pool, tables, seq_lens, scale=scale, window=window).float()


def walk_with_another_scale(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, tables: Tensor, seq_lens: Tensor, *, scale: float, window: int | None
) -> Tensor:
    return reference.paged_attention(q, k_pool, v_pool, tables, seq_lens, scale=q.shape[-1] ** -0.5, window=window)


@triton.jit
def gather_without_a_table(
    pool_ptr, table_ptr, out_ptr, seq_len,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    token = tl.program_id(1) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    target = (token * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    first = tl.load(table_ptr)
    source = target + first * SLOTS * NUM_KV_HEADS * HEAD_DIM
    is_there = (token < seq_len)[:, None]
    tl.store(out_ptr + target, tl.load(pool_ptr + source, mask=is_there, other=0.0), mask=is_there)


@triton.jit
def gather_without_a_mask_on_the_store(
    pool_ptr, table_ptr, out_ptr, seq_len,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    token = tl.program_id(1) * TILE_KEYS + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, HEAD_DIM)
    is_there = token < seq_len
    slot = tl.load(table_ptr + token // SLOTS, mask=is_there, other=0) * SLOTS + token % SLOTS
    source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
    keys = tl.load(pool_ptr + source, mask=is_there[:, None], other=0.0)
    tl.store(out_ptr + (token * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :], keys)


@triton.jit
def rows_of(seq, kv_head, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    head = (seq * NUM_KV_HEADS + kv_head) * GROUP + row
    return head[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], (row < GROUP)[:, None]


@triton.jit
def kernel_without_masks(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, tables_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    at, exists = rows_of(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP)
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    seq_len, table_ptr = tl.load(seq_lens_ptr + seq), tables_ptr + seq * table_width
    total = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, HEAD_DIM], tl.float32)
    for start in range(0, seq_len, TILE_KEYS):
        token = start + tl.arange(0, TILE_KEYS)
        slot = tl.load(table_ptr + token // SLOTS) * SLOTS + token % SLOTS
        source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        scores = tl.dot(q, tl.trans(tl.load(k_pool_ptr + source)), input_precision="ieee") * scale
        weights = tl.where((token < seq_len)[None, :], tl.exp(scores), 0.0)
        total += tl.sum(weights, axis=1)
        acc += tl.dot(weights, tl.load(v_pool_ptr + source), input_precision="ieee")
    tl.store(out_ptr + at, acc / total[:, None], mask=exists)


@triton.jit
def kernel_that_keeps_the_last_tile(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, tables_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    at, exists = rows_of(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP)
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    seq_len, table_ptr = tl.load(seq_lens_ptr + seq), tables_ptr + seq * table_width
    for start in range(0, seq_len, TILE_KEYS):
        token = start + tl.arange(0, TILE_KEYS)
        is_there = token < seq_len
        slot = tl.load(table_ptr + token // SLOTS, mask=is_there, other=0) * SLOTS + token % SLOTS
        source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_pool_ptr + source, mask=is_there[:, None], other=0.0)
        v = tl.load(v_pool_ptr + source, mask=is_there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        weights = tl.where(is_there[None, :], tl.exp(scores), 0.0)
        out = tl.dot(weights, v, input_precision="ieee") / tl.sum(weights, axis=1)[:, None]
        tl.store(out_ptr + at, out, mask=exists)


@triton.jit
def kernel_with_another_scale(
    q_ptr, k_pool_ptr, v_pool_ptr, out_ptr, tables_ptr, seq_lens_ptr, table_width, scale,
    SLOTS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_GROUP: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    at, exists = rows_of(seq, kv_head, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_GROUP)
    q = tl.load(q_ptr + at, mask=exists, other=0.0)
    seq_len, table_ptr = tl.load(seq_lens_ptr + seq), tables_ptr + seq * table_width
    total = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, HEAD_DIM], tl.float32)
    for start in range(0, seq_len, TILE_KEYS):
        token = start + tl.arange(0, TILE_KEYS)
        is_there = token < seq_len
        slot = tl.load(table_ptr + token // SLOTS, mask=is_there, other=0) * SLOTS + token % SLOTS
        source = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        k = tl.load(k_pool_ptr + source, mask=is_there[:, None], other=0.0)
        v = tl.load(v_pool_ptr + source, mask=is_there[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * HEAD_DIM**-0.5
        weights = tl.where(is_there[None, :], tl.exp(scores), 0.0)
        total += tl.sum(weights, axis=1)
        acc += tl.dot(weights, v, input_precision="ieee")
    tl.store(out_ptr + at, acc / total[:, None], mask=exists)


WRONG: list[tuple[Any, Any, str]] = [
    (checks.check_add_block, add_block_without_fading, "total after 4 keys"),
    (checks.check_add_block, add_block_that_fades_one_sum, "Both sums so far were counted"),
    (checks.check_add_block, add_block_that_copies_a_column, "acc after 2 keys"),
    (checks.check_walk_blocks, walk_with_heads_taken_in_turn, "is wrong in query head 1, which reads KV head"),
    (checks.check_walk_blocks, walk_over_whole_blocks, "The last block may be part empty"),
    (checks.check_walk_blocks, walk_that_returns_float32, "bfloat16\nReturn a tensor"),
    (checks.check_walk_blocks, walk_with_another_scale, "scale = 0.3"),
    (checks.check_gather_kernel, gather_without_a_table, "Token 4 lies in slot 8"),
    (checks.check_gather_kernel, gather_without_a_mask_on_the_store, "mask the store, too"),
    (checks.check_paged_kernel, kernel_without_masks, "holds NaN"),
    (checks.check_paged_kernel, kernel_that_keeps_the_last_tile, "Sequence 2 (17 tokens) is wrong"),
    (checks.check_paged_kernel, kernel_with_another_scale, "scale = 0.3"),
]
