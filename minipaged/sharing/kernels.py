"""Rung 3's operation as a Triton kernel."""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import math

import torch
import triton
import triton.language as tl

from minipaged.launch import check_indices, check_tensors, padded
from minipaged.shapes import Float, Int, Tensor


def copy_blocks(pool: Float[Tensor, "N S K D"] | Float[Tensor, "layers 2 N S K D"], pairs: Int[Tensor, "P 2"]) -> None:
    """Launch `copy_blocks_kernel`; see `ops.copy_blocks`. One launch serves K and V of all layers."""
    check_tensors("copy_blocks", pool)
    check_indices("copy_blocks", pool, torch.int64, pairs)
    assert pool.ndim in (4, 6) and pairs.ndim == 2 and pairs.shape[1] == 2, (pool.shape, pairs.shape)
    num_blocks = pool.shape[-4]
    width = pool.shape[-3] * pool.shape[-2] * pool.shape[-1]
    num_planes = math.prod(pool.shape[:-4])
    tile = min(4096, padded(width))
    if pairs.shape[0]:
        copy_blocks_kernel[(pairs.shape[0], num_planes, triton.cdiv(width, tile))](
            pool, pairs, num_blocks, WIDTH=width, TILE=tile, num_warps=4, enable_fp_fusion=False
        )


@triton.jit(do_not_specialize=["num_blocks"])
def copy_blocks_kernel(pool_ptr, pairs_ptr, num_blocks, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Program (p, plane, j) copies the j-th TILE entries of pair p's source block to its target, in one plane.

    The pool is seen as ``[planes, N, WIDTH]``: a plane is K or V of one layer, WIDTH all entries of a block.
    """
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    plane = tl.program_id(1).to(tl.int64) * num_blocks
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    entries = tl.load(pool_ptr + (plane + source) * WIDTH + columns, mask=columns < WIDTH, other=0.0)
    tl.store(pool_ptr + (plane + target) * WIDTH + columns, entries, mask=columns < WIDTH)
