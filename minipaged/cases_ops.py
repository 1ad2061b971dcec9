"""Named inputs for the operations that are not decode attention, and longer ones for those that are.

Like `minipaged.cases`, for tests, lessons and benchmarks alike. Numbers are drawn on the CPU, so they are the same
on every device.
"""

from dataclasses import dataclass

import torch

from minipaged.cases import ATTENTION_CASES, AttentionCase
from minipaged.shapes import UNUSED_SLOT, Float, Int, Tensor

Device = torch.device | str

FIRST_CUT, COARSE_CUT, NEXT_CUT = (127, 128, 129), (1023, 1024, 1025), (1535, 1536, 1537)
"""Lengths around cuts of decode: the first, the one from which on pieces are longer, and the end of a longer one."""

CUT_LENGTHS = (*FIRST_CUT, *COARSE_CUT, *NEXT_CUT)

PIECE_CASES = (
    AttentionCase("first-cut", FIRST_CUT, num_heads=2, num_kv_heads=1),
    AttentionCase("coarse-cut", COARSE_CUT, num_heads=2, num_kv_heads=1),
    AttentionCase("next-cut", NEXT_CUT, num_heads=2, num_kv_heads=1),
    AttentionCase("eleven-pieces", (2049,), num_heads=2, num_kv_heads=1),
    AttentionCase("window-across-pieces", (1500,), num_heads=2, num_kv_heads=1, window=700),
    AttentionCase("window-in-one-piece", (1500,), num_heads=2, num_kv_heads=1, window=99),
    AttentionCase("window-from-a-cut", (1123, 1124, 1125), num_heads=2, num_kv_heads=1, window=100),
)
"""Decode attention over more than one of the pieces that long sequences are cut into."""

PREFILL_CASES = (
    *(case for case in ATTENTION_CASES if not case.name.startswith("block-of")),
    AttentionCase("tile-edge", (31, 32, 33, 63, 64, 65)),
    AttentionCase("window-across-tiles", (150,), window=40),
    AttentionCase("empty-first-and-last", (0, 3, 0, 0, 9, 0)),
)
"""Attention over whole prompts: block sizes do not matter there, tile edges do."""


@dataclass(frozen=True)
class RowCase:
    """Rows of entries, as ``rms_norm`` and ``silu_mul`` take them."""

    name: str
    num_rows: int
    width: int

    def __str__(self) -> str:
        return self.name

    def rows(self, dtype: torch.dtype, device: Device = "cpu", seed: int = 0) -> Float[Tensor, "T E"]:
        """Return random rows, one of them large and one small, for an operation that scales each on its own."""
        rows = torch.randn(self.num_rows, self.width, generator=torch.Generator().manual_seed(seed))
        rows[0] *= 30
        rows[-1] *= 0.01
        return rows.to(device, dtype)


ROW_CASES = (
    RowCase("one-row", 1, 64),
    RowCase("one-column", 3, 1),
    RowCase("rows-of-one-head", 37, 128),
    RowCase("odd-width", 5, 100),
    RowCase("hidden-576", 3, 576),
    RowCase("wider-than-a-tile", 2, 1536),
    RowCase("hidden-8192", 2, 8192),
)

ROTARY_CASES = tuple({(c.num_heads, c.num_kv_heads, c.head_dim): c for c in ATTENTION_CASES}.values())
"""One case for each set of heads; only the heads count."""


def make_heads(
    case: AttentionCase, num_tokens: int, dtype: torch.dtype, device: Device = "cpu", seed: int = 0
) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T K D"], Float[Tensor, "T K D"]]:
    """Return random queries, keys and values of a case's heads."""
    generator = torch.Generator().manual_seed(seed)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    q, k, v = (torch.randn(num_tokens, num, case.head_dim, generator=generator).to(device, dtype) for num in heads)
    return q, k, v


