"""Which blocks a sequence has, in the order of its tokens, and in which slot a token lies."""

from dataclasses import dataclass, field


@dataclass
class BlockTable:
    """Map the tokens of one sequence to slots of the pool.

    Token i lies in the sequence's block ``i // block_size``, at place ``i % block_size``. A slot's number counts
    over the whole pool: ``block id * block_size + place``.

    Invariants:
        ``len(block_ids) == ceil(num_tokens / block_size)``: a block is taken with the first token that needs it,
        not before. No id stands twice.

    Example:
        >>> table = BlockTable(block_size=4, block_ids=[7, 2, 5], num_tokens=10)
        >>> table.slot(0), table.slot(6), table.slots(3, 6)
        (28, 10, [31, 8, 9])
        >>> table.num_empty_slots, table.needs_block
        (2, False)
    """

    block_size: int
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def needs_block(self) -> bool:
        """Return whether the next token needs a new block: all blocks are full."""
        return self.num_tokens == len(self.block_ids) * self.block_size

    @property
    def num_empty_slots(self) -> int:
        """Return the slots of the last block that no token has."""
        return len(self.block_ids) * self.block_size - self.num_tokens

    def slot(self, token: int) -> int:
        """Return the slot of a token."""
        return self.block_ids[token // self.block_size] * self.block_size + token % self.block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of tokens ``start`` to ``stop - 1``: the slot mapping of a piece of the sequence."""
        return [self.slot(token) for token in range(start, stop)]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.block_ids) == num_blocks_for(self.num_tokens, self.block_size)
        assert len(set(self.block_ids)) == len(self.block_ids), "a block stands twice in one table"


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold that many tokens.

    Example:
        >>> [num_blocks_for(n, 16) for n in (0, 1, 16, 17)]
        [0, 1, 1, 2]
    """
    return -(-num_tokens // block_size)
