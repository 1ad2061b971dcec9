"""Rung 1's arena under this rung's scheduler: that pair is Orca."""

from collections.abc import Sequence

from minipaged.batching.cache import Room, Swapped
from minipaged.contiguous.arena import Arena
from minipaged.errors import AccountingError


class ArenaCache(Arena):
    """Give each sequence one dense range, reserved when it enters.

    A request holds its whole range from the start, so nobody ever runs out in the middle and nobody is sent away.
    Ranges cannot be shared, so a request has one sequence.

    Example:
        >>> cache = ArenaCache(num_slots=16, max_model_len=8)
        >>> cache.allocate(Room([7], [5], num_common=0, num_output_tokens=2)), cache.append(7), cache.block_ids(7)
        ([0], 5, range(0, 6))
        >>> cache.shortage(Room([8], [9], num_common=0, num_output_tokens=1))
        'needs a range of 8 slots, 8 of 16 slots are free in ranges of up to 8'
    """

    block_size = 1
    """A range is read as a block table whose blocks have one slot each, one after the other."""

    def can_admit(self, room: Room, headroom: int = 0) -> bool:
        """Return whether a range that is long enough is free. Those that run need none, so no headroom either."""
        return super().can_admit(room.lengths[0], room.num_output_tokens)

    def shortage(self, room: Room, headroom: int = 0) -> str:
        """Say which range is needed and what is free."""
        wanted = self.slots_to_reserve(room.lengths[0], room.num_output_tokens)
        num_free = self.num_slots - self.used_slots
        return (
            f"needs a range of {wanted} slots, {num_free} of {self.num_slots} slots are free in ranges of up to "
            f"{self.buddy.largest_free}"
        )

    def allocate(self, room: Room) -> list[int]:
        """Reserve a range.

        Raises:
            AccountingError: No range is free.
        """
        super().allocate(room.seq_ids[0], room.lengths[0], room.num_output_tokens)
        return [0]

    def can_append(self, seq_ids: Sequence[int]) -> bool:
        """Return True: the slots are reserved."""
        return True

    def slots(self, seq_id: int, start: int, stop: int) -> list[int]:
        """Return the slots of tokens ``start`` to ``stop - 1``."""
        first = self.ranges[seq_id].start
        return list(range(first + start, first + stop))

    def block_ids(self, seq_id: int) -> range:
        """Return the range as a block table."""
        own = self.ranges[seq_id]
        return range(own.start, own.start + own.num_tokens)

    def take_copies(self) -> list[tuple[int, int]]:
        """Return nothing: nothing is shared, so nothing is copied."""
        return []

    def fork(self, parent_id: int, child_id: int) -> None:
        """Refuse: a range belongs to one sequence."""
        raise AccountingError("a range of the arena cannot be shared")

    def note_computed(self, seq_id: int, num_tokens: int, token_ids: list[int]) -> None:
        """Do nothing: a range is given back as a whole."""

    def num_blocks_of(self, seq_ids: Sequence[int]) -> int:
        """Return 0: nobody is sent away, so there is nothing to weigh."""
        return 0

    def swap_out(self, seq_ids: Sequence[int]) -> tuple[Swapped, list[int]]:
        """Refuse: nobody is sent away from an arena."""
        raise AccountingError("a range of the arena is never swapped")

    def can_swap_in(self, swapped: Swapped, headroom: int = 0) -> bool:
        """Return False: nothing is ever swapped out."""
        return False

    def swap_in(self, swapped: Swapped) -> list[tuple[int, int]]:
        """Refuse: nothing is ever swapped out."""
        raise AccountingError("a range of the arena is never swapped")
