"""The decoder with fewer and larger launches: q, k and v from one product, gate and up from another.

A layer of the rungs makes 15 launches where heads are normed, this one 9::

    norm, q, k, v products, norm of q, norm of k, rotary, write, attention, o product,      the rungs
    norm, gate, up products, silu x gate, down product
    norm, qkv product, norm + rotary + write, attention, o product,                         fused
    norm, gate-up product, silu x gate, down product

Up to 16 rows the products are `skinny_linear`, which streams the weights once; above that cuBLAS does.

Cost:
    No memory in the end: the weights move into the packed matrices, and the rungs' model keeps views of them. While
    they move, one matrix is there twice.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from minipaged.batching.generate import Read
from minipaged.batching.rows import Rows
from minipaged.fast.ops import MAX_SKINNY_ROWS, norm_rotate_write, silu_mul_packed, skinny_linear
from minipaged.foundation.model import DecoderModel, Layer, Linear
from minipaged.shapes import Float, Tensor

SWALLOWED = ("rms_norm", "rotary", "silu_mul", "write_slots")
"""The rungs' operations whose work a step of this model does itself, in other operations or in other shapes."""


class FusedModel:
    """A decoder's weights, packed, and the same computation.

    Args:
        model: Its layers are replaced by views of the packed weights.

    Invariants:
        ``model.forward`` goes on to work, and gives the bits that it gave before.
    """

    def __init__(self, model: DecoderModel) -> None:
        self.model = model
        self.is_skinny = model.device.type == "cuda" and model.tier != "torch"
        self.qkv = [self._pack(i, "self_attn", ("q_proj", "k_proj", "v_proj")) for i in range(len(model.layers))]
        self.gate_up = [self._pack(i, "mlp", ("gate_proj", "up_proj")) for i in range(len(model.layers))]

    def forward(self, rows: Rows, kv: Float[Tensor, "layers 2 N S K D"], read: Read) -> Float[Tensor, "R V"]:
        """Run a step's rows through all layers and return the logits of ``rows.logits_at``.

        Args:
            rows: The tokens, and where their keys and values go.
            kv: The cache, written in place.
            read: The attention of the rows, see `Read`.
        """
        model = self.model
        cos, sin = model.rotary_angles(rows.positions)
        x, residual = F.embedding(rows.token_ids, model.embedding), None  # [T, E]
        for i, layer in enumerate(model.layers):
            x, residual = model.norm(x, layer.input_norm, residual)
            q = self._write(i, layer, self.multiply(x, self.qkv[i]), cos, sin, kv, rows)
            x = self.multiply(read(i, q).flatten(1), layer.o_proj)
            x, residual = model.norm(x, layer.post_attention_norm, residual)
            gated = silu_mul_packed(self.multiply(x, self.gate_up[i]), tier=model.tier)
            x = self.multiply(gated, layer.down_proj)
        if rows.logits_at is not None:
            x = x[rows.logits_at]  # [R, E]
            residual = residual[rows.logits_at] if residual is not None else None
        x, _ = model.norm(x, model.final_norm, residual)
        return self.multiply(x, model.output)  # [R, V]

    def kernel_calls(self, kv: Float[Tensor, "layers 2 N S K D"], rows: Rows) -> list[Callable[[], object]]:
        """Return calls that launch this model's own kernels, for one row that is nobody's."""
        layer, config = self.model.layers[0], self.model.config

        def zeros(width: int) -> Tensor:
            return torch.zeros(1, width, dtype=self.model.dtype, device=self.model.device)

        qkv, gate_up = (zeros(len(packed.weight)) for packed in (self.qkv[0], self.gate_up[0]))
        angles = torch.zeros(1, config.head_dim // 2, device=self.model.device)
        linears = {each.weight.shape: each for each in (self.qkv[0], layer.o_proj, self.gate_up[0], layer.down_proj)}
        linears[self.model.output.weight.shape] = self.model.output
        products = [partial(self.multiply, zeros(shape[1]), each) for shape, each in linears.items()]
        return [
            *products,
            lambda: self._write(0, layer, qkv, angles, angles, kv, rows),
            lambda: silu_mul_packed(gate_up, tier=self.model.tier),
        ]

    def multiply(self, x: Float[Tensor, "T in"], linear: Linear) -> Float[Tensor, "T out"]:
        """Return the product, by the kernel for few rows where there are few."""
        if self.is_skinny and len(x) <= MAX_SKINNY_ROWS:
            return skinny_linear(x, linear.weight, linear.bias, tier=self.model.tier)
        return linear(x)

    def _write(
        self, i: int, layer: Layer, qkv: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, rows: Rows
    ) -> Float[Tensor, "T H D"]:
        """Norm and turn the heads, write keys and values, and return the queries."""
        config = self.model.config
        norms, (k_pool, v_pool) = (layer.q_norm, layer.k_norm, config.rms_norm_eps), kv[i]
        tier, num_heads = self.model.tier, config.num_heads
        return norm_rotate_write(qkv, *norms, cos, sin, k_pool, v_pool, rows.slots, num_heads=num_heads, tier=tier)

    def _pack(self, i: int, block: str, names: tuple[str, ...]) -> Linear:
        """Return one matrix product for several of the same rows, and make each of them a view of it."""
        parts: list[Linear] = [getattr(self.model.layers[i], name) for name in names]
        sizes = [len(part.weight) for part in parts]
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts)), "some of the products have a bias and some have none"
        whole = Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
        weights = whole.weight.split(sizes)
        own = [None] * len(parts) if whole.bias is None else whole.bias.split(sizes)
        views = {name: Linear(weight, bias) for name, weight, bias in zip(names, weights, own, strict=True)}
        self.model.layers[i] = replace(self.model.layers[i], **views)
        for name, view in views.items():
            named = {"weight": view.weight} if view.bias is None else {"weight": view.weight, "bias": view.bias}
            self.model.weights |= {f"model.layers.{i}.{block}.{name}.{kind}": each for kind, each in named.items()}
        return whole
