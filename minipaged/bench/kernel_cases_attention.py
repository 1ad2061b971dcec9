"""Attention, as ``bench kernels`` measures it: decode, every batch size, the cost of paging, prefill, shared prefixes.

Block ids are shuffled, as they are in a pool in use. Bytes are those of the visible keys and values, which every
implementation has to read at least once.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from minipaged.batching.ops import ragged_paged_attention
from minipaged.bench.gpu_timing import Call, Workbench
from minipaged.bench.kernel_case import Case, Score
from minipaged.foundation.ops import causal_attention
from minipaged.paged.ops import paged_attention
from minipaged.prefix.ops import shared_prefix_attention
from minipaged.shapes import Tensor

FLASH = SDPBackend.FLASH_ATTENTION
"""PyTorch chooses a backend by itself. Beside its choice stands this one, which every GPU from 8.0 on has."""

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Heads:
    """The heads of one layer."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the size of so many tokens' keys and values, at 16 bits a number."""
        return 4 * num_tokens * self.num_kv_heads * self.head_dim

    def flop(self, num_pairs: int) -> int:
        """Return the operations of attention over so many pairs of a query token and a key that it sees."""
        return 4 * num_pairs * self.num_heads * self.head_dim


LLAMA = Heads()
"""Those of Llama-3.1-8B."""


@dataclass(frozen=True)
class Paged:
    """One set of inputs of attention through block tables."""

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_tables: Tensor
    query_starts: Tensor
    seq_lens: Tensor

    def part(self, first: int, end: int) -> "Paged":
        """Return some of the sequences, of one query each. What is copied is aligned again, which kernels count on."""
        starts = self.query_starts[: end - first + 1]
        tables, lens = (x[first:end].clone() for x in (self.block_tables, self.seq_lens))
        return Paged(self.q[first:end], self.k_pool, self.v_pool, tables, starts, lens)

    def ragged(self) -> Tensor:
        """Return what rung 4's operation makes of it, called as an engine calls it."""
        inputs = (self.q, self.k_pool, self.v_pool, self.block_tables, self.query_starts, self.seq_lens)
        return ragged_paged_attention(*inputs, max_query_len=1 if len(self.q) == len(self.seq_lens) else None)

    def decode(self) -> Tensor:
        """Return what rung 2's operation makes of it."""
        return paged_attention(self.q, self.k_pool, self.v_pool, self.block_tables, self.seq_lens)


