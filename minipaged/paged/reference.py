"""Rung 2's operations in plain PyTorch.

`paged_attention` is the loop to read and the oracle of all tests. `paged_attention_padded` does the same for the
whole batch at once; the torch tier runs it, because a loop over sequences is too slow for real use on a CPU.
"""

import torch
import torch.nn.functional as F

from minipaged.contiguous.reference import attend_one
from minipaged.shapes import UNUSED_SLOT, Float, Int, Tensor


def write_slots(
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    slot_mapping: Int[Tensor, " T"],
) -> None:
    """See each pool as one row of slots and write the tokens whose slot is not -1."""
    is_used = slot_mapping != UNUSED_SLOT
    if not is_used.all():
        slot_mapping, k, v = slot_mapping[is_used], k[is_used], v[is_used]
    for new, pool in ((k, k_pool), (v, v_pool)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slot_mapping, new)  # [N * S, K, D]


def paged_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H D"]:
    """Gather each sequence's blocks side by side, cut them at its length, and attend as over a dense row."""
    block_size = k_pool.shape[1]
    out = q.new_zeros(q.shape)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        block_ids = block_tables[row, : -(-length // block_size)].long()
        k = k_pool[block_ids].flatten(0, 1)[:length]  # [L, K, D]
        v = v_pool[block_ids].flatten(0, 1)[:length]
        out[row] = attend_one(q[row], k, v, scale, window)
    return out


def paged_attention_padded(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float,
    window: int | None,
) -> Float[Tensor, "B H D"]:
    """Gather the tokens of the whole batch, padded to the longest sequence, and attend in one call.

    Places behind a sequence's end take its first token: a masked weight is 0, and 0 times NaN would be NaN, so what
    stands there must be a number. The G query heads of a KV head are given as G query tokens of one head, so K and
    V are not repeated.
    """
    num_seqs, _, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    length = int(seq_lens.max()) if num_seqs else 0
    if length == 0:
        return q.new_zeros(q.shape)
    token = torch.arange(length, device=q.device)
    visible = token < seq_lens[:, None]  # [B, L]
    slots = block_tables[:, token // block_size].long() * block_size + token % block_size  # [B, L]
    slots = torch.where(visible, slots, slots[:, :1]).clamp(min=0).flatten()
    if window is not None:
        visible &= token >= seq_lens[:, None] - window

    def gather(pool: Tensor) -> Tensor:
        rows = pool.view(-1, num_kv_heads * head_dim).index_select(0, slots)  # [B * L, K * D]
        return rows.view(num_seqs, length, num_kv_heads, head_dim).transpose(1, 2)  # [B, K, L, D]

    grouped = q.reshape(num_seqs, num_kv_heads, -1, head_dim)  # [B, K, G, D]
    out = F.scaled_dot_product_attention(
        grouped, gather(k_pool), gather(v_pool), attn_mask=visible[:, None, None, :], scale=scale
    )
    is_empty = (seq_lens == 0)[:, None, None]
    return out.reshape(q.shape).masked_fill(is_empty, 0)
