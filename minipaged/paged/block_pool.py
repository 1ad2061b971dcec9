"""Which blocks are free."""

from collections import deque

from minipaged.errors import AccountingError, UserError
from minipaged.tiers import declare_part

declare_part("block_pool", "class with the methods of BlockPool; read when an LLM on rung 'paged' is made")


class BlockPool:
    """Hand out blocks by id and take them back.

    Blocks leave at one end of a queue and come back at the other, so a freed block is reused as late as possible.

    Args:
        num_blocks: Usable blocks; ids are 0 to ``num_blocks - 1``.
        block_size: Slots in a block, any number from 1.

    Invariants:
        Every id is either in the free queue, once, or allocated. `check` tests it.

    Cost:
        Constant for each call, whatever the size of the pool.

    Example:
        >>> pool = BlockPool(num_blocks=3, block_size=4)
        >>> pool.allocate(), pool.allocate()
        (0, 1)
        >>> pool.free(0)
        >>> pool.allocate(), pool.allocate(), pool.num_free
        (2, 0, 0)
    """

    def __init__(self, num_blocks: int, block_size: int):
        if num_blocks < 1:
            raise UserError(f"num_blocks must be at least 1, not {num_blocks}")
        if block_size < 1:
            raise UserError(f"block_size must be at least 1, not {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._is_free = bytearray([True]) * num_blocks

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated."""
        return len(self._free)

    @property
    def free_block_ids(self) -> list[int]:
        """Return the free ids in the order in which they will be handed out."""
        return list(self._free)

    def is_free(self, block_id: int) -> bool:
        """Return whether nobody has the block."""
        return bool(self._is_free[block_id])

    def allocate(self) -> int:
        """Take a free block and return its id.

        Raises:
            AccountingError: No block is free.
        """
        if not self._free:
            raise AccountingError(f"all {self.num_blocks} blocks of the pool are in use")
        block_id = self._free.popleft()
        self._is_free[block_id] = False
        return block_id

    def free(self, block_id: int) -> None:
        """Give a block back.

        Raises:
            AccountingError: The block is free already, or no such block exists.
        """
        self._check_id(block_id)
        if self._is_free[block_id]:
            raise AccountingError(f"block {block_id} is freed a second time")
        self._is_free[block_id] = True
        self._free.append(block_id)

    def _check_id(self, block_id: int) -> None:
        if not 0 <= block_id < self.num_blocks:
            raise AccountingError(f"block {block_id} does not exist; ids are 0 to {self.num_blocks - 1}")

    def check(self) -> None:
        """Assert the invariants."""
        assert len(set(self._free)) == len(self._free), "a block stands twice in the free queue"
        assert sum(self._is_free) == len(self._free), "the free marks and the free queue differ"
        assert all(self._is_free[block_id] for block_id in self._free)
