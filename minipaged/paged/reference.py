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
    """Gather each sequence's blocks side by side, cut them at its length, and attend as over a dense row.

    Blocks that lie wholly before the window may have been given back, so they are left out.
    """
    block_size = k_pool.shape[1]
    out = q.new_zeros(q.shape)
    for row, length in enumerate(seq_lens.tolist()):
        if not length:
            continue
        first_block = 0 if window is None else max(0, length - window) // block_size
        block_ids = block_tables[row, first_block : -(-length // block_size)].long()
        length -= first_block * block_size
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
    """Gather the visible tokens of the whole batch, padded to the largest number of them, and attend in one call.

    Padding takes the sequence's first visible token: a masked weight is 0, and 0 times NaN would be NaN, so what stands
    there must be a number. The G query heads of a KV head are given as G query tokens of one head, so K and V are not
    repeated.
    """
    num_seqs, _, head_dim = q.shape
    block_size, num_kv_heads = k_pool.shape[1:3]
    num_visible = seq_lens if window is None else seq_lens.clamp(max=window)
    length = int(num_visible.max()) if num_seqs else 0
    if length == 0:
        return q.new_zeros(q.shape)
    place = torch.arange(length, device=q.device)
    visible = place < num_visible[:, None]  # [B, L]
    token = (seq_lens - num_visible)[:, None] + torch.where(visible, place, 0)
    block_ids = block_tables.gather(1, token // block_size).long()  # [B, L]
    slots = (block_ids * block_size + token % block_size).clamp(min=0).flatten()  # an empty row has no block

    def gather(pool: Tensor) -> Tensor:
        rows = pool.view(-1, num_kv_heads * head_dim).index_select(0, slots)  # [B * L, K * D]
        return rows.view(num_seqs, length, num_kv_heads, head_dim).transpose(1, 2)  # [B, K, L, D]

    grouped = q.reshape(num_seqs, num_kv_heads, -1, head_dim)  # [B, K, G, D]
    out = F.scaled_dot_product_attention(
        grouped, gather(k_pool), gather(v_pool), attn_mask=visible[:, None, None, :], scale=scale
    )
    is_empty = (seq_lens == 0)[:, None, None]
    return out.reshape(q.shape).masked_fill(is_empty, 0)
