"""Who owns which slots of the arena: one dense range per sequence, as long as the longest sequence may get."""

from dataclasses import dataclass

from minipaged.errors import UserError


@dataclass(frozen=True)
class Waste:
    """Where a cache's slots went, in slots.

    Args:
        token_states: Slots that hold the key and value of a token.
        reserved: Slots that are promised to a running sequence and empty. Some will be used; which ones is not
            known before the sequence ends, so slots that never will be used are counted here too, unless the
            caller of ``waste`` gives the true output lengths.
        internal: Slots given to a running sequence that it will never use.
        external: Slots that no sequence has and no sequence can get.
    """

    token_states: int
    reserved: int
    internal: int
    external: int


@dataclass
class Reservation:
    """A sequence's range of slots, ``start`` to ``start + length``, of which the first ``num_tokens`` are written."""

    start: int
    length: int
    num_tokens: int


class Arena:
    """Cut one run of slots into rows of equal length and give each sequence a row.

    The row length is the limit of the engine, or the whole arena where that is shorter. Slots behind the last
    whole row are of no use to anybody and are not made.

    Invariants:
        A row belongs to one sequence or stands in the list of free rows, never both. `check` tests it.

    Example:
        >>> arena = Arena(num_slots=20, max_model_len=8)
        >>> arena.num_slots, arena.allocate(7, num_prompt_tokens=5), arena.allocate(9, num_prompt_tokens=2)
        (16, 0, 8)
        >>> arena.can_admit()
        False
        >>> arena.append(7)
        5
        >>> arena.waste()
        Waste(token_states=8, reserved=8, internal=0, external=0)
        >>> arena.waste({7: 2, 9: 1})
        Waste(token_states=8, reserved=2, internal=6, external=0)
    """

    def __init__(self, num_slots: int, max_model_len: int):
        if num_slots < 1:
            raise UserError(f"the cache must have at least 1 slot, not {num_slots}")
        self.row_length = min(num_slots, max_model_len)
        self.num_rows = num_slots // self.row_length
        self.ranges: dict[int, Reservation] = {}
        self._prompt_lengths: dict[int, int] = {}
        self._free_rows = list(range(self.num_rows - 1, -1, -1))  # taken from the end: row 0 first

    @property
    def num_slots(self) -> int:
        """Return the slots that exist."""
        return self.num_rows * self.row_length

    @property
    def used_slots(self) -> int:
        """Return the slots that are reserved, written or not."""
        return len(self.ranges) * self.row_length

    def can_admit(self) -> bool:
        """Return whether one more sequence finds a row."""
        return bool(self._free_rows)

    def allocate(self, seq_id: int, num_prompt_tokens: int) -> int:
        """Reserve a row for a sequence, count its prompt as written, and return the first slot."""
        if num_prompt_tokens > self.row_length:
            raise UserError(f"{num_prompt_tokens} tokens do not fit into a row of {self.row_length} slots")
        start = self._free_rows.pop() * self.row_length
        self.ranges[seq_id] = Reservation(start, self.row_length, num_prompt_tokens)
        self._prompt_lengths[seq_id] = num_prompt_tokens
        return start

    def append(self, seq_id: int) -> int:
        """Take the sequence's next slot and return it."""
        own = self.ranges[seq_id]
        if own.num_tokens == own.length:
            raise UserError(f"sequence {seq_id} has filled its row of {own.length} slots")
        own.num_tokens += 1
        return own.start + own.num_tokens - 1

    def free(self, seq_id: int) -> None:
        """Give a sequence's row back. Its slots keep what was written, but nobody may read it."""
        own = self.ranges.pop(seq_id)
        del self._prompt_lengths[seq_id]
        self._free_rows.append(own.start // self.row_length)

    def waste(self, output_lengths: dict[int, int] | None = None) -> Waste:
        """Count the slots of the running sequences by kind.

        Args:
            output_lengths: Tokens that each sequence will have generated when it ends. Without them the empty
                slots of a reservation are all counted as reserved.
        """
        token_states = sum(own.num_tokens for own in self.ranges.values())
        empty = self.used_slots - token_states
        if output_lengths is None:
            return Waste(token_states, empty, 0, 0)
        reserved = sum(
            self._prompt_lengths[seq_id] + output_lengths[seq_id] - own.num_tokens
            for seq_id, own in self.ranges.items()
        )
        return Waste(token_states, reserved, empty - reserved, 0)

    def check(self) -> None:
        """Assert the invariants."""
        owned = [own.start // self.row_length for own in self.ranges.values()]
        assert sorted(owned + self._free_rows) == list(range(self.num_rows)), "a row is lost or owned twice"
        assert self.ranges.keys() == self._prompt_lengths.keys()
        for own in self.ranges.values():
            assert own.start % self.row_length == 0 and 0 < own.num_tokens <= own.length == self.row_length
