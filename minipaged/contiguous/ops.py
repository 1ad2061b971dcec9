"""Rung 1's operation: attention of one new token per sequence over a dense row of keys and values."""

from minipaged.contiguous import reference
from minipaged.errors import UserError
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part("contiguous_attention", "(q, k, v, seq_lens, *, scale, window) -> [B, H, D]")


def contiguous_attention(
    q: Float[Tensor, "B H D"],
    k: Float[Tensor, "B L K D"],
    v: Float[Tensor, "B L K D"],
    seq_lens: Int[Tensor, " B"],
    *,
    scale: float | None = None,
    window: int | None = None,
    tier: Tier = None,
) -> Float[Tensor, "B H D"]:
    """Let the newest token of each sequence attend to its row.

    Args:
        q: Queries of one token per sequence.
        k: Keys, a row per sequence. Row b is written up to ``seq_lens[b]``, the new token included.
        v: Values, like the keys.
        seq_lens: Tokens in the cache, int32. 0 marks an empty row; it gives zeros.
        scale: Factor on the scores; None is ``D ** -0.5``.
        window: Only the last ``window`` tokens are visible; None shows all.

    Invariants:
        Slots at and behind ``seq_lens`` may hold anything, NaN too; they are never used. A row's result does not
        depend on the other rows.

    Cost:
        Reads ``2 * sum(seq_lens) * K * D`` numbers; everything else is small.

    Example:
        Two keys with equal scores share the weight, so values 1 and 3 give 2; the NaN behind them is not seen:

        >>> import torch
        >>> q, k = torch.zeros(1, 1, 1), torch.zeros(1, 3, 1, 1)
        >>> v = torch.tensor([1.0, 3.0, float("nan")]).view(1, 3, 1, 1)
        >>> contiguous_attention(q, k, v, torch.tensor([2], dtype=torch.int32)).item()
        2.0
    """
    num_seqs, num_heads, head_dim = q.shape
    assert k.shape == v.shape and k.shape[0] == num_seqs and k.shape[3] == head_dim, (
        q.shape,
        k.shape,
        v.shape,
    )
    assert num_heads % k.shape[2] == 0 and seq_lens.shape == (num_seqs,)
    if window is not None and window < 1:
        raise UserError(f"window must be at least 1, not {window}")
    return run_op(
        "contiguous_attention",
        tier,
        q.device,
        reference.contiguous_attention,
        "minipaged.contiguous.kernels:contiguous_attention",
        q,
        k,
        v,
        seq_lens,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
    )
