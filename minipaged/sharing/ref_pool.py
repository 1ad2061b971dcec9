"""Which blocks are free, and how many sequences have each of the others."""

from minipaged.errors import AccountingError
from minipaged.paged.block_pool import BlockPool
from minipaged.tiers import declare_part

declare_part(
    "ref_counted_block_pool",
    "class with the methods of RefCountedBlockPool; read when an LLM on rung 'sharing' or 'batching' is made",
)


class RefCountedBlockPool(BlockPool):
    """A block pool whose blocks can have several owners.

    Changes of rung 2: a new block has one reference, `share` adds one, and `free` takes one away; only the last
    `free` gives the block back.

    Invariants:
        A block is free exactly when its count is 0. `check` tests it.

    Example:
        >>> pool = RefCountedBlockPool(num_blocks=3, block_size=4)
        >>> block_id = pool.allocate()
        >>> pool.share(block_id)
        >>> pool.free(block_id)
        >>> pool.num_free, pool.num_references(block_id)
        (2, 1)
        >>> pool.free(block_id)
        >>> pool.num_free, pool.num_references(block_id)
        (3, 0)
    """

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self._num_references = [0] * num_blocks

    def num_references(self, block_id: int) -> int:
        """Return how many tables hold the block."""
        return self._num_references[block_id]

    def allocate(self) -> int:
        """Take a free block, with one reference."""
        block_id = super().allocate()
        self._num_references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference.

        Raises:
            AccountingError: Nobody has the block, so there is nothing to share, or no such block exists.
        """
        self._check_id(block_id)
        if self._num_references[block_id] == 0:
            raise AccountingError(f"block {block_id} is free and cannot be shared")
        self._num_references[block_id] += 1

    def free(self, block_id: int) -> None:
        """Take a reference away; give the block back with the last one."""
        if 0 <= block_id < self.num_blocks and self._num_references[block_id] > 1:
            self._num_references[block_id] -= 1
            return
        super().free(block_id)
        self._num_references[block_id] = 0

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        for block_id, count in enumerate(self._num_references):
            assert count >= 0 and (count == 0) == self.is_free(block_id), f"block {block_id} has count {count}"
