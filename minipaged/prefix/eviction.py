"""Which cached block is given up when a new one is needed."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from minipaged.errors import UserError
from minipaged.tiers import declare_part, replacement

declare_part("eviction_policy", "class with the methods of EvictionPolicy; read when an LLM is made")


class EvictionPolicy(Protocol):
    """Order the blocks that are cached and that nobody uses.

    Blocks come in when their last user leaves, a sequence's last block first, and leave when somebody uses them again
    or when they are evicted.
    """

    def add(self, block_id: int) -> None:
        """Take in a block that has just lost its last user."""
        ...

    def remove(self, block_id: int) -> None:
        """Let a block go that somebody uses again, or that holds nothing of value any more."""
        ...

    def evict(self) -> int:
        """Choose a block, let it go and return it."""
        ...

    def __len__(self) -> int:
        """Return how many blocks are here."""
        ...


class LRU:
    """Give up the block that has been unused for the longest time.

    A sequence's blocks come in from its last to its first, so its end is given up before its beginning, which others
    are likelier to share.

    Cost:
        Constant. A plain dict keeps an order too, but looks for its first key behind the gaps of all that have gone.

    Example:
        >>> policy = LRU()
        >>> for block_id in (5, 2, 7):  # the table [7, 2, 5], freed from its end
        ...     policy.add(block_id)
        >>> policy.remove(5)
        >>> policy.evict(), len(policy)
        (2, 1)
    """

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block_id: int) -> None:
        """Take in a block as the one used last."""
        self._blocks[block_id] = None

    def remove(self, block_id: int) -> None:
        """Let a block go."""
        del self._blocks[block_id]

    def evict(self) -> int:
        """Return the block that was used longest ago."""
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU}
"""The policies by name."""


def make_policy(name: str) -> EvictionPolicy:
    """Return an empty policy of that name, or what `use` has put in its place."""
    if not isinstance(name, str) or name not in EVICTION_POLICIES:
        raise UserError(f"eviction_policy must be one of {', '.join(EVICTION_POLICIES)}, not {name!r}")
    return (replacement("eviction_policy") or EVICTION_POLICIES[name])()
