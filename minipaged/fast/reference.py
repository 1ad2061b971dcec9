"""The operations of `fast` in plain PyTorch: the rungs' own, one after the other."""

import torch.nn.functional as F

from minipaged.foundation.reference import rms_norm, rotary, silu_mul
from minipaged.paged.reference import write_slots
from minipaged.shapes import Float, Int, Tensor


def skinny_linear(
    x: Float[Tensor, "T in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "T out"]:
    """Multiply in fp32 and round once; see `ops.skinny_linear`."""
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


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
) -> Float[Tensor, "T H D"]:
    """Take the packed rows apart, norm, turn and write; see `ops.norm_rotate_write`."""
    num_kv_heads, head_dim = k_pool.shape[2:]
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = _norm_heads(q, q_norm, eps), _norm_heads(k, k_norm, eps)
    q, k = rotary(q, k, cos, sin)
    write_slots(k, v, k_pool, v_pool, slot_mapping)
    return q


def silu_mul_packed(gate_up: Float[Tensor, "T 2F"]) -> Float[Tensor, "T F"]:
    """Take the packed rows apart; see `ops.silu_mul_packed`."""
    return silu_mul(*gate_up.chunk(2, dim=1))


def _norm_heads(x: Float[Tensor, "T heads D"], weight: Float[Tensor, " D"] | None, eps: float) -> Tensor:
    if weight is None:
        return x
    normed = rms_norm(x, weight, eps)  # every head is a row
    assert isinstance(normed, Tensor)
    return normed
