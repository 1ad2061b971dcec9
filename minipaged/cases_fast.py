"""Named inputs for the operations above the rungs, for tests and benchmarks alike.

As in `minipaged.cases`, numbers are drawn on the CPU, and slots that nobody has written hold NaN.
"""

from dataclasses import dataclass

import torch

from minipaged.cases_ops import Device, RowCase, WriteCase, make_angles
from minipaged.shapes import Float, Tensor


@dataclass(frozen=True)
class SkinnyCase:
    """Few rows and a weight, as ``skinny_linear`` takes them."""

    name: str
    num_rows: int
    num_out: int
    num_in: int
    has_bias: bool = False

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: torch.dtype, device: Device = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments: results are about 1."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.num_rows, self.num_in, generator=generator)
        weight = torch.randn(self.num_out, self.num_in, generator=generator) * self.num_in**-0.5
        bias = torch.randn(self.num_out, generator=generator).to(device, dtype) if self.has_bias else None
        return x.to(device, dtype), weight.to(device, dtype), bias


SKINNY_CASES = (
    SkinnyCase("one-row", 1, 64, 128),
    SkinnyCase("sixteen-rows", 16, 64, 128),
    SkinnyCase("one-entry", 2, 1, 1),
    SkinnyCase("bias", 3, 40, 64, has_bias=True),
    SkinnyCase("odd-sizes", 5, 33, 101, has_bias=True),
    SkinnyCase("hidden-576", 4, 40, 576),
    SkinnyCase("one-step", 7, 24, 1024),
    SkinnyCase("one-step-and-one-entry", 7, 24, 1025),
    SkinnyCase("two-steps-in-part", 2, 17, 1536),
    SkinnyCase("many-steps", 9, 17, 4100, has_bias=True),
)


GATE_UP_CASES = (
    RowCase("one-row", 1, 64),
    RowCase("one-column-each", 3, 2),
    RowCase("odd-halves", 5, 202),
    RowCase("tile-each", 2, 2048),
    RowCase("tile-each-and-one-entry", 2, 2050),
    RowCase("wider-than-two-tiles", 3, 5000),
)
"""Rows of two halves, gate and up, as ``silu_mul_packed`` takes them."""


@dataclass(frozen=True)
class PackedCase(WriteCase):
    """Packed rows of q, k and v and a pool to write to, as ``norm_rotate_write`` takes them."""

    num_heads: int = 4
    has_norm: bool = True

    def __str__(self) -> str:
        return self.name

    def make_packed(
        self, dtype: torch.dtype, device: Device = "cpu"
    ) -> tuple[
        Float[Tensor, "T (H+2K)*D"], Tensor | None, Tensor | None, float, Tensor, Tensor, Tensor, Tensor, Tensor
    ]:
        """Return the positional arguments; ``num_heads`` is the case's. Heads are of different lengths."""
        _, _, k_pool, v_pool, slots = self.make(dtype, device)
        generator = torch.Generator().manual_seed(1)
        heads = torch.randn(self.num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim, generator=generator)
        heads *= torch.rand(*heads.shape[:2], 1, generator=generator) * 4
        norms = [1 + torch.rand(self.head_dim, generator=generator) for _ in range(2)]
        q_norm, k_norm = (norm.to(device, dtype) if self.has_norm else None for norm in norms)
        cos, sin = make_angles(self.num_tokens, self.head_dim, device)
        return heads.flatten(1).to(device, dtype), q_norm, k_norm, 1e-6, cos, sin, k_pool, v_pool, slots


PACKED_CASES = (
    PackedCase("one-token", 1),
    PackedCase("no-norm", 5, has_norm=False),
    PackedCase("some-skipped", 9, num_skipped=4),
    PackedCase("all-skipped", 3, num_skipped=3),
    PackedCase("block-of-1", 3, block_size=1),
    PackedCase("block-of-5", 7, block_size=5),
    PackedCase("heads-16-8-128", 3, num_heads=16, num_kv_heads=8, head_dim=128),
    PackedCase("heads-9-3-64", 3, num_heads=9, num_kv_heads=3, head_dim=64),
    PackedCase("heads-12-12-80", 2, num_heads=12, num_kv_heads=12, head_dim=80),
    PackedCase("heads-32-32-96", 2, num_heads=32, num_kv_heads=32, head_dim=96, has_norm=False),
    PackedCase("heads-71-1-64", 2, num_heads=71, num_kv_heads=1, head_dim=64),
    PackedCase("heads-8-4-256", 2, num_heads=8, num_kv_heads=4, head_dim=256, num_skipped=1),
)
