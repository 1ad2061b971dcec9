"""Named inputs for attention of sequences that share prefixes, for tests, lessons and benchmarks alike.

As in `minipaged.cases`, slots that no sequence owns hold NaN. The blocks of a prefix stand in the tables of all
sequences of its group.
"""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from minipaged.cases import AttentionCase, PagedInputs
from minipaged.paged.block_table import num_blocks_for
from minipaged.shapes import UNUSED_BLOCK, Int, Tensor

NUM_SPARE_BLOCKS = 3
"""Blocks that no sequence owns."""


@dataclass(frozen=True)
class SharedCase(AttentionCase):
    """A batch in groups: each has a prefix, 0 for none, and its sequences have so many tokens of their own."""

    prefix_lens: tuple[int, ...] = ()
    group_sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


def shared_case(name: str, *groups: tuple[int, tuple[int, ...]], **options: Any) -> SharedCase:
    """Return a case of groups ``(length of the prefix, lengths of the suffixes)``."""
    return SharedCase(
        name,
        tuple(prefix + suffix for prefix, suffixes in groups for suffix in suffixes),
        prefix_lens=tuple(prefix for prefix, _ in groups),
        group_sizes=tuple(len(suffixes) for _, suffixes in groups),
        **options,
    )


ONE_KV_HEAD: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1}

SHARED_CASES = (
    shared_case("no-prefix", (0, (5, 16, 1)), **ONE_KV_HEAD),
    shared_case("no-prefix-and-an-empty-row", (0, (5, 0, 17)), **ONE_KV_HEAD),
    shared_case("one-sequence-one-more-token", (1024, (1,)), **ONE_KV_HEAD),
    shared_case("two-groups-and-one-without", (1024, (1, 20)), (0, (7,)), (1024, (16, 3, 1)), **ONE_KV_HEAD),
    shared_case("an-empty-group", (1024, (2,)), (1024, ()), (0, (3,)), (2048, ()), **ONE_KV_HEAD),
    shared_case("prefix-of-ten-pieces", (2048, (1, 30)), **ONE_KV_HEAD),
    shared_case("suffix-to-a-cut", (1024, (511, 512, 513)), **ONE_KV_HEAD),
    shared_case("suffix-of-two-pieces", (1024, (1023, 1024, 1025)), **ONE_KV_HEAD),
    shared_case("cuts-without-prefix", (0, (127, 128, 129, 1023)), (1024, (1,)), **ONE_KV_HEAD),
    shared_case("long-rows-without-prefix", (0, (1025, 1024)), (1024, (9,)), **ONE_KV_HEAD),
    shared_case("groups-of-1-2-5-40", *((1024, tuple(range(1, n + 1))) for n in (1, 2, 5, 40)), **ONE_KV_HEAD),
    shared_case("block-of-1", (1024, (1, 6)), block_size=1, **ONE_KV_HEAD),
    shared_case("block-of-5", (1024, (1, 6)), block_size=5, **ONE_KV_HEAD),
    shared_case("block-of-256", (1024, (1, 257)), block_size=256, **ONE_KV_HEAD),
    shared_case("no-grouping-80", (1024, (2, 9)), num_heads=2, num_kv_heads=2, head_dim=80),
    shared_case("group-of-3-64", (1024, (2, 9)), num_heads=3, num_kv_heads=1, head_dim=64),
    shared_case("group-of-7-128", (1024, (2, 9)), num_heads=7, num_kv_heads=1, head_dim=128),
    shared_case("group-of-71-64", (1024, (2, 9)), num_heads=71, num_kv_heads=1, head_dim=64),
)

LARGE_SHARED_CASES = tuple(
    shared_case(
        f"40-sequences-{num_heads}-{num_kv_heads}-{head_dim}",
        *((2048, (*range(1, 40), 1100)), (1024, (3, 70))),
        **{"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim},
    )
    for num_heads, num_kv_heads, head_dim in ((4, 4, 80), (9, 3, 64), (28, 4, 128), (8, 4, 256))
)
"""Cases of many pieces, too slow for Triton's interpreter."""


@dataclass(frozen=True)
class SharedInputs(PagedInputs):
    """The arguments of ``shared_prefix_attention`` for a case."""

    group_starts: Int[Tensor, " groups+1"]
    prefix_lens: Int[Tensor, " groups"]

    @property
    def args(self) -> tuple[Tensor, ...]:
        """Return the positional arguments."""
        return *self.plain_args, self.group_starts, self.prefix_lens

    @property
    def plain_args(self) -> tuple[Tensor, ...]:
        """Return the positional arguments of ``paged_attention`` over the same rows."""
        return self.q, self.k_pool, self.v_pool, self.block_tables, self.seq_lens

    def regrouped(self, *groups: tuple[tuple[int, ...], int]) -> "SharedInputs":
        """Return some sequences over the same pool in groups ``(rows, length of the prefix)``."""
        rows = list(chain.from_iterable(rows for rows, _ in groups))
        starts = torch.tensor([0, *(len(rows) for rows, _ in groups)]).cumsum(0)
        prefixes = torch.tensor([prefix for _, prefix in groups])
        return SharedInputs(
            self.q[rows], self.k_pool, self.v_pool, self.block_tables[rows], self.seq_lens[rows],
            *(index.to(self.group_starts) for index in (starts, prefixes)),
        )  # fmt: skip


def make_shared_inputs(
    case: SharedCase,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    poison: float = float("nan"),
) -> SharedInputs:
    """Make random inputs for a case. Numbers are drawn on the CPU, so they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    tables = shuffled_tables(case, generator)
    num_slots = (int(tables.max()) + 1) * case.block_size
    is_owned = torch.zeros(num_slots, dtype=torch.bool)
    for table, seq_len in zip(tables.long(), case.seq_lens, strict=True):
        token = torch.arange(seq_len)
        is_owned[table[token // case.block_size] * case.block_size + token % case.block_size] = True
    shape = (2, num_slots, case.num_kv_heads, case.head_dim)
    pools = torch.randn(shape, generator=generator).masked_fill(~is_owned[:, None, None], poison)
    q = torch.randn(len(tables), case.num_heads, case.head_dim, generator=generator)
    starts = torch.tensor([0, *case.group_sizes]).cumsum(0)
    indices = (tables, torch.tensor(case.seq_lens), starts, torch.tensor(case.prefix_lens))
    return SharedInputs(
        q.to(device, dtype),
        *(pool.view(-1, case.block_size, *shape[2:]).to(device, dtype) for pool in pools),
        *(index.to(device, torch.int32) for index in indices),
    )


def shuffled_tables(case: SharedCase, generator: torch.Generator) -> Int[Tensor, "B M"]:
    """Return tables in which a group's sequences begin with the blocks of its first one."""
    counts = [num_blocks_for(seq_len, case.block_size) for seq_len in case.seq_lens]
    tables = torch.full((len(counts), max(counts) + 1), UNUSED_BLOCK)  # one column more: it must not be followed
    num_used = row = 0
    for size, prefix_len in zip(case.group_sizes, case.prefix_lens, strict=True):
        num_shared = 0
        for own in range(row, row + size):
            tables[own, :num_shared] = tables[row, :num_shared]
            tables[own, num_shared : counts[own]] = num_used + torch.arange(counts[own] - num_shared)
            num_used += counts[own] - num_shared
            num_shared = num_blocks_for(prefix_len, case.block_size)
        row += size
    ids = torch.randperm(num_used + NUM_SPARE_BLOCKS, generator=generator)
    return torch.where(tables == UNUSED_BLOCK, UNUSED_BLOCK, ids[tables])
