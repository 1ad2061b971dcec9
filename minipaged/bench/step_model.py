"""One decode step of a small model, from the project's operations alone, for ``bench step``.

    ids -> embedding -> [ norm -> product -> norm, turn and write heads -> attention -> product
                          norm -> product -> gate -> product ] x layers -> norm -> logits -> next ids

Up to 16 rows, products are the project's own; with more, cuBLAS is the right tool. The matrices of q, k and v are one,
and so are gate and up: one launch reads them.

Weights and caches are random and every layer has its own: layers that share them would find them in the L2 cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F

from minipaged import launch
from minipaged.batching.ops import ragged_paged_attention
from minipaged.bench.gpu_timing import Call, Workbench
from minipaged.bench.kernel_cases_attention import BLOCK_SIZE, Heads
from minipaged.bench.kernel_cases_step import chooser, random_logits
from minipaged.fast.ops import MAX_SKINNY_ROWS, norm_rotate_write, silu_mul_packed, skinny_linear
from minipaged.foundation.ops import rms_norm
from minipaged.shapes import Float, Tensor

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    num_layers: int
    width: int
    heads: Heads
    mlp_width: int
    vocab_size: int


QWEN3_06B = Shape(28, 1024, Heads(16, 8, 128), 3072, 151_936)


@dataclass(frozen=True)
class StepLayer:
    """Weights and cache of one layer."""

    input_norm: Float[Tensor, " E"]
    qkv_proj: Float[Tensor, "out E"]
    q_norm: Float[Tensor, " D"]
    k_norm: Float[Tensor, " D"]
    o_proj: Float[Tensor, "E in"]
    post_norm: Float[Tensor, " E"]
    gate_up_proj: Float[Tensor, "2*F E"]
    down_proj: Float[Tensor, "E F"]
    k_pool: Float[Tensor, "N S K D"]
    v_pool: Float[Tensor, "N S K D"]


class StepModel:
    """The weights, and a pool of blocks in each layer."""

    def __init__(self, bench: Workbench, shape: Shape, num_blocks: int) -> None:
        self.bench, self.shape, self.num_blocks = bench, shape, num_blocks
        self.embedding = self._matrix(shape.vocab_size, shape.width)
        self.final_norm = bench.random(shape.width)
        self.layers = [self._layer() for _ in range(shape.num_layers)]
        self.frequencies = torch.logspace(0, -6, shape.heads.head_dim // 2, device=bench.device)

    @property
    def weight_bytes(self) -> int:
        """Return how many bytes of weights a step reads; of the embedding as output matrix only."""
        weights = [self.embedding, self.final_norm]
        for layer in self.layers:
            weights += [tensor for name, tensor in vars(layer).items() if not name.endswith("_pool")]
        return sum(weight.nbytes for weight in weights)

    def _layer(self) -> StepLayer:
        width, heads, mlp_width = self.shape.width, self.shape.heads, self.shape.mlp_width
        q_width, kv_width = (num * heads.head_dim for num in (heads.num_heads, heads.num_kv_heads))
        pool = (self.num_blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        random, matrix = self.bench.random, self._matrix
        return StepLayer(
            input_norm=random(width),
            qkv_proj=matrix(q_width + 2 * kv_width, width),
            q_norm=random(heads.head_dim),
            k_norm=random(heads.head_dim),
            o_proj=matrix(width, q_width),
            post_norm=random(width),
            gate_up_proj=matrix(2 * mlp_width, width),
            down_proj=matrix(width, mlp_width),
            k_pool=random(*pool),
            v_pool=random(*pool),
        )

    def _matrix(self, num_out: int, num_in: int) -> Tensor:
        """Return a matrix that keeps the size of what it multiplies, so that no layer overflows."""
        return self.bench.random(num_out, num_in).mul_(num_in**-0.5)


class DecodeStep:
    """The decode step of one batch, which can run as a whole or one kind of work alone."""

    def __init__(self, model: StepModel, lengths: Sequence[int]) -> None:
        """Place sequences of these lengths, the new token counted, into shuffled blocks of the model's pools."""
        bench = model.bench
        self.model, self.lengths = model, list(lengths)
        self.max_query_len: int | None = 1
        widths = [-(-length // BLOCK_SIZE) for length in lengths]
        assert sum(widths) <= model.num_blocks, (sum(widths), model.num_blocks)
        ids = bench.shuffled(model.num_blocks)[: sum(widths)].split(widths)
        self.block_tables = bench.ints([-1]).repeat(len(lengths), max(widths))
        for table, own in zip(self.block_tables, ids, strict=True):
            table[: len(own)] = own
        self.seq_lens = bench.ints(lengths)
        self.query_starts = bench.ints(range(len(lengths) + 1))
        self.positions = self.seq_lens.long() - 1
        last_blocks = torch.stack([own[-1] for own in ids]).long()
        self.slots = last_blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE
        self.token_ids = torch.randint(model.shape.vocab_size, (len(lengths),), device=bench.device)
        self._make_inputs()

    def _make_inputs(self) -> None:
        """Make what each kind of work gets when it runs alone."""
        shape, heads, random = self.model.shape, self.model.shape.heads, self.model.bench.random
        batch = len(self.lengths)
        self.x, self.residual = random(batch, shape.width), random(batch, shape.width)
        self.q = random(batch, heads.num_heads, heads.head_dim)
        self.qkv = random(batch, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim)
        self.gate_up, self.gated = random(batch, 2 * shape.mlp_width), random(batch, shape.mlp_width)
        self.logits = random_logits(self.model.bench, batch, shape.vocab_size)
        self.choose = chooser(self.model.bench, batch)
        self.choose_filtered = chooser(self.model.bench, batch, top_k=20, top_p=0.95)

    @property
    def kv_bytes(self) -> int:
        """Return how many bytes of keys and values the attention of a step reads."""
        return self.model.shape.num_layers * self.model.shape.heads.kv_bytes(sum(self.lengths))

    def sides(self) -> dict[str, list[Call]]:
        """Return the whole and its parts, as a timer takes them. The last is none, but could be one."""
        parts = (self.attention, self.products, self.small_kernels, self.sampling, self.sampling_with_filters)
        return {"whole": [self.whole], **{part.__name__.replace("_", " "): [part] for part in parts}}

    def whole(self) -> Tensor:
        """Return the next token ids."""
        cos, sin = self._angles()
        x, residual = F.embedding(self.token_ids, self.model.embedding), None
        for layer in self.model.layers:
            x, residual = self._norm(x, layer.input_norm, residual)
            q = self._turn_and_write(self._multiply(x, layer.qkv_proj), cos, sin, layer)
            x = self._multiply(self._attend(q, layer).flatten(1), layer.o_proj)
            x, residual = self._norm(x, layer.post_norm, residual)
            x = self._multiply(silu_mul_packed(self._multiply(x, layer.gate_up_proj)), layer.down_proj)
        x, _ = self._norm(x, self.model.final_norm, residual)
        return self.choose(self._multiply(x, self.model.embedding))

    def without_early_starts(self) -> Tensor:
        """Run the whole with launches that wait for each other's ends."""
        with patch.object(launch, "CAN_START_EARLY", False):
            return self.whole()

    def without_the_hint(self) -> Tensor:
        """Run the whole without telling attention that every row has one token: it looks for prompts too."""
        with patch.object(self, "max_query_len", None):
            return self.whole()

    def attention(self) -> None:
        """Attend in every layer."""
        for layer in self.model.layers:
            self._attend(self.q, layer)

    def products(self) -> None:
        """Multiply by every matrix."""
        for layer in self.model.layers:
            self._multiply(self.x, layer.qkv_proj)
            self._multiply(self.q.flatten(1), layer.o_proj)
            self._multiply(self.x, layer.gate_up_proj)
            self._multiply(self.gated, layer.down_proj)
        self._multiply(self.x, self.model.embedding)

    def small_kernels(self) -> None:
        """Do everything that stands between products and attention."""
        cos, sin = self._angles()
        F.embedding(self.token_ids, self.model.embedding)
        for i, layer in enumerate(self.model.layers):
            self._norm(self.x, layer.input_norm, self.residual if i else None)
            self._turn_and_write(self.qkv, cos, sin, layer)
            self._norm(self.x, layer.post_norm, self.residual)
            silu_mul_packed(self.gate_up)
        self._norm(self.x, self.model.final_norm, self.residual)

    def sampling(self) -> Tensor:
        """Choose from logits, at temperature 1."""
        return self.choose(self.logits)

    def sampling_with_filters(self) -> Tensor:
        """Choose from the 20 best tokens, or those that have 95 % of the probability."""
        return self.choose_filtered(self.logits)

    def _angles(self) -> tuple[Tensor, Tensor]:
        angles = self.positions.float()[:, None] * self.model.frequencies
        return angles.cos(), angles.sin()

    def _norm(self, x: Tensor, weight: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return rms_norm(x, weight, EPS), x
        return rms_norm(x, weight, EPS, residual=residual)

    def _multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        return skinny_linear(x, weight) if len(x) <= MAX_SKINNY_ROWS else F.linear(x, weight)

    def _turn_and_write(self, qkv: Tensor, cos: Tensor, sin: Tensor, layer: StepLayer) -> Tensor:
        norms, pools = (layer.q_norm, layer.k_norm, EPS), (layer.k_pool, layer.v_pool)
        return norm_rotate_write(qkv, *norms, cos, sin, *pools, self.slots, num_heads=self.model.shape.heads.num_heads)

    def _attend(self, q: Tensor, layer: StepLayer) -> Tensor:
        tables = (self.block_tables, self.query_starts, self.seq_lens)
        return ragged_paged_attention(q, layer.k_pool, layer.v_pool, *tables, max_query_len=self.max_query_len)
