"""What moves bytes and hardly computes, as ``bench kernels`` measures it, beside a plain copy of as many bytes."""

from functools import partial

import torch

from minipaged.batching.ops import gather_blocks, scatter_blocks
from minipaged.bench.gpu_timing import Call, Workbench
from minipaged.bench.kernel_case import COPY, Case, Score
from minipaged.bench.kernel_cases_attention import BLOCK_SIZE, LLAMA, Heads
from minipaged.foundation.ops import rms_norm, silu_mul
from minipaged.paged.ops import write_slots
from minipaged.shapes import Tensor
from minipaged.sharing.ops import copy_blocks

ITEM_BYTES = 2
"""Of bfloat16, which the bench computes in."""


def copy(num_bytes: int) -> Case:
    """Return the copy of a large buffer: what is read and written together is the ceiling of the others.

    An elementwise kernel stands beside PyTorch's copy, and the faster one counts: inside a CUDA graph the copy has been
    seen to move a buffer of a GiB at two thirds of the speed that it reaches outside.
    """

    def build(bench: Workbench) -> dict[str, list[Call]]:
        source = bench.random(num_bytes // ITEM_BYTES)
        target = torch.empty_like(source)
        return {"negate": [partial(torch.neg, source, out=target)], "copy": [partial(target.copy_, source)]}

    return Case(COPY, "copy", build, (Score("TB/s"),), 2 * num_bytes)


def read(num_bytes: int) -> Case:
    """Return the sum of a large buffer: what can be read, where little is written."""

    def build(bench: Workbench) -> dict[str, list[Call]]:
        return {"sum": [bench.random(num_bytes // ITEM_BYTES).sum]}

    return Case(COPY, "read", build, (Score("TB/s"),), num_bytes)


def cache_write(num_tokens: int, heads: Heads = LLAMA) -> Case:
    """Return the write of many tokens' keys and values into shuffled blocks of one layer."""
    num_bytes = 2 * heads.kv_bytes(num_tokens)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        shape = (heads.num_kv_heads, heads.head_dim)
        places = torch.arange(BLOCK_SIZE, device=bench.device)
        slots = (bench.shuffled(num_blocks, torch.int64)[:, None] * BLOCK_SIZE + places).flatten()[:num_tokens]
        sides: dict[str, list[Call]] = {"ours": []}
        for _ in range(bench.num_sets(num_bytes)):
            k, v = (bench.random(num_tokens, *shape) for _ in range(2))
            pools = [torch.empty(num_blocks, BLOCK_SIZE, *shape, dtype=k.dtype, device=k.device) for _ in range(2)]
            sides["ours"].append(partial(write_slots, k, v, *pools, slots))
        return sides

    return Case("writes", f"cache write, {num_tokens:,} tokens", build, (Score("% of copy", 90.0),), num_bytes)


def _pool(bench: Workbench, num_layers: int, num_blocks: int, heads: Heads) -> Tensor:
    return bench.random(num_layers, 2, num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)


def block_copy(num_pairs: int, num_layers: int, heads: Heads = LLAMA) -> Case:
    """Return the copy of blocks to other blocks, keys and values of all layers."""
    num_bytes = 2 * num_layers * heads.kv_bytes(num_pairs * BLOCK_SIZE)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        pool = _pool(bench, num_layers, 2 * num_pairs, heads)
        pairs = bench.shuffled(2 * num_pairs, torch.int64).view(-1, 2)
        return {"ours": [partial(copy_blocks, pool, pairs)]}

    name = f"block copy, {num_pairs} x {num_layers} layers"
    return Case("writes", name, build, (Score("% of copy", 90.0),), num_bytes)


def gather(num_blocks: int, num_layers: int, heads: Heads = LLAMA) -> Case:
    """Return shuffled blocks laid side by side on the GPU, keys and values of all layers."""
    num_bytes = 2 * num_layers * heads.kv_bytes(num_blocks * BLOCK_SIZE)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        pool = _pool(bench, num_layers, 2 * num_blocks, heads)
        ids = bench.shuffled(2 * num_blocks, torch.int64)[:num_blocks]
        return {"ours": [partial(gather_blocks, pool, ids, _pool(bench, num_layers, num_blocks, heads))]}

    name = f"gather, {num_blocks} x {num_layers} layers"
    return Case("writes", name, build, (Score("% of copy", 90.0),), num_bytes)


def swap(num_blocks: int, num_layers: int, is_gather: bool, heads: Heads = LLAMA) -> Case:
    """Return shuffled blocks going to pinned memory of the CPU or back, beside PyTorch's copy of as many bytes."""
    num_bytes = num_layers * heads.kv_bytes(num_blocks * BLOCK_SIZE)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        pool = _pool(bench, num_layers, 4 * num_blocks, heads)
        ids = bench.shuffled(4 * num_blocks, torch.int64)[:num_blocks]
        contiguous = _pool(bench, num_layers, num_blocks, heads)
        is_cuda = bench.device.type == "cuda"
        staging = torch.zeros(contiguous.shape, dtype=contiguous.dtype, pin_memory=is_cuda)
        target, source = (staging, contiguous) if is_gather else (contiguous, staging)
        op = gather_blocks if is_gather else scatter_blocks
        return {
            "ours": [partial(op, pool, ids, staging)],
            "copy": [partial(target.copy_, source, non_blocking=True)],
        }

    name = f"swap {'out' if is_gather else 'in'}, {num_blocks} x {num_layers} layers, pinned"
    return Case("swap", name, build, (Score("GB/s"), Score("% over", None, "copy")), num_bytes)


def add_and_norm(num_tokens: int, width: int) -> Case:
    """Return the norm of a sum that is kept: two rows read and two written per token."""
    num_bytes = 4 * num_tokens * width * ITEM_BYTES

    def build(bench: Workbench) -> dict[str, list[Call]]:
        weight = bench.random(width)
        sides: dict[str, list[Call]] = {"ours": []}
        for _ in range(bench.num_sets(num_bytes)):
            x, residual = (bench.random(num_tokens, width) for _ in range(2))
            sides["ours"].append(partial(rms_norm, x, weight, 1e-6, residual=residual))
        return sides

    return Case("rows", f"add and norm, {num_tokens:,} x {width:,}", build, (Score("% of copy"),), num_bytes)


def gated(num_tokens: int, width: int) -> Case:
    """Return the gate of the MLP: two rows read and one written per token."""
    num_bytes = 3 * num_tokens * width * ITEM_BYTES

    def build(bench: Workbench) -> dict[str, list[Call]]:
        sides: dict[str, list[Call]] = {"ours": []}
        for _ in range(bench.num_sets(num_bytes)):
            gate, up = (bench.random(num_tokens, width) for _ in range(2))
            sides["ours"].append(partial(silu_mul, gate, up))
        return sides

    return Case("rows", f"silu x gate, {num_tokens:,} x {width:,}", build, (Score("% of copy"),), num_bytes)
