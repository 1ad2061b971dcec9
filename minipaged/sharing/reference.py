"""Rung 3's operation in plain PyTorch."""

from minipaged.shapes import Float, Int, Tensor


def copy_blocks(pool: Float[Tensor, "N S K D"] | Float[Tensor, "layers 2 N S K D"], pairs: Int[Tensor, "P 2"]) -> None:
    """Take the source blocks of all planes out, and put them at their targets."""
    planes = pool.view(-1, *pool.shape[-4:])  # [planes, N, S, K, D]; a plane is K or V of one layer
    planes[:, pairs[:, 1]] = planes[:, pairs[:, 0]]
