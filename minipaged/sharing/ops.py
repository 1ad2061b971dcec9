"""Rung 3's operation: copy whole blocks inside the pool."""

from minipaged.shapes import Float, Int, Tensor
from minipaged.sharing import reference
from minipaged.tiers import Tier, declare_part, run_op

declare_part("copy_blocks", "(pool, pairs) -> None; copies blocks inside the pool, in place")


def copy_blocks(
    pool: Float[Tensor, "N S K D"] | Float[Tensor, "layers 2 N S K D"], pairs: Int[Tensor, "P 2"], *, tier: Tier = None
) -> None:
    """Copy blocks inside the pool, in place.

    Args:
        pool: One layer's K or V, or everything: keys and values of all layers move in one launch.
        pairs: (from, to) block ids, int64.

    Invariants:
        No target stands twice, and no target is also a source: the copies may run in any order. All other blocks
        keep their bits.

    Cost:
        Reads and writes ``P * S * K * D`` numbers a plane, 2 x layers planes.

    Example:
        >>> import torch
        >>> pool = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1)
        >>> copy_blocks(pool, torch.tensor([[0, 2]]))
        >>> pool.flatten().tolist()
        [1.0, 2.0, 1.0]
    """
    assert pool.ndim in (4, 6) and pairs.ndim == 2 and pairs.shape[1] == 2, (pool.shape, pairs.shape)
    run_op(
        "copy_blocks", tier, pool.device, reference.copy_blocks, "minipaged.sharing.kernels:copy_blocks", pool, pairs
    )
