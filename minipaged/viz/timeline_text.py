"""The timeline of a batch as text for the terminal."""

from minipaged.viz.drawing import Drawing, Line, Span, merged
from minipaged.viz.timeline import Cell, TimelineRow, TimelineView
from minipaged.viz.views import DECODE_COLOR, FREE_GREY, PREFILL_COLOR, hue

MARKS: dict[str, tuple[str, str]] = {
    "prefill": ("p", "prefill"),
    "decode": ("d", "decode"),
    "wait": ("w", "waits"),
    "idle": ("_", "idle: has a seat, computes nothing"),
    "preempt": ("x", "preempted"),
    "swapped": ("s", "swapped out"),
}
"""Mark and note of each kind of cell."""


def draw_timeline(view: TimelineView, width: int = 80) -> Drawing:
    """Draw a timeline: a row for each request or sequence, a column for each step.

    While it fits, a number behind the mark says how many tokens were computed, where that is not one token of an
    answer. More steps than fit beside each other go on below.

    Args:
        view: What was recorded; see `Timeline`.
        width: Columns to use.

    Example:
        A static batch of two, and one that comes later: it has to wait until the longest of the batch has ended.

        >>> p, d, last, idle, wait = (
        ...     Cell("prefill", 5), Cell("decode", 1), Cell("decode", 1, True), Cell("idle"), Cell("wait")
        ... )
        >>> rows = ((p, d, d, d, last, None, None), (p, d, last, idle, idle, None, None), (wait,) * 5 + (p, last))
        >>> print(draw_timeline(TimelineView(tuple(TimelineRow(i, None, cells) for i, cells in enumerate(rows)))))
        timeline: 3 requests, 7 steps, 22 tokens computed, 2 idle, 5 waiting
        request  1  2  3  4  5  6  7
              0  p5 d  d  d  D
              1  p5 d  D  _  _
              2  w  w  w  w  w  p5 D
        p prefill   d decode   w waits   _ idle: has a seat, computes nothing
        in capitals: the last token
    """
    names = [row_name(row) for row in view.rows]
    left = max(map(len, [unit(view), *names]))
    longest = max((len(label(cell)) for row in view.rows for cell in row.cells), default=1)
    step_width = max(longest, len(str(view.first_step + view.num_steps - 1))) + 1
    per_band = view.num_steps
    if left + 2 + per_band * step_width > width:
        step_width, per_band = 1, max(10, (width - left - 2) // 10 * 10)
    lines: list[Line] = [(Span(heading(view)),)]
    for first in range(0, view.num_steps, max(1, per_band)):
        steps = range(first, min(first + per_band, view.num_steps))
        lines.append((Span(f"{unit(view):>{left}}  "), Span(_heads(view, steps, step_width))))
        for name, row in zip(names, view.rows, strict=True):
            cells = [span for step in steps for span in _cell(row.cells[step], step_width)]
            lines.append((Span(f"{name:>{left}}  ", hue(row.color_id)), *merged(cells)))
    return Drawing((*lines, *_legend(view, width)))


def unit(view: TimelineView) -> str:
    """Return what a row is."""
    return "sequence" if any(row.seq_id is not None for row in view.rows) else "request"


def row_name(row: TimelineRow) -> str:
    """Return what stands before a row."""
    return str(row.request_id) if row.seq_id is None else f"{row.request_id}/{row.seq_id}"


def heading(view: TimelineView) -> str:
    """Return the counts of a timeline in one line."""
    things = f"{len(view.rows)} {unit(view)}{'' if len(view.rows) == 1 else 's'}"
    return (
        f"timeline: {things}, {view.num_steps} steps, {view.num_tokens} tokens computed, "
        f"{view.num_idle} idle, {view.num_waiting} waiting"
    )


def label(cell: Cell | None) -> str:
    """Return a cell's mark, with the number of its tokens where that says more than the mark."""
    if cell is None:
        return ""
    number = str(cell.num_tokens) if cell.num_tokens > (cell.kind == "decode") else ""
    return _mark(cell) + number


def _mark(cell: Cell) -> str:
    mark = MARKS[cell.kind][0]
    return mark.upper() if cell.is_last else mark


def _cell(cell: Cell | None, step_width: int) -> tuple[Span, ...]:
    if cell is None:
        return (Span(" " * step_width),)
    text = label(cell) if step_width > 1 else _mark(cell)
    color = {"prefill": PREFILL_COLOR, "decode": DECODE_COLOR}.get(cell.kind)
    return Span(text, color or FREE_GREY, is_filled=color is not None), Span(" " * (step_width - len(text)))


def _heads(view: TimelineView, steps: range, step_width: int) -> str:
    """Return the numbers of the steps: of all, or of every tenth where a step is one character."""
    if step_width > 1:
        return "".join(f"{view.first_step + step:<{step_width}}" for step in steps)
    return "".join(f"{view.first_step + step:<10}" for step in steps[::10])


def _legend(view: TimelineView, width: int) -> list[Line]:
    """Explain the marks that occur."""
    notes = [f"{mark} {note}" for kind, (mark, note) in MARKS.items() if view.count(kind)]
    if any(cell.is_last for row in view.rows for cell in row.cells if cell):
        notes.append("in capitals: the last token")
    lines: list[str] = []
    for note in notes:
        if lines and len(lines[-1]) + 3 + len(note) <= width:
            lines[-1] += "   " + note
        else:
            lines.append(note)
    return [(Span(line, FREE_GREY),) for line in lines]
