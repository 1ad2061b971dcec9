"""What the drawings show: the palette, and frozen copies of what the real objects said at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""One per sequence, taken in turn: Okabe and Ito's colours, which stay apart with every colour blindness."""

FREE_GREY = "#BDBDBD"

CACHED_COLOR = "#C9D8C5"
"""Free, but the content can be found again."""

PREFILL_COLOR = "#332288"
"""Prefill and decode have these two colours in every figure; no sequence has them."""

DECODE_COLOR = "#DDCC77"

WASTE_COLOR = "#882255"
"""Slots that are taken and that nobody will ever use."""


def hue(seq_id: int) -> str:
    """Return the colour of a sequence; it stays the same while other sequences come and go."""
    return HUES[seq_id % len(HUES)]


def letter(seq_id: int) -> str:
    """Return the letter of a sequence, A for 0. After 26 sequences the letters begin again."""
    return chr(ord("A") + seq_id % 26)


@dataclass(frozen=True)
class TableView:
    """One sequence's block table. Its first ``num_released`` blocks were given back, and may be somebody else's."""

    seq_id: int
    block_ids: tuple[int, ...]
    num_tokens: int
    num_released: int = 0

    def filled(self, index: int, block_size: int) -> int:
        """Return how many slots of the table's block ``index`` hold a token."""
        return min(block_size, max(0, self.num_tokens - index * block_size))


Holders = dict[int, list[tuple[TableView, int]]]
"""Block id to the tables that hold the block, each with the number of slots that are filled there."""


@dataclass(frozen=True)
class PoolView:
    """A block pool and the block tables over it.

    Invariants:
        Ids run from 0 to ``num_blocks - 1``. ``cached_ids`` are the free blocks whose content can be found again. A
        block that is neither in ``free_ids`` nor in a table is held by somebody else, or lost; drawings show it so.

    Example:
        >>> pool = PoolView(8, 4, (TableView(0, (7, 2, 5), 10),), frozenset({0, 1, 3, 4, 6}))
        >>> {block_id: filled for block_id, [(table, filled)] in pool.holders().items()}
        {7: 4, 2: 4, 5: 2}
    """

    num_blocks: int
    block_size: int
    tables: tuple[TableView, ...]
    free_ids: frozenset[int]
    cached_ids: frozenset[int] = frozenset()

    def holders(self) -> Holders:
        """Return who holds which block."""
        holders: Holders = {}
        for table in self.tables:
            for index, block_id in list(enumerate(table.block_ids))[table.num_released :]:
                holders.setdefault(block_id, []).append((table, table.filled(index, self.block_size)))
        return holders


@dataclass(frozen=True)
class RangeView:
    """One sequence's range in the arena: ``length`` slots from ``start``.

    The first ``num_tokens`` hold a token, ``num_reserved`` are the sequence's own, and the rest is what the allocator's
    rounding of sizes keeps from everybody.
    """

    seq_id: int
    start: int
    length: int
    num_reserved: int
    num_tokens: int


@dataclass(frozen=True)
class ArenaView:
    """The contiguous rung's memory: one row of slots and the reservations in it."""

    num_slots: int
    ranges: tuple[RangeView, ...]


class _Pool(Protocol):
    num_blocks: int
    block_size: int

    def is_free(self, block_id: int) -> bool: ...


class _Table(Protocol):
    block_ids: list[int]
    num_tokens: int


class _Reservation(Protocol):
    start: int
    length: int
    num_reserved: int
    num_tokens: int


def view_pool(pool: _Pool, tables: Mapping[int, _Table]) -> PoolView:
    """Copy what a block pool and the block tables over it say now.

    Args:
        pool: The `BlockPool` of a cache.
        tables: Block tables by sequence id.

    Cost:
        One call of ``is_free`` per block and a copy of each table. No tensor is read.
    """
    is_idle = getattr(pool, "is_idle", None)  # only a pool that remembers has free blocks with content
    cached_ids = frozenset(block_id for block_id in range(pool.num_blocks) if is_idle is not None and is_idle(block_id))
    free_ids = frozenset(block_id for block_id in range(pool.num_blocks) if pool.is_free(block_id))
    return PoolView(
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        tables=tuple(
            TableView(seq_id, tuple(table.block_ids), table.num_tokens, getattr(table, "num_released", 0))
            for seq_id, table in tables.items()
        ),
        free_ids=free_ids | cached_ids,
        cached_ids=cached_ids,
    )


def view_arena(num_slots: int, ranges: Mapping[int, _Reservation]) -> ArenaView:
    """Copy what the contiguous rung's arena says now."""
    return ArenaView(
        num_slots,
        tuple(
            RangeView(seq_id, own.start, own.length, own.num_reserved, own.num_tokens) for seq_id, own in ranges.items()
        ),
    )


def view_cache(cache: Any) -> PoolView | ArenaView | None:
    """Copy what an engine's cache says now; None for a rung without a cache."""
    if hasattr(cache, "pool"):
        return view_pool(cache.pool, cache.tables)
    if hasattr(cache, "ranges"):
        return view_arena(cache.num_slots, cache.ranges)
    return None
