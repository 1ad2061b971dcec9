"""Copies of blocks between the pool and a staging tensor, as a Triton kernel: what swapping to the CPU is made of."""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import math

import torch
import triton
import triton.language as tl

from minipaged.errors import UserError
from minipaged.launch import check_indices, check_tensors, padded
from minipaged.shapes import Float, Int, Tensor


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
    if staging.device != pool.device and not staging.is_pinned():
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
