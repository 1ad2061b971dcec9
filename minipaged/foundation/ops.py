"""What the decoder's own operations mean, which arguments they take, and which implementation runs.

Keyword ``tier`` chooses as `minipaged.tiers` describes. ``use(rms_norm=mine)`` puts a reader's function in the
place of an operation; it then gets the arguments below, without ``tier``.
"""

from typing import overload

from minipaged.errors import UserError
from minipaged.foundation import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part("rms_norm", "rms_norm(x [T E], weight [E], eps, residual=None [T E]) -> [T E], or two with a residual")
declare_part("rotary", "rotary(q [T H D], k [T K D], cos [T D/2], sin [T D/2]) -> (q, k) turned")
declare_part("silu_mul", "silu_mul(gate [T F], up [T F]) -> [T F]")
declare_part(
    "causal_attention",
    "causal_attention(q [T H D], k [T K D], v [T K D], query_starts [B+1], scale=None, window=None) -> [T H D]",
)


@overload
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: None = None, tier: Tier = None) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, tier: Tier = None
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Float[Tensor, "T E"],
    weight: Float[Tensor, " E"],
    eps: float,
    *,
    residual: Float[Tensor, "T E"] | None = None,
    tier: Tier = None,
) -> Float[Tensor, "T E"] | tuple[Float[Tensor, "T E"], Float[Tensor, "T E"]]:
    """Scale each row to root mean square 1, then each column by its weight.

    Args:
        eps: Added to the mean square, so that a row of zeros gives zeros.
        residual: Added to ``x`` first. One pass then does what stands between two sublayers anyway.

    Returns:
        The normed rows. With a residual also the sum, which is the next residual; the norm is taken of the sum as
        rounded to its dtype.

    Cost:
        Reads and writes each row once; a kernel saves one round trip per residual.

    Source:
        Root Mean Square Layer Normalization (arXiv 1910.07467).

    Example:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)  # root mean square 3.5355
        tensor([[ 0.8485, 11.3137]])
    """
    _check("rms_norm", weight.shape == x.shape[-1:], f"weight must have {x.shape[-1]} entries")
    if residual is not None:
        _check("rms_norm", residual.shape == x.shape, "residual must have the shape of x")
    return run_op(
        "rms_norm",
        tier,
        x.device,
        reference.rms_norm,
        "minipaged.foundation.kernels:rms_norm",
        x,
        weight,
        eps,
        residual=residual,
    )


def rotary(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    cos: Float[Tensor, "T D_half"],
    sin: Float[Tensor, "T D_half"],
    *,
    tier: Tier = None,
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"]]:
    """Turn queries and keys by their positions, so that their product depends on the distance alone.

    Args:
        cos: Cosine of each token's angle for each pair of entries; entry i pairs with entry i + D/2.

    Returns:
        New tensors. Values are not turned.

    Source:
        RoFormer (arXiv 2104.09864), in the half-split order of checkpoints on the Hugging Face hub.

    Example:
        >>> import torch
        >>> q = torch.tensor([[[1.0, 0.0]]])  # one token, one head of two entries
        >>> rotary(q, q, torch.tensor([[0.0]]), torch.tensor([[1.0]]))[0]  # a quarter turn
        tensor([[[0., 1.]]])
    """
    half = (q.shape[0], q.shape[2] // 2)
    _check("rotary", cos.shape == half and sin.shape == half, f"cos and sin must be {half}")
    _check("rotary", k.shape[::2] == q.shape[::2], "q and k must have the same tokens and head size")
    return run_op("rotary", tier, q.device, reference.rotary, "minipaged.foundation.kernels:rotary", q, k, cos, sin)


def silu_mul(gate: Float[Tensor, "T F"], up: Float[Tensor, "T F"], *, tier: Tier = None) -> Float[Tensor, "T F"]:
    """Gate the MLP: ``gate * sigmoid(gate) * up``.

    Source:
        GLU Variants Improve Transformer (arXiv 2002.05202), SwiGLU.

    Example:
        >>> import torch
        >>> silu_mul(torch.tensor([[0.0, 10.0]]), torch.tensor([[5.0, 2.0]]))
        tensor([[ 0.0000, 19.9991]])
    """
    _check("silu_mul", gate.shape == up.shape, "gate and up must have the same shape")
    return run_op("silu_mul", tier, gate.device, reference.silu_mul, "minipaged.foundation.kernels:silu_mul", gate, up)


def causal_attention(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "T K D"],
    v: Float[Tensor, "T K D"],
    query_starts: Int[Tensor, " B+1"],
    *,
    scale: float | None = None,
    window: int | None = None,
    tier: Tier = None,
) -> Float[Tensor, "T H D"]:
    """Let each token attend to itself and the tokens before it in its own sequence.

    Whole sequences lie one after the other along T, of different lengths, with no padding. Query head h reads
    KV head ``h // (H // K)``.

    Args:
        query_starts: Where each sequence begins, and T at the end: ``[0, 5, 7]`` is a sequence of 5 and one of 2.
        scale: Factor on the scores; None is ``D ** -0.5``.
        window: How many newest tokens a token sees, itself included; None is all.

    Invariants:
        A sequence's rows depend on no other sequence.

    Cost:
        Grows with the square of each length (with length x window where there is one), not with T squared.

    Example:
        >>> import torch
        >>> v = torch.tensor([[[2.0]], [[4.0]], [[9.0]]])  # sequences of two tokens and of one; every score is 0
        >>> causal_attention(0 * v, v, v, torch.tensor([0, 2, 3], dtype=torch.int32)).flatten()
        tensor([2., 3., 9.])
    """
    _check("causal_attention", k.shape == v.shape, "k and v must have the same shape")
    _check("causal_attention", k.shape[::2] == q.shape[::2], "q and k must have the same tokens and head size")
    _check("causal_attention", q.shape[1] % k.shape[1] == 0, "query heads must be a multiple of KV heads")
    _check("causal_attention", window is None or window >= 1, "window must be at least 1")
    torch_impl = reference.causal_attention_sdpa
    options = {"scale": scale, "window": window}
    return run_op(
        "causal_attention",
        tier,
        q.device,
        torch_impl,
        "minipaged.foundation.kernels:causal_attention",
        q,
        k,
        v,
        query_starts,
        **options,
    )


def _check(op: str, is_right: bool, rule: str) -> None:
    if not is_right:
        raise UserError(f"{op}: {rule}")
