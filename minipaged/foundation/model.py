"""The decoder: Llama, Qwen2, Qwen3 and Mistral in one file.

    token ids -> embedding -> [ norm -> attention -> + -> norm -> MLP -> + ] x layers -> norm -> output matrix

Tokens of all sequences lie flat along one axis T; which sequence a token belongs to, and where its keys and values
are kept, is known only to the ``attend`` function that the caller passes in. So one model serves every rung.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.nn.functional as F

from minipaged.foundation.config import ModelConfig
from minipaged.foundation.ops import rms_norm, rotary, silu_mul
from minipaged.foundation.packing import packed_linear
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T H D], k [T K D], v [T K D]) -> [T H D].

Queries and keys come already turned by their positions. It stores the new keys and values where it wants them, and
returns each token's attention over all it may see, with the layer's window if `ModelConfig.layer_windows` has one.
"""


@dataclass(frozen=True)
class Linear:
    """A matrix product with an optional bias. The weight may be packed: see `minipaged.foundation.packing`."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, " out"] | None

    def __call__(self, x: Float[Tensor, "T in"]) -> Float[Tensor, "T out"]:
        """Return ``x @ weight.T + bias``."""
        product = packed_linear if self.weight.is_mkldnn else F.linear
        return product(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """The weights of one decoder layer."""

    input_norm: Float[Tensor, " E"]
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Float[Tensor, " D"] | None
    k_norm: Float[Tensor, " D"] | None
    post_attention_norm: Float[Tensor, " E"]
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a checkpoint of this config must hold.

    A tied model has no ``lm_head.weight``: its output matrix is the embedding.
    """
    hidden = config.hidden_size
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if config.has_qk_norm:
        shapes |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    for name, num_out, num_in, has_bias in (
        ("self_attn.q_proj", q_size, hidden, config.has_qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.has_qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.has_qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.has_output_bias),
        ("mlp.gate_proj", inner, hidden, config.has_mlp_bias),
        ("mlp.up_proj", inner, hidden, config.has_mlp_bias),
        ("mlp.down_proj", hidden, inner, config.has_mlp_bias),
    ):
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)
    return shapes


class DecoderModel:
    """A checkpoint's weights and the computation from token ids to logits.

    Args:
        weights: Exactly the tensors of `weight_shapes`, of one dtype on one device. They are kept, not copied.

    Invariants:
        No state changes between calls: the same input gives the same output, whatever ran before.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], tier: Tier = None) -> None:
        """Take the weights to their places. Nothing is computed but the rotary frequencies."""
        self.config = config
        self.weights = dict(weights)
        self.tier: Tier = tier
        self.embedding = weights["model.embed_tokens.weight"]
        self.final_norm = weights["model.norm.weight"]
        # A tied model has none of its own, unless the embedding was packed for this use too.
        self.output_matrix = weights.get("lm_head.weight", self.embedding)
        self.output = Linear(self.output_matrix, bias=None)
        self.layers = [_make_layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.inverse_frequencies = config.rope.inverse_frequencies(config.head_dim).to(self.device)

    def forward(
        self,
        token_ids: Int[Tensor, " T"],
        positions: Int[Tensor, " T"],
        attend: Attend,
        logits_at: Int[Tensor, " R"] | None = None,
    ) -> Float[Tensor, "R V"]:
        """Run tokens through all layers and return logits.

        Args:
            positions: Each token's place in its own sequence, counted from 0.
            attend: Called once per layer, in order.
            logits_at: Rows of T whose logits are wanted, all if None. The output matrix is the largest of a
                small model, so a prefill asks for the last row of each sequence alone.

        Cost:
            Reads every weight once, however many tokens there are: this is why batches pay.
        """
        cos, sin = self.rotary_angles(positions)
        x, residual = F.embedding(token_ids, self.embedding), None  # [T, E]
        for i, layer in enumerate(self.layers):
            x, residual = self.norm(x, layer.input_norm, residual)
            x = self._attention(i, layer, x, cos, sin, attend)
            x, residual = self.norm(x, layer.post_attention_norm, residual)
            x = layer.down_proj(silu_mul(layer.gate_proj(x), layer.up_proj(x), tier=self.tier))
        if logits_at is not None:
            x = x[logits_at]  # [R, E]
            residual = residual[logits_at] if residual is not None else None
        x, _ = self.norm(x, self.final_norm, residual)
        return self.output(x)  # [R, V]

    def rotary_angles(
        self, positions: Int[Tensor, " T"]
    ) -> tuple[Float[Tensor, "T D_half"], Float[Tensor, "T D_half"]]:
        """Return cos and sin for each token, in fp32. Computed, not looked up: no table can run out in a long chat."""
        angles = positions.float()[:, None] * self.inverse_frequencies  # [T, D/2]
        factor = self.config.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def norm(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the residual and norm the sum; return the normed rows and the next residual."""
        if residual is None:  # the first norm of a forward pass: the embedding itself starts the residual
            return rms_norm(x, weight, self.config.rms_norm_eps, tier=self.tier), x
        return rms_norm(x, weight, self.config.rms_norm_eps, residual=residual, tier=self.tier)

    def _attention(self, i: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        q = layer.q_proj(x).view(x.shape[0], num_heads, -1)  # [T, H, D]
        k = layer.k_proj(x).view(x.shape[0], num_kv_heads, -1)  # [T, K, D]
        v = layer.v_proj(x).view(x.shape[0], num_kv_heads, -1)  # [T, K, D]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        q, k = rotary(q, k, cos, sin, tier=self.tier)
        return layer.o_proj(attend(i, q, k, v).flatten(1))  # [T, E]

    def _norm_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """Norm each head on its own. x: [T, heads, D]."""
        return rms_norm(x.reshape(-1, x.shape[-1]), weight, self.config.rms_norm_eps, tier=self.tier).view(x.shape)


def _make_layer(weights: Mapping[str, Tensor], prefix: str) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    return Layer(
        input_norm=weights[f"{prefix}input_layernorm.weight"],
        q_proj=linear("self_attn.q_proj"),
        k_proj=linear("self_attn.k_proj"),
        v_proj=linear("self_attn.v_proj"),
        o_proj=linear("self_attn.o_proj"),
        q_norm=weights.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=weights.get(f"{prefix}self_attn.k_norm.weight"),
        post_attention_norm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate_proj=linear("mlp.gate_proj"),
        up_proj=linear("mlp.up_proj"),
        down_proj=linear("mlp.down_proj"),
    )