def paged_inputs(
    bench: Workbench, lengths: Sequence[int], heads: Heads = LLAMA, num_new: int = 1, block_size: int = BLOCK_SIZE
) -> Paged:
    """Return sequences of these lengths, the last ``num_new`` tokens of each being queries."""
    widths = [-(-length // block_size) for length in lengths]
    ids = bench.shuffled(sum(widths)).split(widths)
    tables = bench.ints([-1]).repeat(len(lengths), max(widths))
    for table, own in zip(tables, ids, strict=True):
        table[: len(own)] = own
    pool = (sum(widths), block_size, heads.num_kv_heads, heads.head_dim)
    return Paged(
        bench.random(len(lengths) * num_new, heads.num_heads, heads.head_dim),
        bench.random(*pool),
        bench.random(*pool),
        tables,
        bench.ints(range(0, len(lengths) * num_new + 1, num_new)),
        bench.ints(lengths),
    )


def sdpa_sides(
    bench: Workbench, num_sets: int, batch: int, length: int, num_new: int, heads: Heads
) -> dict[str, list[Call]]:
    """Return PyTorch's own attention over contiguous keys and values, laid out as a cache is: [B, L, K, D]."""
    sides: dict[str, list[Call]] = {"sdpa": [], "sdpa flash": []}
    for _ in range(num_sets):
        q, k, v = _contiguous_inputs(bench, batch, length, num_new, heads)
        sides["sdpa"].append(partial(_sdpa, q, k, v, nullcontext))
        sides["sdpa flash"].append(partial(_sdpa, q, k, v, partial(sdpa_kernel, FLASH)))
    return sides


def _contiguous_inputs(
    bench: Workbench, batch: int, length: int, num_new: int, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    q = bench.random(batch, num_new, heads.num_heads, heads.head_dim).transpose(1, 2)
    k, v = (bench.random(batch, length, heads.num_kv_heads, heads.head_dim).transpose(1, 2) for _ in range(2))
    return q, k, v


def _sdpa(q: Tensor, k: Tensor, v: Tensor, context: Callable[[], AbstractContextManager[object]]) -> Tensor:
    with context():
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True)


def chosen_backend(bench: Workbench, batch: int, length: int, num_new: int = 1, heads: Heads = LLAMA) -> str:
    """Return the name of the backend that PyTorch chooses by itself, for decode or for a whole prompt."""
    inputs = _contiguous_inputs(bench, batch, length, num_new, heads)
    choice = torch._fused_sdp_choice(*inputs, is_causal=num_new > 1, enable_gqa=True)  # pyright: ignore
    return SDPBackend(choice).name


def _chunk_call(bench: Workbench, num_new: int, length: int, heads: Heads) -> Call:
    """Return PyTorch's attention of a chunk. Its mask does not go with groups of heads, so keys stand repeated."""
    q, k, v = _contiguous_inputs(bench, 1, length, num_new, heads)
    k, v = (x.repeat_interleave(heads.num_heads // heads.num_kv_heads, 1) for x in (k, v))
    return partial(F.scaled_dot_product_attention, q, k, v, attn_mask=causal_lower_right(num_new, length))


def decode(batch: int, length: int, *scores: Score, heads: Heads = LLAMA) -> Case:
    """Return decode of equal lengths, by both operations on blocks and by PyTorch on contiguous memory."""
    num_bytes = heads.kv_bytes(batch * length)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        num_sets = bench.num_sets(num_bytes)
        sets = [paged_inputs(bench, [length] * batch, heads) for _ in range(num_sets)]
        return {
            "ragged": [one.ragged for one in sets],
            "paged": [one.decode for one in sets],
            **sdpa_sides(bench, num_sets, batch, length, 1, heads),
        }

    return Case("decode", f"decode {batch} x {length:,}", build, scores, num_bytes)


LARGEST_RISE = 15.0
"""Time per byte of a batch may be so many percent above that of a batch with one sequence less."""


def every_batch(length: int, largest: int = 256, heads: Heads = LLAMA) -> Case:
    """Return decode of every batch size up to the largest, each to be compared with the next.

    All have their sequences in one pool. The calls of a small batch take different ones in turn.
    """
    num_bytes = heads.kv_bytes(length)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        every = paged_inputs(bench, [length] * largest, heads)
        sides: dict[str, list[Call]] = {}
        for batch in range(1, largest + 1):
            num_sets = min(bench.num_sets(batch * num_bytes), largest // batch)
            sides[str(batch)] = [every.part(i * batch, (i + 1) * batch).ragged for i in range(num_sets)]
        return sides

    return Case("batch", f"batch 1 to {largest} x {length:,}", build, (Score("% rise", LARGEST_RISE),), num_bytes)


def paging(block_size: int, batch: int, length: int, target: float | None, heads: Heads = LLAMA) -> Case:
    """Return decode over shuffled blocks beside the same kernel, pool and lengths over blocks in order."""
    num_bytes = heads.kv_bytes(batch * length)

    def build(bench: Workbench) -> dict[str, list[Call]]:
        sides: dict[str, list[Call]] = {"shuffled": [], "in order": []}
        for _ in range(bench.num_sets(num_bytes)):
            one = paged_inputs(bench, [length] * batch, heads, block_size=block_size)
            order = one.block_tables.flatten().sort().values.view_as(one.block_tables)
            contiguous = Paged(one.q, one.k_pool, one.v_pool, order, one.query_starts, one.seq_lens)
            sides["shuffled"].append(one.ragged)
            sides["in order"].append(contiguous.ragged)
        return sides

    scores = (Score("% over", target, "in order"),)
    return Case("paging", f"paging, blocks of {block_size}", build, scores, num_bytes)


def prefill(length: int, *scores: Score, heads: Heads = LLAMA) -> Case:
    """Return one whole prompt: through its block table, over its own keys and values, and by PyTorch."""

    def build(bench: Workbench) -> dict[str, list[Call]]:
        num_sets = bench.num_sets(heads.kv_bytes(length))
        sets = [paged_inputs(bench, [length], heads, num_new=length) for _ in range(num_sets)]
        return {
            "ragged": [one.ragged for one in sets],
            "causal": [_causal_call(bench, one, heads) for one in sets],
            **sdpa_sides(bench, num_sets, 1, length, length, heads),
        }

    num_flop = heads.flop(length * (length + 1) // 2)
    return Case("prefill", f"causal prefill {length:,}", build, scores, heads.kv_bytes(length), num_flop)


def _causal_call(bench: Workbench, one: Paged, heads: Heads) -> Callable[[], Tensor]:
    shape = (len(one.q), heads.num_kv_heads, heads.head_dim)
    return partial(causal_attention, one.q, bench.random(*shape), bench.random(*shape), one.query_starts)


def chunk(num_new: int, length: int, heads: Heads = LLAMA) -> Case:
    """Return the last chunk of a prompt, whose other tokens are in the cache."""

    def build(bench: Workbench) -> dict[str, list[Call]]:
        num_sets = bench.num_sets(heads.kv_bytes(length))
        sets = [paged_inputs(bench, [length], heads, num_new) for _ in range(num_sets)]
        return {
            "ragged": [one.ragged for one in sets],
            "sdpa flash": [_chunk_call(bench, num_new, length, heads) for _ in sets],
        }

    num_flop = heads.flop(num_new * (length - num_new) + num_new * (num_new + 1) // 2)
    name = f"prefill of the last {num_new} of {length:,}"
    return Case("prefill", name, build, (Score("TFLOP/s"),), heads.kv_bytes(length), num_flop)


def shared_prefix(batch: int, prefix: int, suffix: int, target: float, heads: Heads = LLAMA) -> Case:
    """Return decode of sequences that all begin alike, beside plain decode over the same blocks and over own ones."""

    def build(bench: Workbench) -> dict[str, list[Call]]:
        shared = paged_inputs(bench, [prefix + suffix * batch], heads)
        own = paged_inputs(bench, [prefix + suffix] * batch, heads)
        ids = shared.block_tables.flatten()
        num_shared = prefix // BLOCK_SIZE
        tables = torch.cat((ids[:num_shared].expand(batch, -1), ids[num_shared:].view(batch, -1)), 1)
        same = Paged(own.q, shared.k_pool, shared.v_pool, tables, own.query_starts, own.seq_lens)
        groups = (bench.ints([0, batch]), bench.ints([prefix]))
        inputs = (same.q, same.k_pool, same.v_pool, same.block_tables, same.seq_lens, *groups)
        return {
            "shared": [partial(shared_prefix_attention, *inputs)],
            "plain": [same.decode],
            "plain, own blocks": [own.decode],
        }

    assert prefix % BLOCK_SIZE == suffix % BLOCK_SIZE == 0
    scores = tuple(Score("x", target, against) for against in ("plain", "plain, own blocks"))
    name = f"prefix {prefix:,} + {suffix} x {batch}"
    return Case("prefix", name, build, scores, heads.kv_bytes(prefix + batch * suffix))
