"""The operations of `fast` as Triton kernels.

They start early where they can (`minipaged.launch.early_start`), and fetch what the launch before them cannot have
written while that is still at work.
"""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minipaged.foundation.kernels import gated, store_turned, wait_for_inputs
from minipaged.launch import check_indices, check_tensors, early_start, padded
from minipaged.shapes import Float, Int, Tensor

SEGMENT = tl.constexpr(32)
"""Entries that lie side by side in memory in `load_segments`: four threads fetch 16 bytes each, at 2 bytes an entry."""

TILE_ROWS = tl.constexpr(16)
"""Rows of x, those that are not there included: as many as a matrix instruction has."""


@dataclass(frozen=True)
class SkinnyTiles:
    """How `skinny_linear_kernel` is cut: rows of the weight per program, warps, entries of a row per warp and step.

    The warps of a program share out each row, so that the sums of one program are short chains side by side.
    ``max_registers`` is as in `launch.Tiles`.
    """

    rows: int
    num_warps: int
    width: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the launch; a step is not cut again, nor fetched ahead by the compiler."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": 1, **limit}


# Up to so many entries in a row of the weight, and so many rows: the first line that fits. What counts is how many
# bytes are under way at a time. A small weight is over before the memory is at speed, so its programs fetch all they
# will ever read at once, and have few rows each, so that there is one for every processor. Of a large one there are
# many programs at a time; they repeat a smaller step, with the next tile always on its way.
ANY = 2**31
SKINNY_TILES = {
    (1024, 4096): SkinnyTiles(16, 4, 256),
    (1024, ANY): SkinnyTiles(32, 4, 256),
    (2048, 2048): SkinnyTiles(8, 4, 512),
    (4096, 2048): SkinnyTiles(8, 8, 512),
    (ANY, 4096): SkinnyTiles(16, 4, 256),
    (ANY, 8192): SkinnyTiles(8, 4, 128, max_registers=128),
    (ANY, ANY): SkinnyTiles(16, 4, 64, max_registers=128),
}
# fp32 is there to check the rest: matrix units do not multiply it exactly.
SKINNY_TILES_FP32 = SkinnyTiles(16, 4, 32)


def skinny_tiles(weight: Float[Tensor, "out in"]) -> SkinnyTiles:
    """Return the tiles for a weight.

    Invariants:
        They depend on the weight's shape and dtype alone: they decide in which order products are added.
    """
    if weight.dtype == torch.float32:
        return SKINNY_TILES_FP32
    num_out, num_in = weight.shape
    return next(tiles for limits, tiles in SKINNY_TILES.items() if num_in <= limits[0] and num_out <= limits[1])


