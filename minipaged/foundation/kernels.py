"""The decoder's own operations as Triton kernels, each with the function that launches it.

A kernel is written for one *program*: a small tile of the result. The launch starts as many programs as there are
tiles, and they run in any order. Names in capitals are known when the kernel is compiled; each set of values is
compiled once. Numbers that change from step to step are not among them.

`absorb` is the step that every attention kernel of the ladder repeats.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel; and pyright takes what tl.sum returns for a
# tuple.
# pyright: reportCallIssue=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minipaged.launch import (
    LOG2_E,
    check_heads,
    check_indices,
    check_tensors,
    early_start,
    heads_per_tile,
    padded,
    prefill_tiles,
)
from minipaged.shapes import Float, Int, Tensor

SEQS_AT_ONCE = tl.constexpr(256)
"""So many sequences a program of prefill looks through in one step, to find its own."""


@triton.jit
def wait_for_inputs(STARTS_EARLY: tl.constexpr):
    """Let the next launch begin, and wait until the one before this has ended and its results can be read.

    Every program calls it, and writes nothing before: memory that is written here may still be read there.
    """
    if STARTS_EARLY:
        gdc_launch_dependents()
        gdc_wait()


def rms_norm(
    x: Float[Tensor, "T E"],
    weight: Float[Tensor, " E"],
    eps: float,
    *,
    residual: Float[Tensor, "T E"] | None = None,
) -> Float[Tensor, "T E"] | tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    """Launch `rms_norm_kernel`; see `ops.rms_norm`. Norms of single heads come as rows of D."""
    check_tensors("rms_norm", x, weight, *(() if residual is None else (residual,)))
    num_rows, width = x.shape
    out = torch.empty_like(x)
    new_residual = None if residual is None else torch.empty_like(x)
    tile_width = padded(width)
    tile_rows = max(1, 1024 // tile_width)  # short rows share a program, or there would be too little work in each
    if num_rows:
        rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
            x, residual, weight, out, new_residual, num_rows, eps,
            WIDTH=width, TILE_ROWS=tile_rows, TILE_WIDTH=tile_width,
            num_warps=4 if tile_width <= 4096 else 16, **early_start(x.device), enable_fp_fusion=False,
        )  # fmt: skip
    return out if new_residual is None else (out, new_residual)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr, num_rows, eps,
    WIDTH: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_WIDTH: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program i norms rows ``i * TILE_ROWS`` and on, each read once and kept whole in registers.

    Without a residual both residual pointers are None and the branch is compiled away.
    """
    wait_for_inputs(STARTS_EARLY)
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    rows = tl.minimum(rows, num_rows - 1)  # places past the end do the last row again, and write the same numbers
    columns = tl.arange(0, TILE_WIDTH)
    is_column = columns < WIDTH
    at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + at, mask=is_column[None, :], other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + at, mask=is_column[None, :], other=0.0).to(tl.float32)
        # The norm is taken of the sum as it is stored, or the next layer would see another number than this one.
        rounded = (x + residual).to(new_residual_ptr.dtype.element_ty)
        tl.store(new_residual_ptr + at, rounded, mask=is_column[None, :])
        x = rounded.to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / WIDTH
    normed = (x * tl.rsqrt(mean_square + eps)[:, None]).to(out_ptr.dtype.element_ty)  # rounded before the weight
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    out = normed.to(tl.float32) * weight[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_column[None, :])


