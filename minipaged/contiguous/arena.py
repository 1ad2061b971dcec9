"""Who owns which slots of the arena: one dense range per sequence, as long as the longest sequence may get."""

from dataclasses import dataclass

from minipaged.contiguous.buddy import BuddyAllocator
from minipaged.errors import AccountingError, UserError
from minipaged.tiers import replacement


@dataclass(frozen=True)
class Waste:
    """Where a cache's slots went, in slots.

    Args:
        token_states: Slots that hold the key and value of a token.
        reserved: Slots that are promised to a running sequence and empty. Some will be used; which ones is not
            known before the sequence ends, so slots that never will be used are counted here too, unless the
            caller of ``waste`` gives the true output lengths.
        internal: Slots given to a running sequence that it will never use.
        external: Slots that an allocator's rounding of sizes keeps from everybody.
    """

    token_states: int
    reserved: int
    internal: int
    external: int


RESERVATIONS = ("max", "pow2", "oracle")
"""How much a sequence reserves: the longest length there is, its prompt and the next power of two of its output, or
just what it will use. The first is what an engine can do; the others know the output's length in part or wholly."""


@dataclass
class Reservation:
    """A sequence's range of slots, ``start`` to ``start + length``, of which the first ``num_tokens`` are written.

    ``num_reserved`` of them were asked for; the rest is the allocator's rounding.
    """

    start: int
    length: int
    num_reserved: int
    num_prompt_tokens: int
    num_tokens: int


class Arena:
    """Give each sequence one dense range of slots, when it enters and for as long as it stays.

    Args:
        num_slots: Slots of the arena.
        max_model_len: Most tokens of a sequence; the arena's size where that is smaller.
        reservation: One of `RESERVATIONS`.

    Invariants:
        Ranges of two sequences do not overlap, and a sequence never leaves its own. `check` tests it.

    Source:
        The baselines of the PagedAttention paper: static batches with ``max`` are FasterTransformer; under a
        scheduler that works step by step the three are Orca (Max), Orca (Pow2) and Orca (Oracle).

    Example:
        Limit 8, and a prompt of 5 tokens whose answer will have 2. At 2 the next power of two is 2 as well.

        >>> arena = Arena(num_slots=16, max_model_len=8, reservation="max")
        >>> arena.allocate(7, num_prompt_tokens=5, num_output_tokens=2), arena.append(7)
        (0, 5)
        >>> arena.waste()
        Waste(token_states=6, reserved=2, internal=0, external=0)
        >>> arena.waste({7: 2})
        Waste(token_states=6, reserved=1, internal=1, external=0)
        >>> arena = Arena(num_slots=16, max_model_len=8, reservation="oracle")
        >>> arena.allocate(7, num_prompt_tokens=4, num_output_tokens=1)
        0
        >>> arena.waste({7: 1})
        Waste(token_states=4, reserved=1, internal=0, external=3)
    """

    def __init__(self, num_slots: int, max_model_len: int, reservation: str = "max"):
        if num_slots < 1:
            raise UserError(f"the cache must have at least 1 slot, not {num_slots}")
        if reservation not in RESERVATIONS:
            raise UserError(f"reservation must be one of {', '.join(RESERVATIONS)}, not {reservation!r}")
        self.num_slots = num_slots
        self.reservation = reservation
        self.buddy = (replacement("allocator") or BuddyAllocator)(num_slots)
        largest_range = 1 << (num_slots.bit_length() - 1)  # that is all one sequence can get
        self.limit = min(max_model_len, largest_range)
        self.ranges: dict[int, Reservation] = {}

    @property
    def seq_ids(self) -> list[int]:
        """Return the sequences that have a range."""
        return list(self.ranges)

    @property
    def used_slots(self) -> int:
        """Return the slots of all ranges, written or not."""
        return sum(own.length for own in self.ranges.values())

    def slots_to_reserve(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Return how many slots the policy reserves.

        Example:
            >>> for policy in RESERVATIONS:
            ...     print(policy, Arena(4096, 2048, policy).slots_to_reserve(161, 25))
            max 2048
            pow2 193
            oracle 186
        """
        output = BuddyAllocator.rounded(num_output_tokens) if self.reservation == "pow2" else num_output_tokens
        return self.limit if self.reservation == "max" else min(num_prompt_tokens + output, self.limit)

    def can_admit(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """Return whether a range that is large enough is free."""
        return self.buddy.can_allocate(self.slots_to_reserve(num_prompt_tokens, num_output_tokens))

    def allocate(self, seq_id: int, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Reserve a range for a sequence, count its prompt as written, and return the first slot.

        Raises:
            AccountingError: The prompt is longer than the reservation, or no range is free. Nothing is taken then.
        """
        assert seq_id not in self.ranges
        wanted = self.slots_to_reserve(num_prompt_tokens, num_output_tokens)
        if num_prompt_tokens > wanted:
            raise AccountingError(f"{num_prompt_tokens} tokens do not fit into a reservation of {wanted} slots")
        start = self.buddy.allocate(wanted)
        if start is None:
            raise AccountingError(f"no range of {wanted} slots is free in the arena of {self.num_slots}")
        length = self.buddy.allocated[start]
        if length < wanted or start % length or start + length > self.num_slots:
            self.buddy.free(start)
            raise AccountingError(
                f"the allocator gave slots {start} to {start + length - 1} for {wanted}; a range must be as long, lie "
                "in the arena, and begin at a multiple of its length, since attention reads ranges of one size as rows"
            )
        self.ranges[seq_id] = Reservation(start, length, wanted, num_prompt_tokens, num_prompt_tokens)
        return start

    def append(self, seq_id: int) -> int:
        """Take the sequence's next slot and return it."""
        own = self.ranges[seq_id]
        if own.num_tokens == own.num_reserved:
            raise AccountingError(f"sequence {seq_id} has filled its reservation of {own.num_reserved} slots")
        own.num_tokens += 1
        return own.start + own.num_tokens - 1

    def free(self, seq_id: int) -> None:
        """Give a sequence's range back. Its slots keep what was written, but nobody may read it."""
        self.buddy.free(self.ranges.pop(seq_id).start)

    def waste(self, output_lengths: dict[int, int] | None = None) -> Waste:
        """Count the slots of the running sequences by kind.

        Args:
            output_lengths: Tokens that each sequence will have generated when it ends. Without them the empty
                slots of a reservation are all counted as reserved.
        """
        own = self.ranges
        token_states = sum(each.num_tokens for each in own.values())
        empty = sum(each.num_reserved - each.num_tokens for each in own.values())
        external = sum(each.length - each.num_reserved for each in own.values())
        if output_lengths is None:
            return Waste(token_states, empty, 0, external)
        used_later = sum(
            min(each.num_prompt_tokens + output_lengths[seq_id], each.num_reserved) - each.num_tokens
            for seq_id, each in own.items()
        )
        return Waste(token_states, used_later, empty - used_later, external)

    def check(self) -> None:
        """Assert the invariants."""
        self.buddy.check()
        assert {own.start: own.length for own in self.ranges.values()} == self.buddy.allocated
        for own in self.ranges.values():
            assert 0 < own.num_prompt_tokens <= own.num_tokens <= own.num_reserved <= own.length
