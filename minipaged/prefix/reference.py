"""Rung 5's operation in plain PyTorch.

`shared_prefix_attention` is the definition and the oracle of all tests. `shared_prefix_attention_merged` computes what
is shared once, as the kernels do; the torch tier runs it.
"""

from itertools import pairwise

import torch

from minipaged.batching.reference import merge_states
from minipaged.paged.reference import paged_attention, paged_attention_padded
from minipaged.shapes import Bool, Float, Int, Tensor


def shared_prefix_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    group_starts: Int[Tensor, " groups+1"],
    prefix_lens: Int[Tensor, " groups"],
    *,
    scale: float,
) -> Float[Tensor, "B H D"]:
    """Attend as in decode: groups say what need not be read twice, and change nothing about the result."""
    return paged_attention(q, k_pool, v_pool, block_tables, seq_lens, scale=scale, window=None)


def shared_prefix_attention_merged(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    group_starts: Int[Tensor, " groups+1"],
    prefix_lens: Int[Tensor, " groups"],
    *,
    scale: float,
) -> Float[Tensor, "B H D"]:
    """Attend to each prefix once for its whole group, to all other tokens apart, and merge."""
    out = torch.zeros_like(q)
    own_prefixes = prefix_lens.repeat_interleave(group_starts.diff())  # [B]
    is_plain = own_prefixes == 0
    if is_plain.any():
        tables, lengths = block_tables[is_plain], seq_lens[is_plain]
        out[is_plain] = paged_attention_padded(q[is_plain], k_pool, v_pool, tables, lengths, scale=scale, window=None)
    states = []
    for (start, end), prefix_len in zip(pairwise(group_starts.tolist()), prefix_lens.tolist(), strict=True):
        if prefix_len and end > start:
            states.append(_attend_to_prefix(q[start:end], k_pool, v_pool, block_tables[start], prefix_len, scale))
    if states:
        prefix_out, prefix_lse = (torch.cat(parts) for parts in zip(*states, strict=True))
        shares = ~is_plain
        suffix_out, suffix_lse = _attend_to_suffixes(
            q[shares], k_pool, v_pool, block_tables[shares], own_prefixes[shares], seq_lens[shares], scale
        )
        out[shares] = merge_states(prefix_out, prefix_lse, suffix_out, suffix_lse)[0].to(q.dtype)
    return out


def _attend_to_prefix(
    q: Float[Tensor, "B H D"], k_pool: Tensor, v_pool: Tensor, table: Int[Tensor, " M"], prefix_len: int, scale: float
) -> tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:
    """Let all query heads of a group that share a KV head, of all its sequences, be the rows of one matrix product."""
    num_seqs, num_kv_heads = len(q), k_pool.shape[2]
    token = torch.arange(prefix_len, device=q.device)[None]
    keys, values = (_gather(pool, table[None], token)[0] for pool in (k_pool, v_pool))  # [K, L, D]
    grouped = q.view(num_seqs, num_kv_heads, -1, q.shape[2]).transpose(0, 1)  # [K, B, G, D]
    out, lse = _attend(grouped.flatten(1, 2), keys, values, scale)
    out, lse = (x.view(*grouped.shape[:3], *x.shape[2:]).transpose(0, 1) for x in (out, lse))  # [B, K, G, ...]
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_to_suffixes(
    q: Float[Tensor, "B H D"], k_pool: Tensor, v_pool: Tensor, block_tables: Int[Tensor, "B M"],
    prefix_lens: Int[Tensor, " B"], seq_lens: Int[Tensor, " B"], scale: float,
) -> tuple[Float[Tensor, "B H D"], Float[Tensor, "B H"]]:  # fmt: skip
    """Attend to the tokens behind each sequence's prefix, padded as in `paged_attention_padded`."""
    counts = (seq_lens - prefix_lens)[:, None]
    place = torch.arange(int(counts.max()), device=q.device)
    visible = place < counts  # [B, L]
    token = prefix_lens[:, None] + torch.where(visible, place, 0)
    keys, values = (_gather(pool, block_tables, token) for pool in (k_pool, v_pool))
    grouped = q.view(len(q), k_pool.shape[2], -1, q.shape[2])  # [B, K, G, D]
    out, lse = _attend(grouped, keys, values, scale, visible[:, None, None])
    return out.flatten(1, 2), lse.flatten(1, 2)


def _gather(
    pool: Float[Tensor, "N S K D"], tables: Int[Tensor, "B M"], token: Int[Tensor, "B L"]
) -> Float[Tensor, "B K L D"]:
    """Gather the named tokens of each sequence."""
    block_size = pool.shape[1]
    slots = tables.gather(1, token // block_size).long() * block_size + token % block_size
    rows = pool.view(-1, pool.shape[2] * pool.shape[3]).index_select(0, slots.flatten())
    return rows.view(*slots.shape, *pool.shape[2:]).transpose(1, 2)


def _attend(
    q: Float[Tensor, "*batch R D"],
    k: Float[Tensor, "*batch L D"],
    v: Float[Tensor, "*batch L D"],
    scale: float,
    visible: Bool[Tensor, "*batch 1 L"] | None = None,
) -> tuple[Float[Tensor, "*batch R D"], Float[Tensor, "*batch R"]]:
    """Return the attention of each row and the logarithm of its sum of ``exp(score)``, both in fp32."""
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.float(), lse
