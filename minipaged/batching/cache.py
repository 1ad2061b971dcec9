"""The bookkeeping under the scheduler: a block pool that no request has a claim on, or rung 1's arena."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from minipaged.paged.block_table import BlockTable, num_blocks_for
from minipaged.shapes import UNUSED_BLOCK
from minipaged.sharing.cache import SharingCache
from minipaged.tiers import replacement


@dataclass(frozen=True)
class Room:
    """What a request needs to enter.

    Args:
        seq_ids: Its sequences.
        lengths: Slots that each takes at once.
        num_common: How many first tokens all of them have in common; 0 for a single sequence.
        num_output_tokens: How many more tokens each will generate at most.
    """

    seq_ids: list[int]
    lengths: list[int]
    num_common: int
    num_output_tokens: int


class Cache(Protocol):
    """What the scheduler asks of a cache."""

    def can_admit(self, room: Room, headroom: int = 0) -> bool:
        """Return whether there is room, with ``headroom`` blocks left over for those that run."""
        ...

    def shortage(self, room: Room, headroom: int = 0) -> str:
        """Say in numbers what is missing."""
        ...

    def allocate(self, room: Room) -> list[int]:
        """Take the slots; return how many first tokens each sequence need not compute."""
        ...

    def can_append(self, seq_ids: Sequence[int]) -> bool:
        """Return whether each of the sequences can have one more slot."""
        ...

    def append(self, seq_id: int) -> int:
        """Take the slot of a sequence's next token and return it."""
        ...

    def slots(self, seq_id: int, start: int, stop: int) -> list[int]:
        """Return the slots of tokens ``start`` to ``stop - 1``."""
        ...

    def free(self, seq_id: int) -> None:
        """Take everything back from a sequence."""
        ...

    def waste(self, output_lengths: dict[int, int] | None = None) -> Waste:
        """Count slots by kind."""
        ...

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a new sequence share all slots of another."""
        ...

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the block copies to make before the next write."""
        ...

    def note_computed(self, seq_id: int, num_tokens: int, token_ids: list[int]) -> None:
        """Hear that the first ``num_tokens`` of a sequence's tokens have their keys and values."""
        ...

    def swap_out(self, seq_ids: Sequence[int]) -> tuple["Swapped", list[int]]:
        """Free some sequences, but note how their blocks hang together."""
        ...

    def num_blocks_of(self, seq_ids: Sequence[int]) -> int:
        """Return how many blocks some sequences have; one that they share counts once."""
        ...

    def can_swap_in(self, swapped: "Swapped", headroom: int = 0) -> bool:
        """Return whether the blocks to bring sequences back are free."""
        ...

    def swap_in(self, swapped: "Swapped") -> list[tuple[int, int]]:
        """Bring sequences back in new blocks."""
        ...


@dataclass
class PartialTable(BlockTable):
    """A block table whose first blocks may have been given back.

    Their ids stay in ``block_ids`` to keep the places of the others, but the blocks are somebody else's by now.

    Example:
        >>> table = PartialTable(block_size=4, block_ids=[7, 2, 5], num_tokens=10, num_released=1)
        >>> table.owned_block_ids, table.slot(6)
        ([2, 5], 10)
    """

    num_released: int = 0

    @property
    def owned_block_ids(self) -> list[int]:
        """Return the blocks that the sequence still has."""
        return self.block_ids[self.num_released :]

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.block_ids) == num_blocks_for(self.num_tokens, self.block_size)
        assert 0 <= self.num_released <= len(self.block_ids)
        assert len(set(self.owned_block_ids)) == len(self.owned_block_ids), "a block stands twice in one table"


@dataclass
class Swapped:
    """The block tables of a request that was swapped out, with places in its swap space instead of block ids.

    The space has ``num_blocks`` places. One that several tables name is a shared block, which moves once.
    """

    num_blocks: int
    tables: dict[int, PartialTable] = field(default_factory=dict)

    @property
    def used_places(self) -> list[int]:
        """Return the places that a living sequence needs, each once."""
        return list(dict.fromkeys(place for table in self.tables.values() for place in table.owned_block_ids))


