"""Rung 4's operations in plain PyTorch.

`ragged_paged_attention` is the definition and the oracle of all tests. `ragged_paged_attention_sdpa` does the same
with PyTorch's fused attention; the torch tier runs it, because one gather per query token is too slow for real use.
"""

import math
from itertools import pairwise

import torch

from minipaged.foundation.reference import newest_tokens_sdpa
from minipaged.paged.reference import paged_attention, paged_attention_padded
from minipaged.shapes import Float, Int, Shaped, Tensor


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
    """See every query token as the newest of a sequence that ends with it, and attend as in decode."""
    counts = query_starts.diff()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)  # the sequence of each token
    tokens = torch.arange(len(rows), device=q.device)
    lengths = seq_lens[rows] - (query_starts[rows + 1] - 1 - tokens)  # less the sequence's tokens behind this one
    out = torch.zeros_like(q)
    out[tokens] = paged_attention(q[tokens], k_pool, v_pool, block_tables[rows], lengths, scale=scale, window=window)
    return out


def ragged_paged_attention_sdpa(
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
    """Attend for decode rows of similar length in one call, and for each prefill row over the keys that it sees."""
    out = torch.zeros_like(q)
    lengths = seq_lens.tolist()
    is_decode = (query_starts.diff() == 1).tolist()
    for group in _similar({row: lengths[row] for row in range(len(lengths)) if is_decode[row]}):
        rows = torch.tensor(group, device=q.device)
        tokens = query_starts[rows].long()
        out[tokens] = paged_attention_padded(
            q[tokens], k_pool, v_pool, block_tables[rows], seq_lens[rows], scale=scale, window=window
        )
    chunks = zip(block_tables, pairwise(query_starts.tolist()), lengths, strict=True)
    for table, (start, end), seq_len in chunks:
        if end - start < 2:
            continue
        first = 0 if window is None else max(0, seq_len - (end - start) - window + 1)
        queries = q[None, start:end].transpose(1, 2)  # [1, H, T, D]
        keys, values = (_gather_heads(pool, table, first, seq_len, q.shape[1]) for pool in (k_pool, v_pool))
        out[start:end] = newest_tokens_sdpa(queries, keys, values, scale, window)[0].transpose(0, 1)
    return out


def _similar(lengths: dict[int, int]) -> list[list[int]]:
    """Group rows so that padding to the longest of a group wastes little: none is over a quarter and 64 shorter."""
    groups: list[list[int]] = []
    longest = 0
    for row, length in sorted(lengths.items(), key=lambda item: -item[1]):
        if not groups or (4 * length < 3 * longest and length < longest - 64):
            groups.append([])
            longest = length
        groups[-1].append(row)
    return groups


def _gather_heads(
    pool: Float[Tensor, "N S K D"], table: Int[Tensor, " M"], first: int, seq_len: int, num_heads: int
) -> Float[Tensor, "1 H L D"]:
    """Gather the tokens from ``first`` on, KV heads repeated as in `causal_attention_sdpa`."""
    block_size, num_kv_heads = pool.shape[1:3]
    token = torch.arange(first, seq_len, device=pool.device)
    slots = table[token // block_size].long() * block_size + token % block_size
    heads = pool.view(-1, *pool.shape[2:])[slots].transpose(0, 1)  # [K, L, D]
    return heads.repeat_interleave(num_heads // num_kv_heads, 0)[None]


def merge_states(
    out_a: Float[Tensor, "T H D"],
    lse_a: Float[Tensor, "T H"],
    out_b: Float[Tensor, "T H D"],
    lse_b: Float[Tensor, "T H"],
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T H"]]:
    """Weigh each side with its share of the sum over all keys; see `ops.merge_states`."""
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a, dtype=torch.float32)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        has_keys = (side_lse != -math.inf)[..., None]
        out += torch.where(has_keys, side.float() * (side_lse - lse).exp()[..., None], 0.0)
    return out.to(out_a.dtype), lse


def gather_blocks(pool: Shaped[Tensor, "*planes N S K D"], ids: Int[Tensor, " P"], staging: Tensor) -> None:
    """Take the blocks of all planes out; the copy also crosses devices."""
    planes, staged = _as_planes(pool, staging)
    staged.copy_(planes[:, ids])


def scatter_blocks(pool: Shaped[Tensor, "*planes N S K D"], ids: Int[Tensor, " P"], staging: Tensor) -> None:
    """Assign through the index: ``planes[:, ids].copy_(...)`` would fill a temporary and leave the pool as it was."""
    planes, staged = _as_planes(pool, staging)
    planes[:, ids] = staged.to(pool.device)


def _as_planes(pool: Tensor, staging: Tensor) -> tuple[Tensor, Tensor]:
    """See both as ``[planes, blocks, S, K, D]``; a plane is K or V of one layer."""
    num_planes = math.prod(pool.shape[:-4])  # -1 in the view would not do: staging may be empty
    return pool.view(num_planes, *pool.shape[-4:]), staging.view(num_planes, *staging.shape[-4:])
