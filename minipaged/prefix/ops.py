"""Rung 5's operation: decode attention that reads the common beginning of several sequences once for all of them."""

from minipaged.prefix import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part(
    "shared_prefix_attention",
    "(q, k_pool, v_pool, block_tables, seq_lens, group_starts, prefix_lens, *, scale) -> [B, H, D]",
)

SHARED_UNIT = 1024
"""In the Triton tier, a shared prefix is so many tokens long, or a multiple: decode's sums are cut there anyway."""


def shared_prefix_attention(
    q: Float[Tensor, "B H D"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    block_tables: Int[Tensor, "B M"],
    seq_lens: Int[Tensor, " B"],
    group_starts: Int[Tensor, " groups+1"],
    prefix_lens: Int[Tensor, " groups"],
    *,
    scale: float | None = None,
    tier: Tier = None,
) -> Float[Tensor, "B H D"]:
    """Let the newest token of each sequence attend to all its tokens, as `paged_attention`, in groups that share some.

    Args:
        q: Queries of one token per sequence; the sequences of a group stand side by side.
        k_pool: Keys of all blocks of one layer.
        v_pool: Values of all blocks of one layer.
        block_tables: The block ids of each sequence in order, int32, filled up with -1.
        seq_lens: Tokens in the cache, int32, the new one included.
        group_starts: Which sequence each group begins with, and where the last group ends, which is B, int32.
        prefix_lens: How many tokens at the beginning the sequences of each group share, int32: their tables name the
            same blocks there. 0 for sequences that share nothing, otherwise less than every length of the group. In
            the Triton tier, a multiple of `SHARED_UNIT`.

    Returns:
        What ``paged_attention`` returns without a window.

    Invariants:
        Only slots of a sequence's own tokens count; all others may hold anything, NaN too.
        In the Triton tier the bits are those of ``paged_attention``, however the sequences are grouped.

    Cost:
        Reads the keys and values of a prefix once per tile of its group's query heads, and those of all other tokens
        once per sequence. In the Triton tier, the sums over each piece of a prefix are written down and read again:
        ``2 * H * (D + 2)`` fp32 numbers per sequence and piece. There are 8 in the first 1,024 tokens, then one every
        512.

    Source:
        Hydragen (arXiv 2402.05099) makes one matrix product of a shared prefix; ChunkAttention (arXiv 2402.15220)
        does it over a cache in pieces.

    Example:
        S = 4; scores are equal, so a result is the mean of the visible values. Two sequences share block 7 and go on
        in blocks 2 and 3. The third has block 5 to itself.

        >>> import torch
        >>> v_pool = torch.full((8, 4, 1, 1), float("nan"))
        >>> v_pool[7, :, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> v_pool[2, 0], v_pool[3, :2, 0, 0], v_pool[5, 0] = 5.0, torch.tensor([8.0, 9.0]), 6.0
        >>> q, k_pool = torch.zeros(3, 1, 1), torch.zeros(8, 4, 1, 1)
        >>> tables, lens = torch.tensor([[7, 2], [7, 3], [5, -1]]).int(), torch.tensor([5, 6, 1]).int()
        >>> starts, prefixes = torch.tensor([0, 2, 3]).int(), torch.tensor([4, 0]).int()
        >>> out = shared_prefix_attention(q, k_pool, v_pool, tables, lens, starts, prefixes)
        >>> [round(x, 4) for x in out.flatten().tolist()]
        [3.0, 4.5, 6.0]
    """
    num_seqs, num_heads, head_dim = q.shape
    assert k_pool.shape == v_pool.shape and k_pool.shape[3] == head_dim and num_heads % k_pool.shape[2] == 0
    assert block_tables.shape[0] == num_seqs and seq_lens.shape == (num_seqs,)
    assert prefix_lens.dim() == 1 and group_starts.shape == (len(prefix_lens) + 1,)
    return run_op(
        "shared_prefix_attention",
        tier,
        q.device,
        reference.shared_prefix_attention_merged,
        "minipaged.prefix.kernels:shared_prefix_attention",
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        group_starts,
        prefix_lens,
        scale=head_dim**-0.5 if scale is None else scale,
    )
