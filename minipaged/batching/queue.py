"""Who waits, in the order of turns."""

import heapq
from collections.abc import Iterator

from minipaged.batching.group import Group


class WaitingQueue:
    """A heap of groups by their `Group.order`.

    A group that is aborted while it waits is only marked, and dropped when it comes to the front, or when those that
    are marked outnumber the others.

    Cost:
        The logarithm of the length for each call, on average.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Group]] = []
        self._num_gone = 0

    def push(self, group: Group) -> None:
        """Let a group wait; one that was sent away stands before all that came after it."""
        heapq.heappush(self._heap, (group.order, group))

    def first(self) -> Group | None:
        """Return whose turn it is, None if nobody waits."""
        while self._heap and self._heap[0][1].is_gone:
            heapq.heappop(self._heap)
            self._num_gone -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out the one that `first` returned."""
        heapq.heappop(self._heap)

    def note_gone(self) -> None:
        """Hear that one of those that wait was marked."""
        self._num_gone += 1
        if 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].is_gone]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def __iter__(self) -> Iterator[Group]:
        """Yield all that wait, in no particular order."""
        return (group for _, group in self._heap if not group.is_gone)
