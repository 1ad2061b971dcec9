"""The letters that name tensor axes in the whole project.

Signatures write a shape as a string of these letters, for example ``Float[Tensor, "N S K D"]`` for a block pool;
comments write it as ``# [N, S, K, D]``. Kernels spell the constants out: ``SLOTS``, ``NUM_KV_HEADS``, ``HEAD_DIM``.

======  =============================================  ======  =============================================
letter  meaning                                        letter  meaning
======  =============================================  ======  =============================================
B       sequences in the batch                         N       blocks in the pool
T       new tokens, flattened over the batch           S       slots in a block (the block size)
L       cached tokens of one sequence                  M       width of the block tables
H       query heads                                    E       width of the model (hidden size)
K       KV heads                                       F       width of the MLP (intermediate size)
G       query heads per KV head, H // K                V       vocabulary
D       size of one head                               R       rows whose logits are wanted
W       living beams of one request                    P       pairs of blocks, (from, to)
C       tokens that may still be chosen
======  =============================================  ======  =============================================

jaxtyping reads a one-letter axis only with a leading space, so a vector over sequences is ``Int[Tensor, " B"]``.
"""

from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor", "UNUSED_BLOCK", "UNUSED_SLOT"]

UNUSED_BLOCK = -1
"""Fills a block table behind a sequence's last block, on the device only; Python code uses None."""

UNUSED_SLOT = -1
"""A token with this slot is written nowhere."""