def make_angles(num_tokens: int, head_dim: int, device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles of tokens far into a text, in fp32."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(1000, 1000 + num_tokens)[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def make_prefill_inputs(
    case: AttentionCase, dtype: torch.dtype, device: Device = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Int[Tensor, " B+1"]]:
    """Return the arguments of ``causal_attention``: the case's sequences one after the other."""
    starts = torch.tensor([0, *case.seq_lens]).cumsum(0)
    q, k, v = make_heads(case, int(starts[-1]), dtype, device, seed)
    return q, k, v, starts.to(device, torch.int32)


@dataclass(frozen=True)
class WriteCase:
    """New tokens and a pool to write them to."""

    name: str
    num_tokens: int
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_skipped: int = 0

    def __str__(self) -> str:
        return self.name

    def make(
        self, dtype: torch.dtype, device: Device = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Int[Tensor, " T"]]:
        """Return the arguments of ``write_slots``: shuffled slots, and pools that hold NaN everywhere."""
        generator = torch.Generator().manual_seed(0)
        num_blocks = self.num_tokens // self.block_size + 2
        shape = (self.num_tokens, self.num_kv_heads, self.head_dim)
        k, v = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
        k_pool, v_pool = (
            torch.full((num_blocks, self.block_size, *shape[1:]), float("nan"), dtype=dtype, device=device)
            for _ in range(2)
        )
        slots = torch.randperm(num_blocks * self.block_size, generator=generator)[: self.num_tokens]
        slots[torch.randperm(self.num_tokens, generator=generator)[: self.num_skipped]] = UNUSED_SLOT
        return k, v, k_pool, v_pool, slots.to(device)


WRITE_CASES = (
    WriteCase("one-token", 1),
    WriteCase("some-skipped", 20, num_skipped=7),
    WriteCase("all-skipped", 3, num_skipped=3),
    WriteCase("block-of-1", 5, block_size=1),
    WriteCase("block-of-5", 12, block_size=5),
    WriteCase("block-of-256", 3, block_size=256),
    WriteCase("heads-3-80", 9, num_kv_heads=3, head_dim=80, num_skipped=1),
    WriteCase("wider-than-a-tile", 2, num_kv_heads=33, head_dim=96),
)


@dataclass(frozen=True)
class CopyCase:
    """Blocks to copy, as pairs of source and target: sources are shared blocks, targets are fresh ones."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    num_layers: int | None = 2  # None is a pool of one layer without K and V side by side
    num_blocks: int = 8
    block_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    def __str__(self) -> str:
        return self.name

    @property
    def block_ids(self) -> list[int]:
        """Return each block of the pairs once: those to move for ``gather_blocks`` and ``scatter_blocks``."""
        return list(dict.fromkeys(block_id for pair in self.pairs for block_id in pair))

    def make(self, dtype: torch.dtype, device: Device = "cpu") -> tuple[Tensor, Int[Tensor, "P 2"]]:
        """Return the arguments of ``copy_blocks``."""
        planes = () if self.num_layers is None else (self.num_layers, 2)
        shape = (*planes, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        pool = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        return pool, torch.tensor(self.pairs, dtype=torch.int64, device=device).view(-1, 2)


COPY_CASES = (
    CopyCase("no-pair", ()),
    CopyCase("one-pair", ((5, 2),)),
    CopyCase("one-source-twice", ((1, 0), (1, 7), (4, 3))),
    CopyCase("one-layer", ((0, 1),), num_layers=None),
    CopyCase("five-layers", ((7, 0), (2, 6)), num_layers=5),
    CopyCase("block-of-1", ((3, 1),), block_size=1),
    CopyCase("block-of-5-heads-3-80", ((0, 3), (2, 1)), block_size=5, num_kv_heads=3, head_dim=80),
    CopyCase("larger-than-a-tile", ((1, 0),), num_blocks=2, block_size=32, num_kv_heads=4, head_dim=40),
)
