"""What finds cached blocks again: the interface of the hash chain and the radix tree."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Match:
    """What an index has of a prompt.

    Args:
        place: Where in the index the whole blocks end.
        block_ids: The whole blocks, in order.
        partial: A block whose first tokens go on with the prompt, and how many of them; None where there is none.
    """

    place: Any
    block_ids: list[int]
    partial: tuple[int, int] | None = None


class PrefixIndex(Protocol):
    """Find the blocks that hold the beginning of a prompt.

    A place is the index's own mark of a whole number of blocks of some sequence. A sequence that fills blocks walks
    from place to place with `insert`. An entry is found from then on, so it is made when the block's keys and values
    are written, and not before.
    """

    def root(self, salt: str) -> Any:
        """Return the place before the first block, for requests of a salt."""
        ...

    def match(self, token_ids: Sequence[int], salt: str, limit: int, memo: list | None = None) -> Match:
        """Return the longest cached beginning of a sequence, of at most ``limit`` tokens.

        ``memo`` keeps what was computed from the tokens alone, for the next look with the same tokens.
        """
        ...

    def is_gone(self, place: Any) -> bool:
        """Return whether what is entered behind a place could not be found: an eviction has cut it off."""
        ...

    def insert(self, place: Any, token_ids: Sequence[int], block_id: int) -> tuple[Any, list[int]]:
        """Enter a block that follows a place: a full one, or the part-full last one of a sequence that ends.

        Returns:
            The place behind it, and the blocks whose entries had to make room for it. The block itself is entered
            only if the index has no equal yet, and a use for it.
        """
        ...

    def forget(self, block_id: int) -> list[int]:
        """Forget a block that gets new content; return all blocks that cannot be found any more."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Return whether the block has an entry."""
        ...

    def check(self) -> None:
        """Assert the invariants."""
        ...