def rotary(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    cos: Float[Tensor, "T D_half"],
    sin: Float[Tensor, "T D_half"],
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"]]:
    """Launch `rotary_kernel`; see `ops.rotary`. The angles may be fp32 beside half-precision heads."""
    check_tensors("rotary", q, k)
    check_tensors("rotary", cos, sin)
    num_tokens, num_heads, head_dim = q.shape
    assert head_dim % 2 == 0 and cos.device == q.device, "rotary: entries are turned in pairs, on one device"
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    if num_tokens:
        rotary_kernel[(num_tokens,)](
            q, k, cos, sin, out_q, out_k,
            NUM_HEADS=num_heads, NUM_KV_HEADS=k.shape[1], HALF=head_dim // 2,
            TILE_HEADS=padded(num_heads), TILE_KV_HEADS=padded(k.shape[1]), TILE_HALF=padded(head_dim // 2),
            num_warps=4 if num_heads * head_dim <= 4096 else 8, maxnreg=128, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_k


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, out_q_ptr, out_k_ptr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_KV_HEADS: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    """Program t turns all heads of token t: they share the angles, which are read once."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, TILE_HALF)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    turn_heads(q_ptr, out_q_ptr, token, cos, sin, NUM_HEADS, HALF, TILE_HEADS, TILE_HALF)
    turn_heads(k_ptr, out_k_ptr, token, cos, sin, NUM_KV_HEADS, HALF, TILE_KV_HEADS, TILE_HALF)


@triton.jit
def turn_heads(
    x_ptr, out_ptr, token, cos, sin,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    """Turn entry pairs (i, i + HALF) of every head of one token by the angle of pair i."""
    head = tl.arange(0, TILE_HEADS)
    pair = tl.arange(0, TILE_HALF)
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    at = (token * NUM_HEADS + head)[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    store_turned(out_ptr + at, out_ptr + at + HALF, first, second, cos, sin, mask)


@triton.jit
def store_turned(first_ptr, second_ptr, first, second, cos, sin, mask):
    """Store pairs of entries, each turned by the angle of its column."""
    dtype: tl.constexpr = first_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
    tl.store(second_ptr, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)


def silu_mul(gate: Float[Tensor, "T F"], up: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
    """Launch `silu_mul_kernel`; see `ops.silu_mul`."""
    check_tensors("silu_mul", gate, up)
    num_rows, width = gate.shape
    out = torch.empty_like(gate)
    if num_rows:
        silu_mul_kernel[(num_rows, triton.cdiv(width, 1024))](
            gate, up, out, WIDTH=width, TILE=1024, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program (t, j) computes entries ``j * TILE`` and on of row t."""
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + columns
    gate = tl.load(gate_ptr + at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, gated(gate, up).to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def gated(gate, up):
    """Return ``silu(gate) * up`` of numbers in fp32."""
    fade = tl.exp(-tl.abs(gate))  # exp(-gate) would overflow for very negative gates
    sigmoid = tl.where(gate >= 0, 1.0, fade) / (1.0 + fade)
    return gate * sigmoid * up


def causal_attention(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    query_starts: Int[Tensor, " B+1"],
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Float[Tensor, "T H D"]:
    """Launch `causal_attention_kernel`; see `ops.causal_attention`.

    The number of programs must be known without reading ``query_starts`` back from the GPU, so it is an upper
    bound: cutting T tokens of B sequences into tiles leaves at most one part-filled tile per sequence.
    """
    check_tensors("causal_attention", q, k, v)
    check_indices("causal_attention", q, torch.int32, query_starts)
    check_heads("causal_attention", q, k)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_seqs = k.shape[1], query_starts.shape[0] - 1
    tiles = prefill_tiles(q)
    tile_heads = heads_per_tile(tiles, num_heads // num_kv_heads)
    out = torch.empty_like(q)
    if num_tokens:
        num_tiles = num_tokens // (tiles.queries // tile_heads) + num_seqs
        causal_attention_kernel[(num_tiles * (num_heads // tile_heads),)](
            q, k, v, out, query_starts, num_seqs, LOG2_E * (head_dim**-0.5 if scale is None else scale),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, WINDOW=window,
            TILE_QUERIES=tiles.queries, TILE_HEADS=tile_heads, TILE_KEYS=tiles.keys,
            TILE_DIM=padded(head_dim, minimum=16),
            **tiles.options, enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def causal_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, query_starts_ptr, num_seqs, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile of the batch's query tokens for TILE_HEADS query heads.

    A tile has TILE_QUERIES rows, row r being token ``r // TILE_HEADS`` and head ``r % TILE_HEADS``; all heads of a
    tile read the same KV head. Tiles of a sequence start at multiples of their size, counted from its first token,
    so that a row's sums do not depend on what else is in the batch.

    All heads of the same tokens are neighbours, and the first programs take the last tokens: a prompt's late tiles
    see the most keys, and work that takes long must not begin last.

    Loop invariant: ``acc / row_sum`` is the attention of every row over the keys before ``start``. Keys that all rows
    see come first and need no mask; the tiles on the diagonal follow.
    """
    TILE_TOKENS: tl.constexpr = TILE_QUERIES // TILE_HEADS
    HEAD_TILES: tl.constexpr = NUM_HEADS // TILE_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_TILES
    head_tile = tl.program_id(0) % HEAD_TILES
    seq = find_sequence(query_starts_ptr, num_seqs, tile, TILE_TOKENS)
    seq_start = tl.load(query_starts_ptr + seq)
    seq_len = tl.load(query_starts_ptr + seq + 1) - seq_start
    first_token = (tile - (seq_start // TILE_TOKENS + seq)) * TILE_TOKENS
    if first_token >= seq_len:  # the grid is an upper bound
        return
    end = tl.minimum(first_token + TILE_TOKENS, seq_len)

    row = tl.arange(0, TILE_QUERIES)
    token = first_token + row // TILE_HEADS
    head = head_tile * TILE_HEADS + row % TILE_HEADS
    kv_head = head_tile * TILE_HEADS // (NUM_HEADS // NUM_KV_HEADS)
    dim = tl.arange(0, TILE_DIM)
    q_at = ((seq_start + token).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    q_mask = ((row < TILE_TOKENS * TILE_HEADS) & (token < seq_len))[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)

    key = tl.arange(0, TILE_KEYS)
    kv_at = (key * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]  # within a tile of keys
    k_ptrs, v_ptrs = k_ptr + kv_at, v_ptr + kv_at
    row_max = tl.full([TILE_QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_QUERIES], tl.float32)
    acc = tl.zeros([TILE_QUERIES, TILE_DIM], tl.float32)
    first_masked = 0
    if WINDOW is None:
        first_masked = (first_token + 1) // TILE_KEYS * TILE_KEYS
        for start in range(0, first_masked, TILE_KEYS):
            step = (seq_start + start).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
            k = tl.load(k_ptrs + step, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_ptrs + step, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    else:
        first_masked = tl.maximum(first_token - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
    for start in range(first_masked, end, TILE_KEYS):
        step = (seq_start + start).to(tl.int64) * (NUM_KV_HEADS * HEAD_DIM)
        kv_mask = (start + key < end)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_ptrs + step, mask=kv_mask, other=0.0)
        v = tl.load(v_ptrs + step, mask=kv_mask, other=0.0)
        visible = start + key[None, :] <= token[:, None]
        if WINDOW is not None:
            visible &= start + key[None, :] > token[:, None] - WINDOW
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(visible, scores, float("-inf"))
        row_max, row_sum, acc = absorb(scores, v, row_max, row_sum, acc)
    tl.store(out_ptr + q_at, normalized(row_sum, acc).to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def find_sequence(query_starts_ptr, num_seqs, tile, TILE_TOKENS: tl.constexpr):
    """Return the sequence that a tile of the batch belongs to.

    Sequence b owns the tiles from ``query_starts[b] // TILE_TOKENS + b`` on: the ``+ b`` leaves room for one
    part-filled tile of each sequence before it. The last b that begins at or before the tile is found by halving
    ``[low, high)``, which always contains it.
    """
    low = 0
    high = num_seqs
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_starts_ptr + middle) // TILE_TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def count_tiles(query_starts_ptr, num_seqs, TILE_TOKENS: tl.constexpr):
    """Return into how many tiles of tokens the batch's prompts are cut, a decode row into none."""
    total = 0
    for base in range(0, num_seqs, SEQS_AT_ONCE):
        total += tl.sum(tiles_of(query_starts_ptr, base, num_seqs, TILE_TOKENS))
    return total


@triton.jit
def find_tile(query_starts_ptr, num_seqs, tile, TILE_TOKENS: tl.constexpr):
    """Return the sequence that a tile of the batch belongs to, and which of the sequence's tiles it is.

    Loop invariant: the tiles of the first ``base`` sequences are counted; ``seq`` of them end at or before the tile,
    and these have ``before`` tiles.
    """
    seq, before, counted = 0, 0, 0
    for base in range(0, num_seqs, SEQS_AT_ONCE):
        tiles = tiles_of(query_starts_ptr, base, num_seqs, TILE_TOKENS)
        is_past = counted + tl.cumsum(tiles) <= tile
        seq += tl.sum(is_past.to(tl.int32))
        before += tl.sum(tl.where(is_past, tiles, 0))
        counted += tl.sum(tiles)
    return seq, tile - before


@triton.jit
def tiles_of(query_starts_ptr, base, num_seqs, TILE_TOKENS: tl.constexpr):
    """Return how many tiles each of SEQS_AT_ONCE sequences has, from ``base`` on."""
    seq = base + tl.arange(0, SEQS_AT_ONCE)
    query_start = tl.load(query_starts_ptr + seq, mask=seq < num_seqs, other=0)
    num_queries = tl.load(query_starts_ptr + seq + 1, mask=seq < num_seqs, other=0) - query_start
    return tl.where(num_queries > 1, tl.cdiv(num_queries, TILE_TOKENS), 0)


@triton.jit
def absorb(scores, v, row_max, row_sum, acc):
    """Take one more tile of keys into the softmax of each row: the online softmax.

    ``scores`` [rows, keys] are in units of log 2, -inf where a key is hidden. A row's state is the largest score so
    far, the sum of ``2 ** (score - row_max)``, and the values weighted by the same numbers. When the maximum grows,
    what was summed before fades by the difference.

    Source:
        Online normalizer calculation for softmax (arXiv 1805.02867); FlashAttention (arXiv 2205.14135).
    """
    new_max, weights, fade = weigh(scores, row_max)
    row_sum = row_sum * fade + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def weigh(scores, row_max):
    """Return the new maximum of each row, the weight of each key, and the factor by which older sums fade."""
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing visible yet: -inf - -inf would be NaN
    return new_max, tl.exp2(scores - pivot[:, None]), tl.exp2(row_max - pivot)


@triton.jit
def normalized(row_sum, acc):
    """Return the attention of each row: zeros for a row that saw no key."""
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
