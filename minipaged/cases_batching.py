"""Named inputs for attention of mixed prefill and decode rows, for tests, lessons and benchmarks alike.

As in `minipaged.cases`, slots that no sequence owns hold NaN. So do the blocks before the window, which have been
given back: their places in the tables hold -1.
"""

from dataclasses import dataclass, replace

import torch

from minipaged.cases import ATTENTION_CASES, AttentionCase, PagedInputs, make_paged_inputs
from minipaged.cases_ops import COARSE_CUT, FIRST_CUT, NEXT_CUT
from minipaged.shapes import UNUSED_BLOCK, Int, Tensor


@dataclass(frozen=True)
class RaggedCase(AttentionCase):
    """A batch whose sequence b has ``num_queries[b]`` query tokens, the newest of its ``seq_lens[b]``."""

    num_queries: tuple[int, ...] = ()
    num_padding: int = 0
    num_shared_blocks: int = 0
    """So many first blocks of all sequences are those of the first one."""

    def __str__(self) -> str:
        return self.name


RAGGED_CASES = (
    RaggedCase("one-token-prompt", (1,), num_queries=(1,)),
    RaggedCase("two-token-prompt", (2,), num_queries=(2,)),
    RaggedCase("decode-only", (5, 16, 17, 1), num_queries=(1, 1, 1, 1)),
    RaggedCase("whole-prompts", (7, 20, 2), num_queries=(7, 20, 2)),
    RaggedCase("mixed", (40, 1, 17, 33, 50), num_queries=(20, 1, 1, 33, 2)),
    RaggedCase("padded", (40, 9), num_queries=(3, 1), num_padding=5),
    RaggedCase("rows-without-queries", (0, 9, 12, 0, 30, 4), num_queries=(0, 3, 0, 0, 1, 0)),
    RaggedCase("chunks-at-block-edges", (32, 32, 33, 31, 48), num_queries=(16, 17, 17, 15, 32)),
    RaggedCase("chunks-at-tile-edges", (64, 65, 96, 97, 130), num_queries=(32, 33, 64, 2, 66)),
    RaggedCase("shared-blocks", (40, 36, 33), num_queries=(8, 4, 1), num_shared_blocks=2),
    RaggedCase("chunk-after-1100", (1103,), num_heads=2, num_kv_heads=1, num_queries=(3,)),
    RaggedCase("block-of-1", (6, 9, 1), block_size=1, num_queries=(3, 1, 1)),
    RaggedCase("block-of-5", (11, 14, 5), block_size=5, num_queries=(4, 1, 5)),
    RaggedCase("block-of-256", (257, 300), block_size=256, num_queries=(2, 1)),
    RaggedCase("window-1", (6, 5), block_size=4, window=1, num_queries=(3, 1)),
    RaggedCase("window-4", (7, 40, 20, 5), block_size=4, window=4, num_queries=(7, 6, 1, 2)),
    RaggedCase("window-across-blocks", (60, 45), block_size=4, window=13, num_queries=(30, 1)),
    RaggedCase("window-across-tiles", (150, 140), window=40, num_queries=(70, 1)),
    RaggedCase("window-longer-than-all", (20, 9), window=64, num_queries=(5, 1)),
    *(
        RaggedCase(case.name, (19, 18), case.num_heads, case.num_kv_heads, case.head_dim, num_queries=(5, 1))
        for case in ATTENTION_CASES
        if case.name.startswith(("heads", "no-grouping"))
    ),
)

RAGGED_PIECE_CASES = (
    RaggedCase("first-cut", FIRST_CUT, 2, 1, num_queries=(1, 1, 1)),
    RaggedCase("coarse-cut", COARSE_CUT, 2, 1, num_queries=(1, 1, 1)),
    RaggedCase("next-cut", NEXT_CUT, 2, 1, num_queries=(1, 1, 1)),
    RaggedCase("eleven-pieces-and-a-chunk", (2049, 30), 2, 1, num_queries=(1, 4)),
    RaggedCase("window-across-pieces", (1500, 8), 2, 1, window=700, num_queries=(1, 3)),
    RaggedCase("window-in-one-piece", (1500,), 2, 1, window=99, num_queries=(1,)),
    RaggedCase("window-from-a-cut", (1123, 1124, 1125), 2, 1, window=100, num_queries=(1, 1, 1)),
    RaggedCase("pieces-and-a-group-of-5", (1100,), 10, 2, 24, block_size=5, num_queries=(1,)),
)
"""Decode rows over more than one of the pieces that long sequences are cut into."""


