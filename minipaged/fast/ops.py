"""Operations that stand for several of the rungs' own, or for one of them at the small sizes of a decode step."""

from minipaged.errors import UserError
from minipaged.fast import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, declare_part, run_op

declare_part("skinny_linear", "(x [T in], weight [out in], bias [out] or None) -> [T out], T up to 16")
declare_part(
    "norm_rotate_write",
    "(qkv [T (H+2K)*D], q_norm, k_norm, eps, cos, sin, k_pool, v_pool, slot_mapping, *, num_heads) -> q [T H D]; "
    "writes the pools in place",
)
declare_part("silu_mul_packed", "(gate_up [T 2F]) -> [T F], the first F columns of each row are the gate")

MAX_SKINNY_ROWS = 16
"""Rows of one matrix instruction. With more, an ordinary matrix product keeps up."""


def skinny_linear(
    x: Float[Tensor, "T in"],
    weight: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None = None,
    *,
    tier: Tier = None,
) -> Float[Tensor, "T out"]:
    """Return ``x @ weight.T + bias`` for few rows, where all the time goes into reading the weight.

    Args:
        x: At most `MAX_SKINNY_ROWS` rows, on every tier. With more, call ``torch.nn.functional.linear``.
        weight: One row per column of the result.
        bias: Added in fp32, before the result is rounded.

    Raises:
        UserError: The shapes do not fit together, or there are too many rows.

    Invariants:
        A row's bits depend on no other row, nor on how many there are: sums are taken in fp32, in an order that
        follows from the shape of the weight alone, and rounded once.
        On GPUs from 9.0 on, the kernel reads the weight while launches before it may still be running: none of those
        that start early, one after the other, before it may write the weight.

    Cost:
        Reads the weight once.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]])
        >>> skinny_linear(torch.tensor([[10.0, 1.0]]), weight, torch.tensor([0.0, 0.5, 0.0]))
        tensor([[12.0000, -0.5000, 30.0000]])
    """
    is_right = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1]
    _check("skinny_linear", is_right, "x must have as many columns as the weight")
    _check("skinny_linear", bias is None or bias.shape == weight.shape[:1], "bias must have an entry per row of weight")
    too_many = f"takes up to {MAX_SKINNY_ROWS} rows, not {x.shape[0]}; use torch.nn.functional.linear"
    _check("skinny_linear", x.shape[0] <= MAX_SKINNY_ROWS, too_many)
    return run_op(
        "skinny_linear",
        tier,
        x.device,
        reference.skinny_linear,
        "minipaged.fast.kernels:skinny_linear",
        x,
        weight,
        bias,
    )


def norm_rotate_write(
    qkv: Float[Tensor, "T (H+2K)*D"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    eps: float,
    cos: Float[Tensor, "T D_half"],
    sin: Float[Tensor, "T D_half"],
    k_pool: Float[Tensor, "N S K D"],
    v_pool: Float[Tensor, "N S K D"],
    slot_mapping: Int[Tensor, " T"],
    *,
    num_heads: int,
    tier: Tier = None,
) -> Float[Tensor, "T H D"]:
    """Do all that stands between the product for q, k and v and attention: norms of heads, rotary, cache write.

    Args:
        qkv: The packed rows of the product: H heads of queries, then K of keys, then K of values.
        q_norm: Weight of the RMS norm of each query head; None leaves queries as they are.
        k_norm: The same for keys.
        eps: Of both norms.
        cos: Cosine of each token's angle for each pair of entries, in fp32.
        sin: Sine of the same angles.
        k_pool: Keys of all blocks of one layer, written in place.
        v_pool: Values of all blocks of one layer, written in place.
        slot_mapping: The slot of each token, int64. -1 writes nowhere.
        num_heads: H. K and D follow from the pools.

    Returns:
        The queries, normed and turned, for tokens without a slot too.

    Raises:
        UserError: The shapes do not fit together.

    Invariants:
        No slot stands twice in ``slot_mapping``. Every slot that is not named keeps its bits. In both tiers the result
        has the bits of that tier's ``rms_norm``, ``rotary`` and ``write_slots`` one after the other: the normed heads
        are rounded before they are turned.

    Cost:
        Reads each packed row once and writes as many numbers. The separate operations read and write queries and keys
        three times, and first take the packed row apart.

    Example:
        One token, one head of two entries each for q, k and v; a quarter turn; slot 2.

        >>> import torch
        >>> k_pool, v_pool = torch.zeros(1, 4, 1, 2), torch.zeros(1, 4, 1, 2)
        >>> qkv, cos, sin = torch.tensor([[1.0, 0.0, 0.0, 2.0, 5.0, 6.0]]), torch.zeros(1, 1), torch.ones(1, 1)
        >>> norm_rotate_write(qkv, None, None, 1e-6, cos, sin, k_pool, v_pool, torch.tensor([2]), num_heads=1)
        tensor([[[0., 1.]]])
        >>> k_pool[0, 2].tolist(), v_pool[0, 2].tolist()
        ([[-2.0, 0.0]], [[5.0, 6.0]])
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, head_dim = k_pool.shape[2:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    op = "norm_rotate_write"
    _check(op, qkv.shape == (num_tokens, width), f"qkv must have {width} columns")
    _check(
        op, all(w is None or w.shape == (head_dim,) for w in (q_norm, k_norm)), f"norms must have {head_dim} entries"
    )
    half = (num_tokens, head_dim // 2)
    _check(op, cos.shape == half and sin.shape == half and head_dim % 2 == 0, f"cos and sin must be {half}")
    _check(op, k_pool.shape == v_pool.shape, "k_pool and v_pool must have the same shape")
    _check(op, slot_mapping.shape == (num_tokens,), f"slot_mapping must have {num_tokens} entries")
    return run_op(
        op,
        tier,
        qkv.device,
        reference.norm_rotate_write,
        "minipaged.fast.kernels:norm_rotate_write",
        qkv,
        q_norm,
        k_norm,
        eps,
        cos,
        sin,
        k_pool,
        v_pool,
        slot_mapping,
        num_heads=num_heads,
    )


def silu_mul_packed(gate_up: Float[Tensor, "T 2F"], *, tier: Tier = None) -> Float[Tensor, "T F"]:
    """Return ``silu(gate) * up`` of the rows of one product, of which gate is the first half and up the second.

    Raises:
        UserError: The rows have no halves.

    Invariants:
        The bits are those of ``silu_mul`` of the two halves.

    Example:
        >>> import torch
        >>> silu_mul_packed(torch.tensor([[0.0, 100.0, 5.0, 3.0]]))
        tensor([[  0., 300.]])
    """
    _check("silu_mul_packed", gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, "gate_up must be rows of even length")
    kernel = "minipaged.fast.kernels:silu_mul_packed"
    return run_op("silu_mul_packed", tier, gate_up.device, reference.silu_mul_packed, kernel, gate_up)


def _check(op: str, is_right: bool, rule: str) -> None:
    if not is_right:
        raise UserError(f"{op}: {rule}")
