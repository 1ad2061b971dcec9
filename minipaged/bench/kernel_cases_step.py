"""What a decode step does beside attention, as ``bench kernels`` measures it: products of few rows, and what is fused.

Weights are read from memory. Rows, heads and logits are not: in a step, the launch before has just written them, so
one set of them is enough.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from minipaged.bench.gpu_timing import Call, Workbench
from minipaged.bench.kernel_case import Case, Score
from minipaged.bench.kernel_cases_attention import BLOCK_SIZE, Heads
from minipaged.bench.kernel_cases_memory import ITEM_BYTES
from minipaged.fast.ops import norm_rotate_write, skinny_linear
from minipaged.foundation.ops import rms_norm, rotary
from minipaged.foundation.sampler.ops import sample_tokens
from minipaged.paged.ops import write_slots
from minipaged.shapes import Tensor

QWEN3_06B_PRODUCTS = ((1024, 4096), (2048, 1024), (1024, 3072), (1024, 6144), (3072, 1024), (1024, 151_936))
"""Columns and rows of the weights: q, k and v packed; out of attention; gate or up; both packed; down; logits."""

LLAMA_8B_PRODUCTS = ((4096, 6144), (4096, 4096), (4096, 14_336), (14_336, 4096), (4096, 128_256))
"""The same of Llama-3.1-8B."""

QWEN3_HEADS = Heads(16, 8, 128)
EPS = 1e-6


def product(num_rows: int, num_in: int, num_out: int, target: float | None = None) -> Case:
    """Return the product of few rows with one weight, by ours and by cuBLAS."""
    num_bytes = num_in * num_out * ITEM_BYTES

    def build(bench: Workbench) -> dict[str, list[Call]]:
        x = bench.random(num_rows, num_in)
        weights = [bench.random(num_out, num_in) for _ in range(bench.num_sets(num_bytes))]
        return {
            "skinny": [partial(skinny_linear, x, weight) for weight in weights],
            "cublas": [partial(F.linear, x, weight) for weight in weights],
        }

    name = f"product {num_rows} x {num_in:,} x {num_out:,}"
    return Case("products", name, build, (Score("% of read", target), Score("x", None, "cublas")), num_bytes)


def products(shapes: Sequence[tuple[int, int]], target: float | None = None) -> list[Case]:
    """Return the products of a model's weights with 1, 4 and 16 rows; the target is that of one row."""
    return [product(rows, *shape, target if rows == 1 else None) for shape in shapes for rows in (1, 4, 16)]


def fused_write(num_tokens: int, heads: Heads = QWEN3_HEADS) -> Case:
    """Return norms of heads, rotary and cache write in one launch, beside the operations that it stands for.

    The separate ones get q, k and v apart already.
    """
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim

    def build(bench: Workbench) -> dict[str, list[Call]]:
        q_norm, k_norm = bench.random(heads.head_dim), bench.random(heads.head_dim)
        angles = torch.rand(num_tokens, heads.head_dim // 2, device=bench.device)
        angles = (angles.cos(), angles.sin())
        pool = (num_tokens, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        k_pool, v_pool = bench.random(*pool), bench.random(*pool)
        slots = bench.shuffled(num_tokens * BLOCK_SIZE, torch.int64)[:num_tokens]
        qkv = bench.random(num_tokens, width)
        counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = (part.contiguous() for part in qkv.view(num_tokens, -1, heads.head_dim).split(counts, 1))

        def separate() -> Tensor:
            normed_q = rms_norm(q.view(-1, heads.head_dim), q_norm, EPS).view(q.shape)
            normed_k = rms_norm(k.view(-1, heads.head_dim), k_norm, EPS).view(k.shape)
            turned_q, turned_k = rotary(normed_q, normed_k, *angles)
            write_slots(turned_k, v, k_pool, v_pool, slots)
            return turned_q

        inputs = (qkv, q_norm, k_norm, EPS, *angles, k_pool, v_pool, slots)
        fused = partial(norm_rotate_write, *inputs, num_heads=heads.num_heads)
        return {"fused": [fused], "separate": [separate]}

    name = f"norm, turn and write, {num_tokens} tokens"
    return Case("fused", name, build, (Score("us"), Score("x", None, "separate")), 2 * num_tokens * width * ITEM_BYTES)


def random_logits(bench: Workbench, batch: int, vocab_size: int) -> Tensor:
    """Return logits as uneven as a model's: a few tokens share most of the probability."""
    return bench.random(batch, vocab_size) * 4


def chooser(
    bench: Workbench, batch: int, top_k: int | None = None, top_p: float | None = None
) -> Callable[[Tensor], Tensor]:
    """Return the project's choice from logits, at temperature 1, with filters where they are not None."""
    device = bench.device
    return partial(
        sample_tokens,
        temperature=torch.ones(batch, device=device),
        top_k=None if top_k is None else bench.ints([top_k] * batch),
        top_p=None if top_p is None else torch.full((batch,), top_p, device=device, dtype=torch.float64),
        min_p=None,
        seeds=torch.arange(batch, device=device),
        output_indices=torch.zeros(batch, device=device, dtype=torch.int64),
    )


def sampler(batch: int, vocab_size: int, top_k: int | None = None, top_p: float | None = None) -> Case:
    """Return the choice of tokens beside the plain way in PyTorch, which keeps no seed per row."""

    def build(bench: Workbench) -> dict[str, list[Call]]:
        logits = random_logits(bench, batch, vocab_size)

        def plain() -> Tensor:
            kept, ids = (logits, None) if top_k is None else logits.topk(top_k)
            shares = kept.float().softmax(-1)
            if top_p is not None:
                shares = shares.where(shares.cumsum(-1) - shares < top_p, 0)
            best = (shares / torch.empty_like(shares).exponential_()).argmax(-1, keepdim=True)
            return best if ids is None else ids.gather(-1, best)

        return {"ours": [partial(chooser(bench, batch, top_k, top_p), logits)], "torch": [plain]}

    filters = "" if top_k is None else f", k {top_k}, p {top_p:g}"
    scores = (Score("us"), Score("x", None, "torch"))
    return Case("sampler", f"sampler {batch} x {vocab_size:,}{filters}", build, scores, batch * vocab_size * ITEM_BYTES)