@dataclass(frozen=True)
class RaggedInputs(PagedInputs):
    """The arguments of ``ragged_paged_attention`` for a case; ``q`` is ``[T, H, D]``, padding included."""

    query_starts: Int[Tensor, " B+1"]

    @property
    def args(self) -> tuple[Tensor, ...]:
        """Return the positional arguments."""
        return self.q, self.k_pool, self.v_pool, self.block_tables, self.query_starts, self.seq_lens

    def queries(self, row: int) -> slice:
        """Return where the query tokens of a sequence lie."""
        return slice(int(self.query_starts[row]), int(self.query_starts[row + 1]))

    def rows(self, *rows: int) -> "RaggedInputs":
        """Return the inputs of some sequences alone, over the same pool."""
        q = torch.cat([self.q[self.queries(row)] for row in rows])
        starts = self.query_starts.diff()[list(rows)].cumsum(0).to(torch.int32)
        starts = torch.cat((torch.zeros_like(starts[:1]), starts))
        tables, seq_lens = self.block_tables[list(rows)], self.seq_lens[list(rows)]
        return RaggedInputs(q, self.k_pool, self.v_pool, tables, seq_lens, starts)

    def chunk(self, begin: int, end: int, window: int | None = None) -> "RaggedInputs":
        """Return the first sequence as its tokens up to ``end`` are fed, whose query tokens are a whole prompt here.

        Blocks wholly before the window stand as -1.
        """
        tables, starts = self.block_tables[:1].clone(), self.query_starts.new_tensor([0, end - begin])
        if window is not None:
            tables[:, : max(0, begin - window + 1) // self.k_pool.shape[1]] = UNUSED_BLOCK
        return RaggedInputs(
            self.q[begin:end], self.k_pool, self.v_pool, tables, self.seq_lens.new_tensor([end]), starts
        )


def make_ragged_inputs(
    case: RaggedCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: float = float("nan"),
) -> RaggedInputs:
    """Make random inputs for a case. Numbers are drawn on the CPU, so they are the same on every device."""
    paged = make_paged_inputs(case, seed=seed, poison=poison)
    tables = paged.block_tables
    tables[1:, : case.num_shared_blocks] = tables[0, : case.num_shared_blocks]
    for table, seq_len, num_queries in zip(tables, case.seq_lens, case.num_queries, strict=True):
        if case.window is not None:
            table[: max(0, seq_len - num_queries - case.window + 1) // case.block_size] = UNUSED_BLOCK
    is_owned = torch.zeros(len(paged.k_pool), dtype=torch.bool)
    is_owned[tables[tables >= 0].long()] = True
    for pool in (paged.k_pool, paged.v_pool):
        pool[~is_owned] = poison
    starts = torch.tensor([0, *case.num_queries]).cumsum(0)
    num_tokens = int(starts[-1]) + case.num_padding
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=torch.Generator().manual_seed(seed + 1))
    q[starts[-1] :] = poison
    pools = (pool.to(device, dtype) for pool in (paged.k_pool, paged.v_pool))
    indices = (index.to(device, torch.int32) for index in (tables, paged.seq_lens, starts))
    return RaggedInputs(q.to(device, dtype), *pools, *indices)


def prompt_case(length: int, case: RaggedCase = RAGGED_CASES[0]) -> RaggedCase:
    """Return a case of one whole prompt, to be fed in chunks."""
    return replace(case, name=f"prompt-of-{length}", seq_lens=(length,), num_queries=(length,))