def skinny_linear(
    x: Float[Tensor, "T in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "T out"]:
    """Launch `skinny_linear_kernel`; see `ops.skinny_linear`."""
    check_tensors("skinny_linear", x, weight, *(() if bias is None else (bias,)))
    num_rows, (num_out, num_in) = x.shape[0], weight.shape
    assert x.shape[1] == num_in and num_rows <= TILE_ROWS.value, (x.shape, weight.shape)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    tiles = skinny_tiles(weight)
    if num_rows and num_out:
        skinny_linear_kernel[(triton.cdiv(num_out, tiles.rows),)](
            x, weight, bias, out, num_rows, num_in,
            NUM_OUT=num_out, NUM_IN=num_in, TILE_OUT=tiles.rows, PARTS=tiles.num_warps, TILE_PART=tiles.width,
            **tiles.options, **early_start(x.device), enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows", "num_in"])
def skinny_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, num_rows, num_in,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr,
    TILE_OUT: tl.constexpr, PARTS: tl.constexpr, TILE_PART: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program i computes columns ``i * TILE_OUT`` and on of the result, for all rows of x.

    A step takes PARTS x TILE_PART entries of every row, one part to each warp, which sums up its own parts. The sums
    of the warps are added at the end. Rows of x that are not there count as zeros.

    ``num_in`` is NUM_IN, unknown to the compiler: seeing a loop, even one of a single turn, the assembler has all
    loads of a step under way before it. Knowing better, it puts each load just before its use, and the program then
    waits for the memory several times.

    Loop invariant: ``sums`` holds the entries before ``start``, and ``x`` and ``weight`` those of the step there.
    """
    first = tl.program_id(0) * TILE_OUT
    STEP: tl.constexpr = PARTS * TILE_PART
    weight = load_segments(weight_ptr, first, NUM_OUT, 0, NUM_IN, TILE_OUT, PARTS, TILE_PART)
    wait_for_inputs(STARTS_EARLY)
    x = load_segments(x_ptr, 0, num_rows, 0, NUM_IN, TILE_ROWS, PARTS, TILE_PART)
    sums = tl.zeros([PARTS, TILE_ROWS, TILE_OUT], tl.float32)
    for start in range(0, num_in, STEP):
        now_x, now_weight = x, weight
        if STEP < NUM_IN:
            weight = load_segments(weight_ptr, first, NUM_OUT, start + STEP, NUM_IN, TILE_OUT, PARTS, TILE_PART)
            x = load_segments(x_ptr, 0, num_rows, start + STEP, NUM_IN, TILE_ROWS, PARTS, TILE_PART)
        sums = tl.dot(now_x, tl.permute(now_weight, (0, 2, 1)), sums, input_precision="ieee")
    total = tl.sum(sums, axis=0)  # [TILE_ROWS, TILE_OUT]
    row, column = tl.arange(0, TILE_ROWS), first + tl.arange(0, TILE_OUT)
    is_column = column < NUM_OUT
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * NUM_OUT + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & is_column[None, :])


@triton.jit
def load_segments(
    ptr, first_row, num_rows, start, NUM_IN: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, TILE_PART: tl.constexpr,
):  # fmt: skip
    """Return entries ``start`` and on of ROWS rows, as [PARTS, ROWS, TILE_PART], straight into the right registers.

    A matrix instruction wants from a thread entries 2t, 2t + 1, 2t + 8, 2t + 9 of a row's 16, t from 0 to 3. Fetched
    in this order, 4 bytes at a time, they would have to be passed on between threads. But a sum of products may be
    taken in any order, if only x and the weight have the same. So thread t fetches 8 entries that lie side by side,
    and each pair of them is given the place where an instruction wants a pair of thread t:

        in memory   t0 t0 t0 t0 t1 t1 t1 t1 t2 t2 t2 t2 t3 t3 t3 t3      (one pair each)
        in the tile t0 t1 t2 t3 t0 t1 t2 t3 t0 t1 t2 t3 t0 t1 t2 t3

    Eight rows of four threads are one warp, so in the first axis of the tile that is loaded the row counts up
    fastest, to 8, then the part, that is the warp.
    """
    CHUNKS: tl.constexpr = TILE_PART // SEGMENT
    segment = tl.arange(0, ROWS * PARTS * CHUNKS)[:, None]
    part, chunk = segment // 8 % PARTS, segment // (8 * PARTS) % CHUNKS
    row = first_row + segment // (8 * PARTS * CHUNKS) * 8 + segment % 8
    entry = start + (part * CHUNKS + chunk) * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    mask = (row < num_rows) & (entry < NUM_IN)
    tile = tl.load(ptr + row.to(tl.int64) * NUM_IN + entry, mask=mask, other=0.0)
    pairs = tl.reshape(tile, [ROWS // 8, CHUNKS, PARTS, 8, 4, 4, 2])
    pairs = tl.permute(pairs, (2, 0, 3, 1, 5, 4, 6))  # [PARTS, ROWS / 8, 8, CHUNKS, 4, 4, 2]
    return tl.reshape(pairs, [PARTS, ROWS, TILE_PART])


def norm_rotate_write(
    qkv: Float[Tensor, "T (H+2K)*D"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T D_half"],
    sin: Float[Tensor, "T D_half"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    slot_mapping: Int[Tensor, " T"],
    *,
    num_heads: int,
) -> Float[Tensor, "T H D"]:
    """Launch `norm_rotate_write_kernel`; see `ops.norm_rotate_write`."""
    op = "norm_rotate_write"
    check_tensors(op, qkv, k_pool, v_pool, *(weight for weight in (q_norm, k_norm) if weight is not None))
    check_tensors(op, cos, sin)
    check_indices(op, qkv, torch.int64, slot_mapping)
    num_tokens, (num_kv_heads, head_dim) = qkv.shape[0], k_pool.shape[2:]
    assert head_dim % 2 == 0 and cos.device == qkv.device, f"{op}: entries are turned in pairs, on one device"
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    tile_dim = padded(head_dim)
    tile_heads = max(1, HEAD_ENTRIES // tile_dim)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads, tile_heads) + triton.cdiv(num_kv_heads, tile_heads))
        norm_rotate_write_kernel[grid](
            qkv, q_norm, k_norm, eps, cos, sin, k_pool, v_pool, slot_mapping, out,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
            TILE_HEADS=tile_heads, TILE_DIM=tile_dim, TILE_HALF=padded(head_dim // 2),
            num_warps=max(1, tile_heads * tile_dim // 256), **early_start(qkv.device), enable_fp_fusion=False,
        )  # fmt: skip
    return out


HEAD_ENTRIES = 1024
"""Entries of the heads of one program of `norm_rotate_write_kernel`, at 8 to a thread as in `rms_norm_kernel`."""


@triton.jit
def norm_rotate_write_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, cos_ptr, sin_ptr, k_pool_ptr, v_pool_ptr, slots_ptr, out_ptr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr, TILE_DIM: tl.constexpr, TILE_HALF: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program (t, j) takes the j-th TILE_HEADS heads of token t: first those of q, then those of k, with those of v."""
    wait_for_inputs(STARTS_EARLY)
    HEAD_DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    qkv_ptr += token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    pair = tl.arange(0, TILE_HALF)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    Q_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    tile = tl.program_id(1)
    if tile < Q_TILES:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        out_ptr += token * (NUM_HEADS * HEAD_DIM)
        norm_and_turn(qkv_ptr, out_ptr, q_norm_ptr, eps, cos, sin, head, NUM_HEADS, HALF, TILE_DIM, TILE_HALF)
    else:
        head = (tile - Q_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            target = slot * (NUM_KV_HEADS * HEAD_DIM)
            k_ptr = qkv_ptr + NUM_HEADS * HEAD_DIM
            norm_and_turn(
                k_ptr, k_pool_ptr + target, k_norm_ptr, eps, cos, sin, head, NUM_KV_HEADS, HALF, TILE_DIM, TILE_HALF
            )
            entry = tl.arange(0, TILE_DIM)
            at = head[:, None] * HEAD_DIM + entry[None, :]
            mask = (head < NUM_KV_HEADS)[:, None] & (entry < HEAD_DIM)[None, :]
            v = tl.load(k_ptr + NUM_KV_HEADS * HEAD_DIM + at, mask=mask, other=0.0)
            tl.store(v_pool_ptr + target + at, v, mask=mask)


@triton.jit
def norm_and_turn(
    x_ptr, out_ptr, norm_ptr, eps, cos, sin, head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, TILE_DIM: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    """Norm some heads, round them, and turn their entry pairs (i, i + HALF), as `rms_norm` and `rotary` do.

    Each half of a head is fetched by itself, since its entries meet in pairs. The sum of squares wants the whole head
    side by side, as `rms_norm_kernel` has it, and fetches it again, from the cache nearest by.
    """
    pair = tl.arange(0, TILE_HALF)
    mask = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + pair[None, :]
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if norm_ptr is not None:
        entry = tl.arange(0, TILE_DIM)
        is_entry = (head < NUM_HEADS)[:, None] & (entry < 2 * HALF)[None, :]
        x = tl.load(x_ptr + head[:, None] * (2 * HALF) + entry[None, :], mask=is_entry, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / (2 * HALF) + eps)[:, None]
        first_weight = tl.load(norm_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(norm_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        # Rounded before the weight and after it, where the separate operations round.
        first = ((first * factor).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * factor).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    store_turned(out_ptr + at, out_ptr + at + HALF, first, second, cos, sin, mask)


def silu_mul_packed(gate_up: Float[Tensor, "T 2F"]) -> Float[Tensor, "T F"]:
    """Launch `silu_mul_packed_kernel`; see `ops.silu_mul_packed`."""
    check_tensors("silu_mul_packed", gate_up)
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    if out.numel():
        silu_mul_packed_kernel[(num_rows, triton.cdiv(width, 1024))](
            gate_up, out, WIDTH=width, TILE=1024, num_warps=4, enable_fp_fusion=False, **early_start(gate_up.device)
        )
    return out


@triton.jit
def silu_mul_packed_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, TILE: tl.constexpr, STARTS_EARLY: tl.constexpr):
    """Program (t, j) computes entries ``j * TILE`` and on of row t."""
    wait_for_inputs(STARTS_EARLY)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < WIDTH
    row = tl.program_id(0).to(tl.int64)
    gate = tl.load(gate_up_ptr + row * 2 * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * WIDTH + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + columns, gated(gate, up).to(out_ptr.dtype.element_ty), mask=is_column)
