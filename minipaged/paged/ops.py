"""Rung 2's operations: write new keys and values into slots, and attend through block tables."""

from minipaged.errors import UserError
from minipaged.paged import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part("write_slots", "(k, v, k_pool, v_pool, slot_mapping) -> None; writes the pools in place")
declare_part("paged_attention", "(q, k_pool, v_pool, block_tables, seq_lens, *, scale, window) -> [B, H, D]")


def write_slots(
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    slot_mapping: Int[Tensor, " T"],
    *,
    tier: Tier = None,
) -> None:
    """Write the keys and values of new tokens into the pool, in place.

    Args:
        k: Keys of the new tokens, any sequences in any order.
        v: Values, like the keys.
        k_pool: Keys of all blocks of one layer.
        v_pool: Values of all blocks of one layer.
        slot_mapping: The slot of each token, int64: block id x S + place in the block. -1 writes nowhere.

    Invariants:
        No slot stands twice in ``slot_mapping``. Every slot that is not named keeps its bits.

    Cost:
        Reads and writes ``2 * T * K * D`` numbers, whatever the size of the pool.

    Example:
        >>> import torch
        >>> k_pool, v_pool = torch.zeros(3, 4, 1, 1), torch.zeros(3, 4, 1, 1)
        >>> k = torch.tensor([1.0, 2.0]).view(2, 1, 1)
        >>> write_slots(k, -k, k_pool, v_pool, torch.tensor([10, -1]))
        >>> k_pool.flatten().tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """
    assert k.shape == v.shape and k_pool.shape == v_pool.shape and k.shape[1:] == k_pool.shape[2:]
    assert slot_mapping.shape == k.shape[:1]
    run_op(
        "write_slots",
        tier,
        k.device,
        reference.write_slots,
        "minipaged.paged.kernels:write_slots",
        k,
        v,
        k_pool,
        v_pool,
        slot_mapping,
    )


def paged_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    tier: Tier = None,
) -> Float[Tensor, "B H D"]:
    """Let the newest token of each sequence attend to all its tokens, which lie in blocks anywhere in the pool.

    Args:
        q: Queries of one token per sequence.
        k_pool: Keys of all blocks of one layer.
        v_pool: Values of all blocks of one layer.
        block_tables: The block ids of each sequence in order, int32, filled up with -1.
        seq_lens: Tokens in the cache, int32, the new one included: writes come before attention. A length of 0
            gives zeros.
        scale: Factor on the scores; None is ``D ** -0.5``.
        window: Only the last ``window`` tokens are visible; None shows all.

    Invariants:
        Only slots of a sequence's own tokens count; all others may hold anything, NaN too.

    Cost:
        Reads ``2 * sum(seq_lens) * K * D`` numbers of the pool and one block id per S tokens.

    Source:
        Kwon et al., SOSP 2023, section 4.1.

    Example:
        S = 4, table [2, 0], 5 tokens with equal scores and values 1 to 5: four in block 2, one in block 0.

        >>> import torch
        >>> v_pool = torch.full((3, 4, 1, 1), float("nan"))
        >>> v_pool[2, :, 0, 0], v_pool[0, 0, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0]), 5.0
        >>> k_pool, q = torch.zeros(3, 4, 1, 1), torch.zeros(1, 1, 1)
        >>> tables, lens = torch.tensor([[2, 0]]).int(), torch.tensor([5]).int()
        >>> round(paged_attention(q, k_pool, v_pool, tables, lens).item(), 4)
        3.0
    """
    num_seqs, num_heads, head_dim = q.shape
    assert k_pool.shape == v_pool.shape and k_pool.shape[3] == head_dim and num_heads % k_pool.shape[2] == 0
    assert block_tables.shape[0] == num_seqs and seq_lens.shape == (num_seqs,)
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1, not {window}")
    return run_op(
        "paged_attention",
        tier,
        q.device,
        reference.paged_attention_padded,
        "minipaged.paged.kernels:paged_attention",
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
    )