class BatchingCache(SharingCache):
    """Rung 3's cache without promises.

    Changes of rung 3: nothing is promised. A request enters if the blocks of its present tokens are free, so far
    more requests run at once; when one then finds no block for its next token, the scheduler sends another away.
    Blocks that have left every layer's window can be given back (`release_before`), and the blocks of a request can
    be noted down and given up, to be found again elsewhere (`swap_out`, `swap_in`).

    Invariants:
        A block's count is the number of tables that own it.

    Example:
        S = 4. A request of 6 tokens enters, forks, and its two sequences leave and return together.

        >>> cache = BatchingCache(num_blocks=8, block_size=4)
        >>> cache.allocate(Room([7], [6], num_common=0, num_output_tokens=9))
        [0]
        >>> cache.fork(7, 9)
        >>> cache.can_append([7, 9]), cache.append(7), cache.append(9), cache.take_copies()
        (True, 10, 6, [(1, 2)])
        >>> swapped, block_ids = cache.swap_out([7, 9])
        >>> block_ids, cache.pool.num_free, swapped.tables[9].block_ids
        ([0, 2, 1], 8, [0, 2])
        >>> cache.swap_in(swapped), cache.tables[7].block_ids, cache.tables[9].block_ids
        ([(0, 3), (1, 4), (2, 5)], [3, 4], [3, 5])
    """

    tables: dict[int, PartialTable]

    def __init__(self, num_blocks: int, block_size: int, window: int | None = None):
        super().__init__(num_blocks, block_size)
        self.window = window  # tokens that a layer sees at most, the newest among them; None where one sees all

    # -- who enters

    def num_blocks_needed(self, room: Room) -> int:
        """Return how many blocks a request takes: full blocks of what its sequences have in common count once."""
        size = self.pool.block_size
        shared = self._num_shared(room) // size
        return sum(num_blocks_for(length, size) - shared for length in room.lengths) + shared

    def can_admit(self, room: Room, headroom: int = 0) -> bool:
        """Return whether the blocks of all present tokens are free, and ``headroom`` more."""
        return self.num_blocks_needed(room) + headroom <= self.pool.num_free

    def shortage(self, room: Room, headroom: int = 0) -> str:
        """Say how many blocks are needed and how many are free."""
        spare = f" and {headroom} to spare" if headroom else ""
        return f"needs {self.num_blocks_needed(room)} blocks{spare}, {self.pool.num_free} are free"

    def allocate(self, room: Room) -> list[int]:
        """Make a block table for each sequence; return how many first tokens each shares with the first.

        Raises:
            AccountingError: The blocks are not free. Nothing is taken then.
        """
        if not self.can_admit(room):
            raise AccountingError(f"sequence {room.seq_ids[0]} {self.shortage(room)}")
        num_shared = self._num_shared(room)
        first = room.seq_ids[0]
        for seq_id, length in zip(room.seq_ids, room.lengths, strict=True):
            assert seq_id not in self.tables
            if seq_id == first:
                self.tables[seq_id] = PartialTable(self.pool.block_size)
            else:
                self._share(self.tables[first], seq_id, num_shared)
            self._extend_to(self.tables[seq_id], length)
        return [0] + [num_shared] * (len(room.seq_ids) - 1)

    def _num_shared(self, room: Room) -> int:
        """Return the common tokens that fill whole blocks."""
        common = min(room.num_common, *room.lengths)
        return common // self.pool.block_size * self.pool.block_size

    def _extend_to(self, table: PartialTable, length: int) -> None:
        missing = num_blocks_for(length, table.block_size) - len(table.block_ids)
        table.block_ids += [self.pool.allocate() for _ in range(missing)]
        table.num_tokens = length

    def _share(self, parent: PartialTable, child_id: int, num_tokens: int) -> None:
        block_ids = parent.block_ids[: num_blocks_for(num_tokens, parent.block_size)]
        for block_id in block_ids[parent.num_released :]:
            self.pool.share(block_id)
        self.tables[child_id] = PartialTable(parent.block_size, block_ids, num_tokens, parent.num_released)

    # -- growing, forking, leaving

    def can_append(self, seq_ids: Sequence[int]) -> bool:
        """Return whether each of the sequences can have one more slot, copies of shared blocks included."""
        is_plenty = len(seq_ids) <= self.pool.num_free  # nobody takes more than one
        return is_plenty or self.num_blocks_for_next(seq_ids) <= self.pool.num_free

    def num_blocks_for_next(self, seq_ids: Sequence[int]) -> int:
        """Return how many blocks are taken when each of the sequences gets one more slot.

        Of r sequences that share a part-full block the first r - 1 to write copy it, and the last writes in place.
        """
        need = 0
        writers: Counter[int] = Counter()
        for seq_id in seq_ids:
            table = self.tables[seq_id]
            if table.needs_block:
                need += 1
            elif self.pool.num_references(table.block_ids[-1]) > 1:
                writers[table.block_ids[-1]] += 1
        return need + sum(min(count, self.pool.num_references(block) - 1) for block, count in writers.items())

    def append(self, seq_id: int) -> int:
        """Take the sequence's next slot; take a block first where the last is full, or copy it where it is shared."""
        table = self.tables[seq_id]
        if table.needs_block:
            table.block_ids.append(self.pool.allocate())
        else:
            (replacement("prepare_write") or type(self).prepare_write)(self, seq_id)
        table.num_tokens += 1
        return table.slot(table.num_tokens - 1)

    def slots(self, seq_id: int, start: int, stop: int) -> list[int]:
        """Return the slots of tokens ``start`` to ``stop - 1``."""
        return self.tables[seq_id].slots(start, stop)

    def block_ids(self, seq_id: int) -> list[int]:
        """Return a sequence's blocks as a GPU reads them: those that were given back are marked as unused."""
        table = self.tables[seq_id]
        return [UNUSED_BLOCK] * table.num_released + table.owned_block_ids

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a new sequence share all blocks of another."""
        self._share(self.tables[parent_id], child_id, self.tables[parent_id].num_tokens)

    def free(self, seq_id: int) -> None:
        """Give a sequence's references back, the last block first."""
        for block_id in reversed(self.tables.pop(seq_id).owned_block_ids):
            self.pool.free(block_id)
        self._forget_copies()

    def note_computed(self, seq_id: int, num_tokens: int, token_ids: list[int]) -> None:
        """Give back the blocks that no layer will look at again: the next token sees ``window`` with itself."""
        if self.window is not None:
            self.release_before(seq_id, num_tokens - self.window + 1)

    def release_before(self, seq_id: int, token: int) -> None:
        """Give back the blocks whose tokens all stand before ``token``: no layer will look at them again."""
        table = self.tables[seq_id]
        while (table.num_released + 1) * table.block_size <= token:
            self.pool.free(table.block_ids[table.num_released])
            table.num_released += 1

    # -- leaving and coming back

    def swap_out(self, seq_ids: Sequence[int]) -> tuple[Swapped, list[int]]:
        """Free some sequences; return how their blocks hung together, and the ids of the blocks, each once.

        Invariants:
            Entry i of the ids goes to place i of the swap space. The caller copies them out before anybody writes.
        """
        place_of = {block_id: place for place, block_id in enumerate(self._owned(seq_ids))}
        swapped = Swapped(len(place_of))
        for seq_id in seq_ids:
            table = self.tables[seq_id]
            places = [0] * table.num_released + [place_of[block_id] for block_id in table.owned_block_ids]
            swapped.tables[seq_id] = PartialTable(table.block_size, places, table.num_tokens, table.num_released)
            self.free(seq_id)
        return swapped, list(place_of)

    def num_blocks_of(self, seq_ids: Sequence[int]) -> int:
        """Return how many blocks some sequences have; one that they share counts once."""
        return len(self._owned(seq_ids))

    def _owned(self, seq_ids: Sequence[int]) -> dict[int, None]:
        return dict.fromkeys(block_id for seq_id in seq_ids for block_id in self.tables[seq_id].owned_block_ids)

    def can_swap_in(self, swapped: Swapped, headroom: int = 0) -> bool:
        """Return whether the blocks to bring sequences back are free, and ``headroom`` more."""
        return len(swapped.used_places) + headroom <= self.pool.num_free

    def swap_in(self, swapped: Swapped) -> list[tuple[int, int]]:
        """Bring sequences back in new blocks; return (place in the swap space, block id) of each block to copy.

        Raises:
            AccountingError: The blocks are not free. Nothing is taken then.
        """
        if not self.can_swap_in(swapped):
            raise AccountingError(f"{len(swapped.used_places)} blocks are needed, {self.pool.num_free} are free")
        block_at = {place: self.pool.allocate() for place in swapped.used_places}
        is_first = dict.fromkeys(block_at, True)
        for seq_id, table in swapped.tables.items():
            for place in table.owned_block_ids:
                if not is_first[place]:
                    self.pool.share(block_at[place])
                is_first[place] = False
            table.block_ids = [block_at.get(place, place) for place in table.block_ids]
            self.tables[seq_id] = table
        return list(block_at.items())

    def count_references(self) -> Counter[int]:
        """Return how many tables own each block; one that was given back is somebody else's."""
        return Counter(block_id for table in self.tables.values() for block_id in table.owned_block_ids)

    def check(self) -> None:
        """Assert the invariants. There are no promises to check."""
        self.check_blocks()
