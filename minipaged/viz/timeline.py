"""What happened to each request at each step: recorded from the scheduler's events, or from the static loop."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from minipaged.batching.plan import Event

Kind = Literal["prefill", "decode", "wait", "idle", "preempt", "swapped"]


@dataclass(frozen=True)
class Cell:
    """What one row did in one step.

    Args:
        kind: "idle" is a seat in the batch that is kept and computes nothing; "preempt" is the step that sent the
            row away, "swapped" each step that its blocks lie in the swap space.
        num_tokens: Tokens computed.
        is_last: The row ended in this step.
    """

    kind: Kind
    num_tokens: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class TimelineRow:
    """A request, or one sequence of it. A cell is None before it came and after it left."""

    request_id: int
    seq_id: int | None
    cells: tuple[Cell | None, ...]

    @property
    def color_id(self) -> int:
        """Return the number that the row's hue goes by."""
        return self.request_id if self.seq_id is None else self.seq_id


@dataclass(frozen=True)
class TimelineView:
    """Rows of cells, a column for each step from ``first_step`` on.

    Example:
        A static batch of two: the second has to wait until the first has ended, and its seat is idle.

        >>> from minipaged.batching.plan import Event
        >>> timeline = Timeline()
        >>> for step, act, request_id, num_tokens in [
        ...     (1, "chunk", 0, 5), (1, "chunk", 1, 3), (2, "decode", 0, 1), (2, "decode", 1, 1), (2, "finish", 1, 0),
        ...     (3, "decode", 0, 1), (3, "finish", 0, 0), (3, "wait", 1, 0),
        ... ]:
        ...     timeline(Event(step, act, request_id, num_tokens=num_tokens))
        >>> view = timeline.view()
        >>> view.num_steps, view.num_tokens, view.num_idle
        (3, 11, 1)
    """

    rows: tuple[TimelineRow, ...]
    first_step: int = 1

    @property
    def num_steps(self) -> int:
        """Return how many steps there are."""
        return max((len(row.cells) for row in self.rows), default=0)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens were computed, of prompts and answers together."""
        return sum(cell.num_tokens for row in self.rows for cell in row.cells if cell)

    @property
    def num_idle(self) -> int:
        """Return how many cells are a seat that computes nothing."""
        return self.count("idle")

    @property
    def num_waiting(self) -> int:
        """Return how many cells wait for a seat, those in the swap space included."""
        return self.count("wait") + self.count("swapped") + self.count("preempt")

    def count(self, kind: str) -> int:
        """Return how many cells are of a kind."""
        return sum(cell.kind == kind for row in self.rows for cell in row.cells if cell)


class Timeline:
    """Record what a scheduler says: ``Scheduler(cache, listener=Timeline())``, or `watch` an engine.

    Events say who does something. Who waits behind the head of the queue, no event says; with the ``scheduler`` at
    hand its requests are looked up once a step.

    A static loop has no events. `watch` makes them from what the loop calls, by the same rules: "chunk" for a prompt,
    "decode" for a token, "finish" for an end. A sequence that has ended keeps its seat until its batch has: that is
    said by a "wait" after its "finish", and makes the cell idle.
    """

    def __init__(self, scheduler: Any = None) -> None:
        self.events: list[Event] = []
        self._scheduler = scheduler
        self._present: dict[int, list[int]] = {}  # by step, the requests that had come and not ended

    def __call__(self, event: "Event") -> None:
        """Take one event."""
        if self._scheduler is not None and event.step not in self._present:
            self._present[event.step] = list(self._scheduler.groups)
        self.events.append(event)

    def view(self, by_sequence: bool = False) -> TimelineView:
        """Return what was recorded so far: a row for each request, or for each sequence of it."""
        if not self.events:
            return TimelineView(())
        first, last = self.events[0].step, max(event.step for event in self.events)
        rows = _rows_of(self.events, by_sequence)
        at: dict[int, list[Event]] = {}
        for event in self.events:
            at.setdefault(event.step, []).append(event)
        for step in range(first, last + 1):
            for request_id in self._present.get(step, ()):
                if request_id in rows:
                    rows[request_id][0].arrive()
                else:
                    rows[request_id] = [_Row(request_id, None, [None] * (step - first), "waits")]
            for event in at.get(step, ()):
                for row in _meant(rows[event.request_id], event):
                    row.take(event)
            for row in _all(rows):
                row.end_step()
        ordered = sorted(_all(rows), key=lambda row: (row.request_id, row.seq_id or 0))
        return TimelineView(tuple(TimelineRow(row.request_id, row.seq_id, tuple(row.cells)) for row in ordered), first)


State = Literal["absent", "waits", "swapped", "runs", "ended"]


@dataclass
class _Row:
    """A row that grows by a cell a step. ``state`` is what it is between events."""

    request_id: int
    seq_id: int | None
    cells: list[Cell | None] = field(default_factory=list)
    state: State = "absent"
    kind: Kind | None = None  # of the step that is going on
    num_tokens: int = 0
    has_ended: bool = False

    def arrive(self) -> None:
        if self.state == "absent":
            self.state = "waits"

    def take(self, event: "Event") -> None:
        """Take one event of the running step."""
        if event.act in ("chunk", "decode"):
            self.state = "runs"
            self.kind = "prefill" if event.act == "chunk" else "decode"
            self.num_tokens += event.num_tokens
        elif event.act in ("admit", "resume"):
            self.state = "runs"
        elif event.act == "preempt":
            self.state, self.kind = "waits", "preempt"
        elif event.act == "swap" and self.state == "waits":  # one that is coming back runs already
            self.state = "swapped"
        elif event.act == "finish":
            self.has_ended |= self.state != "ended"
            self.state = "ended"
        elif event.act == "wait" and self.state == "ended":
            self.kind = "idle"
        elif event.act == "wait":
            self.arrive()

    def end_step(self) -> None:
        """Write down the step's cell."""
        at_rest: dict[State, Kind] = {"waits": "wait", "swapped": "swapped", "runs": "idle"}
        kind = self.kind or at_rest.get(self.state)
        if kind is None and self.has_ended:
            kind = "wait"  # it was dropped while it waited
        self.cells.append(Cell(kind, self.num_tokens, self.has_ended) if kind else None)
        self.kind, self.num_tokens, self.has_ended = None, 0, False


def _all(rows: dict[int, list[_Row]]) -> list[_Row]:
    return [row for own in rows.values() for row in own]


def _rows_of(events: "list[Event]", by_sequence: bool) -> dict[int, list[_Row]]:
    """Return empty rows for all that the events name, by request."""
    rows: dict[int, list[_Row]] = {}
    for event in events:
        own = rows.setdefault(event.request_id, [])
        if by_sequence and event.seq_id is not None and all(row.seq_id != event.seq_id for row in own):
            own.append(_Row(event.request_id, event.seq_id))
    for request_id, own in rows.items():
        if not own:  # nobody said which sequence
            own.append(_Row(request_id, None))
    return rows


def _meant(own: list[_Row], event: "Event") -> list[_Row]:
    """Return whom of a request's rows an event is about: the one it names, or all that are there."""
    if own[0].seq_id is None:
        # That one of a request's sequences has ended says nothing of the request: another event does.
        return [] if event.act == "finish" and event.seq_id is not None else own
    if event.seq_id is not None:
        return [row for row in own if row.seq_id == event.seq_id]
    present = [row for row in own if row.state not in ("absent", "ended")]
    return present or own[:1]
