"""The bookkeeping of all running sequences: one pool and a block table each."""

from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable, num_blocks_for
from minipaged.tiers import replacement


class PagedCache:
    """Give sequences blocks as they grow.

    A sequence takes blocks when its tokens need them, but it enters only if the blocks that it may need at most are
    neither taken nor promised to others. This rung cannot take a block away from a running sequence, so without
    that promise two sequences could block each other half-way. (Rung 4 preempts, and drops the promise.)

    Invariants:
        Every block that is not free stands in exactly one table. The promises together fit into the pool, and no
        sequence has more blocks than it was promised.

    Example:
        >>> cache = PagedCache(num_blocks=4, block_size=4)
        >>> cache.allocate(7, num_prompt_tokens=5, max_slots=9)
        >>> cache.tables[7].block_ids, cache.pool.num_free, cache.can_admit(5, 5)
        ([0, 1], 2, False)
        >>> [cache.append(7) for _ in range(4)]
        [5, 6, 7, 8]
        >>> cache.waste()
        Waste(token_states=9, reserved=0, internal=3, external=0)
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = self.make_pool(num_blocks, block_size)
        self.tables: dict[int, BlockTable] = {}
        self._max_blocks: dict[int, int] = {}  # what each sequence may have at most

    def make_pool(self, num_blocks: int, block_size: int) -> BlockPool:
        """Make the pool."""
        return (replacement("block_pool") or BlockPool)(num_blocks, block_size)

    @property
    def seq_ids(self) -> list[int]:
        """Return the sequences that have a block table."""
        return list(self.tables)

    @property
    def num_promised(self) -> int:
        """Return how many blocks the running sequences may have at most, together."""
        return sum(self._max_blocks.values())

    def can_admit(self, num_prompt_tokens: int, max_slots: int) -> bool:
        """Return whether a sequence that may grow to ``max_slots`` slots can enter."""
        return self.num_promised + num_blocks_for(max_slots, self.pool.block_size) <= self.pool.num_blocks

    def allocate(self, seq_id: int, num_prompt_tokens: int, max_slots: int) -> None:
        """Make a block table for a prompt and promise the sequence room for ``max_slots`` slots.

        Raises:
            AccountingError: The room is not there. Nothing is taken then.
        """
        assert seq_id not in self.tables and num_prompt_tokens <= max_slots
        if not self.can_admit(num_prompt_tokens, max_slots):
            raise AccountingError(
                f"{max_slots} slots are not free: {self.pool.num_blocks} blocks of {self.pool.block_size} slots, "
                f"{self.num_promised} of them promised"
            )
        self._start(seq_id, num_prompt_tokens, max_slots)

    def _start(self, seq_id: int, num_prompt_tokens: int, max_slots: int) -> None:
        self._max_blocks[seq_id] = num_blocks_for(max_slots, self.pool.block_size)
        self.tables[seq_id] = BlockTable(self.pool.block_size)
        for _ in range(num_prompt_tokens):
            self.append(seq_id)

    def append(self, seq_id: int) -> int:
        """Take the slot of the sequence's next token and return it; take a block first where the last is full."""
        table = self.tables[seq_id]
        if table.needs_block:
            if len(table.block_ids) == self._max_blocks[seq_id]:
                raise AccountingError(f"sequence {seq_id} has all {len(table.block_ids)} blocks it was promised")
            table.block_ids.append(self.pool.allocate())
        table.num_tokens += 1
        return table.slot(table.num_tokens - 1)

    def free(self, seq_id: int) -> None:
        """Give all blocks of a sequence back, the last one first."""
        del self._max_blocks[seq_id]
        for block_id in reversed(self.tables.pop(seq_id).block_ids):
            self.pool.free(block_id)

    def waste(self, output_lengths: dict[int, int] | None = None) -> Waste:
        """Count slots by kind: only the empty slots of last blocks are wasted, and they count as internal.

        Nothing is reserved ahead, so ``output_lengths`` changes nothing here.
        """
        return Waste(
            token_states=sum(table.num_tokens for table in self.tables.values()),
            reserved=0,
            internal=sum(table.num_empty_slots for table in self.tables.values()),
            external=0,
        )

    def check(self) -> None:
        """Assert the invariants."""
        self.pool.check()
        owned = [block_id for table in self.tables.values() for block_id in table.block_ids]
        assert len(set(owned)) == len(owned), "a block stands in two tables"
        assert len(owned) + self.pool.num_free == self.pool.num_blocks, "a block is lost"
        assert not any(self.pool.is_free(block_id) for block_id in owned), "a free block stands in a table"
        assert self.num_promised <= self.pool.num_blocks
        for seq_id, table in self.tables.items():
            table.check()
            assert len(table.block_ids) <= self._max_blocks[seq_id]
