"""A buddy allocator: ranges whose sizes are powers of two, each at a multiple of its size."""

from minipaged.tiers import declare_part

declare_part(
    "allocator",
    "class with the methods of BuddyAllocator and its ``allocated``, each range at a multiple of its size; "
    "read when an LLM with a contiguous cache is made",
)


class BuddyAllocator:
    """Hand out ranges of slots.

    A request is rounded up to a power of two. A larger free range is halved until it fits; the halves are each
    other's buddies, and two free buddies join again. The alignment is what the engine likes about it: all ranges of
    size s are rows of the arena seen as ``[num_slots / s, s]``.

    Invariants:
        Free and allocated ranges do not overlap and together cover the arena; no two free buddies stand apart.

    Cost:
        One step per doubling between the wanted size and the arena's, so at most log2(num_slots).

    Source:
        Knuth, The Art of Computer Programming, volume 1, section 2.5. The baseline of the PagedAttention paper.

    Example:
        >>> buddy = BuddyAllocator(16)
        >>> buddy.allocate(3), buddy.allocate(5), buddy.allocate(9)
        (0, 8, None)
        >>> buddy.free(0)
        >>> buddy.free(8)
        >>> buddy.allocate(9)
        0
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.allocated: dict[int, int] = {}  # start -> size
        self._free: dict[int, set[int]] = {1 << power: set() for power in range(num_slots.bit_length())}
        start = 0
        for size in sorted(self._free, reverse=True):  # 20 slots are a range of 16 and one of 4
            if num_slots & size:
                self._free[size].add(start)
                start += size

    @staticmethod
    def rounded(num_slots: int) -> int:
        """Return the size of the range that such a request gets."""
        return 1 << (num_slots - 1).bit_length()

    @property
    def largest_free(self) -> int:
        """Return the size of the largest free range."""
        return max((size for size, starts in self._free.items() if starts), default=0)

    def can_allocate(self, num_slots: int) -> bool:
        """Return whether a range of that many slots is free."""
        return self._fitting_size(num_slots) is not None

    def allocate(self, num_slots: int) -> int | None:
        """Take the lowest of the smallest free ranges that fit, and return its start; None if there is none."""
        size = self._fitting_size(num_slots)
        if size is None:
            return None
        start = min(self._free[size])
        self._free[size].remove(start)
        wanted = self.rounded(num_slots)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        self.allocated[start] = size
        return start

    def free(self, start: int) -> None:
        """Give a range back, and join it with its buddy as long as that is free too."""
        size = self.allocated.pop(start)
        while start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].add(start)

    def check(self) -> None:
        """Assert the invariants."""
        free = [(start, size) for size, starts in self._free.items() for start in starts]
        end = 0
        for start, size in sorted([*free, *self.allocated.items()]):
            assert start == end and start % size == 0, "ranges overlap, leave a gap, or are not aligned"
            end = start + size
        assert end == self.num_slots
        assert not any(start ^ size in self._free[size] for start, size in free), "two free buddies stand apart"

    def _fitting_size(self, num_slots: int) -> int | None:
        wanted = self.rounded(num_slots)
        return min((size for size, starts in self._free.items() if starts and size >= wanted), default=None)
