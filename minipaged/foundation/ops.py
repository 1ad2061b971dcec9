"""What the decoder's own operations mean, which arguments they take, and which implementation runs.

Keyword ``tier`` chooses as `minipaged.tiers` describes. ``use(rms_norm=mine)`` puts a reader's function in the
place of an operation; it then gets the arguments below, without ``tier`` and with ``scale`` always a number.
"""

from typing import overload

from minipaged.errors import UserError
from minipaged.foundation import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part("rms_norm", "(x [T E], weight [E], eps, *, residual) -> [T E], or two with a residual")
declare_part("rotary", "(q [T H D], k [T K D], cos [T D/2], sin [T D/2]) -> (q, k) turned")
declare_part("silu_mul", "(gate [T F], up [T F]) -> [T F]")
declare_part(
    "causal_attention",
    "(q [T H D], k [T K D], v [T K D], query_starts [B+1], *, scale, window) -> [T H D]",
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
        x: One row per token, or per token and head where single heads are normed.
        weight: One factor per column.
        eps: Added to the mean square, so that a row of zeros gives zeros.
        residual: Added to ``x`` first. One pass then does what stands between two sublayers anyway.

    Returns:
        The normed rows. With a residual also the sum, which is the next residual; the norm is taken of the sum as
        rounded to its dtype.

    Raises:
        UserError: The shapes do not fit together.

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
        q: Queries. Entry i of a head pairs with entry i + D/2.
        k: Keys of the same tokens.
        cos: Cosine of each token's angle for each pair of entries, in the dtype of q or in fp32.
        sin: Sine of the same angles.

    Returns:
        New tensors. Values are not turned.

    Raises:
        UserError: The shapes do not fit together.

    Cost:
        Reads and writes every query and key once; all heads of a token share its angles.

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

    Args:
        gate: One row per token, as wide as the MLP.
        up: What is let through.

    Raises:
        UserError: The shapes differ.

    Cost:
        Reads two rows and writes one per token; a kernel keeps the gated row out of memory until it is whole.

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
        q: Queries of all tokens.
        k: Keys of the same tokens.
        v: Values, like the keys.
        query_starts: Where each sequence begins, and T at the end, int32: ``[0, 5, 7]`` is a sequence of 5 and one
            of 2.
        scale: Factor on the scores; None is ``D ** -0.5``.
        window: How many newest tokens a token sees, itself included; None is all.

    Raises:
        UserError: The shapes do not fit together, or the window is below 1.

    Invariants:
        A sequence's rows depend on no other sequence.

    Cost:
        Grows with the square of each length (with length x window where there is one), not with T squared.

    Source:
        Attention Is All You Need (arXiv 1706.03762), section 3.2.1; KV heads shared by groups of query heads as in
        GQA (arXiv 2305.13245); the window as in Mistral 7B (arXiv 2310.06825).

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
    return run_op(
        "causal_attention",
        tier,
        q.device,
        reference.causal_attention_sdpa,
        "minipaged.foundation.kernels:causal_attention",
        q,
        k,
        v,
        query_starts,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
    )


def _check(op: str, is_right: bool, rule: str) -> None:
    if not is_right:
        raise UserError(f"{op}: {rule}")
