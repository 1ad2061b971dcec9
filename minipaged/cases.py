"""Named inputs for attention operations: the tests of all tiers, the lessons and the benchmarks share them.

Every slot that no sequence owns holds NaN, so an implementation that reads one too many shows it.
"""

from dataclasses import dataclass

import torch

from minipaged.paged.block_table import num_blocks_for
from minipaged.shapes import UNUSED_BLOCK, Float, Int, Tensor

MAX_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far two implementations of attention may lie apart on these cases, whose results are about 1."""


@dataclass(frozen=True)
class AttentionCase:
    """One input: heads, block size and the lengths of the batch. ``name`` says what it is there to catch."""

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None

    def __str__(self) -> str:
        return self.name


ATTENTION_CASES = (
    AttentionCase("one-token", (1,)),
    AttentionCase("one-token-each", (1, 1, 1)),
    AttentionCase("block-edge", (15, 16, 17, 31, 32, 33)),
    AttentionCase("ragged", (1, 40, 7, 100)),
    AttentionCase("empty-row", (5, 0, 20)),
    AttentionCase("long", (300,)),
    AttentionCase("block-of-1", (1, 5), block_size=1),
    AttentionCase("block-of-5", (4, 5, 6, 11), block_size=5),
    AttentionCase("block-of-8", (7, 8, 9), block_size=8),
    AttentionCase("block-of-32", (31, 32, 33), block_size=32),
    AttentionCase("block-of-128", (127, 129), block_size=128),
    AttentionCase("block-of-256", (255, 256, 257), block_size=256),
    AttentionCase("window-1", (6, 1), window=1),
    AttentionCase("window-4", (1, 3, 4, 5, 7, 40), window=4),
    AttentionCase("window-as-long", (7, 3), window=7),
    AttentionCase("window-across-blocks", (13, 14, 30), block_size=4, window=13),
    AttentionCase("window-longer-than-all", (5, 20), window=64),
    AttentionCase("no-grouping", (20, 3), num_heads=3, num_kv_heads=3),
    AttentionCase("heads-9-3-64", (19, 33), 9, 3, 64),
    AttentionCase("heads-14-2-64", (19, 33), 14, 2, 64),
    AttentionCase("heads-16-8-128", (17,), 16, 8, 128),
    AttentionCase("heads-28-4-128", (17,), 28, 4, 128),
    AttentionCase("heads-12-12-80", (18,), 12, 12, 80),
    AttentionCase("heads-32-32-96", (18,), 32, 32, 96),
    AttentionCase("heads-48-2-64", (18,), 48, 2, 64),
    AttentionCase("heads-71-1-64", (18,), 71, 1, 64),
)


@dataclass(frozen=True)
class PagedInputs:
    """The arguments of ``paged_attention`` for a case, block ids shuffled over a pool with a few spare blocks."""

    q: Float[Tensor, "B H D"]
    k_pool: Float[Tensor, "N S K D"]
    v_pool: Float[Tensor, "N S K D"]
    block_tables: Int[Tensor, "B M"]
    seq_lens: Int[Tensor, " B"]

    def rows(self, *rows: int) -> "PagedInputs":
        """Return the inputs of some sequences alone, over the same pool."""
        index = torch.tensor(rows, device=self.q.device)
        return PagedInputs(self.q[index], self.k_pool, self.v_pool, self.block_tables[index], self.seq_lens[index])

    @property
    def args(self) -> tuple[Tensor, ...]:
        """Return the positional arguments."""
        return self.q, self.k_pool, self.v_pool, self.block_tables, self.seq_lens

    def dense(self) -> tuple[Tensor, Tensor]:
        """Return K and V as rows ``[B, L, K, D]`` in the order of tokens, NaN behind each sequence's end."""
        block_size = self.k_pool.shape[1]
        length = max(1, self.block_tables.shape[1] * block_size)
        rows = [
            torch.full(
                (len(self.seq_lens), length, *pool.shape[2:]), float("nan"), dtype=pool.dtype, device=pool.device
            )
            for pool in (self.k_pool, self.v_pool)
        ]
        for b, seq_len in enumerate(self.seq_lens.tolist()):
            for token in range(seq_len):
                block_id = int(self.block_tables[b, token // block_size])
                for row, pool in zip(rows, (self.k_pool, self.v_pool), strict=True):
                    row[b, token] = pool[block_id, token % block_size]
        return rows[0], rows[1]


def make_paged_inputs(
    case: AttentionCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: float = float("nan"),
) -> PagedInputs:
    """Make random inputs for a case. Numbers are drawn on the CPU, so they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    counts = [num_blocks_for(length, case.block_size) for length in case.seq_lens]
    num_blocks = sum(counts) + 3
    ids = iter(torch.randperm(num_blocks, generator=generator).tolist())
    width = max(1, *counts, 1) + 1  # one column more than needed: the fill must not be followed
    tables = [[next(ids) for _ in range(count)] + [UNUSED_BLOCK] * (width - count) for count in counts]
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    pools = [torch.full(shape, poison), torch.full(shape, poison)]
    for table, length in zip(tables, case.seq_lens, strict=True):
        for token in range(length):
            for pool in pools:
                pool[table[token // case.block_size], token % case.block_size] = torch.randn(
                    shape[2:], generator=generator
                )
    q = torch.randn(len(case.seq_lens), case.num_heads, case.head_dim, generator=generator)
    return PagedInputs(
        q.to(device, dtype),
        pools[0].to(device, dtype),
        pools[1].to(device, dtype),
        torch.tensor(tables, dtype=torch.int32, device=device),
        torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
    )
