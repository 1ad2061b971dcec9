"""How far a sequence's blocks can be found, and which comes next.

A sequence walks through the index as it fills blocks: from the root, one place further with each block that is entered.
"""

from dataclasses import dataclass, field
from typing import Any

from minipaged.batching.cache import Swapped

Coming = tuple[Any, tuple[int, ...]]
"""A block that is about to be written: the place that it follows, and its tokens."""


@dataclass(slots=True)
class Walk:
    """How far a sequence's blocks are entered into the index.

    Args:
        token_ids: The sequence's tokens, a list that grows.
        root: The place before its first block.
        place: The index's place behind the last block that is entered.
        num_entered: How many blocks that is.
        num_computed: How many tokens have keys and values.
        coming: The block that the prefill writes next.
    """

    token_ids: list[int]
    root: Any
    place: Any
    num_entered: int
    num_computed: int
    coming: Coming | None = None


@dataclass
class PrefixSwapped(Swapped):
    """Rung 4's note of swapped sequences, and how far each was entered."""

    walks: dict[int, Walk] = field(default_factory=dict)
