"""Matrices laid out once as the processor's instructions for bfloat16 want them.

oneDNN, which multiplies for PyTorch on a CPU, needs a weight cut into small tiles. From an ordinary matrix it makes
the tiles anew in every call. With many rows of input that does not matter; with the few rows of a decode step it
costs as much as the product.
"""

import torch

from minipaged.shapes import Float, Tensor


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether packing is possible here and pays: bfloat16, on a CPU that multiplies it natively."""
    if dtype != torch.bfloat16 or device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def pack(weight: Tensor) -> Tensor:
    """Return a matrix in tiles, and a vector as a copy, so that neither keeps the mapped file in memory.

    A packed matrix has its shape and dtype, and ``to_dense()`` gives it back; nothing else reads it but
    `packed_linear`.
    """
    if weight.dim() == 2:
        return torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return weight.clone()


def packed_linear(
    x: Float[Tensor, "T in"], weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "T out"]:
    """Return ``x @ weight.T + bias`` for a packed weight."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
