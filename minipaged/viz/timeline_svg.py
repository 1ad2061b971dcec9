"""The timeline of a batch as SVG."""

from collections.abc import Sequence
from itertools import groupby

from minipaged.viz.canvas import INK, TEXT_WIDTH, Canvas, Svg, legend
from minipaged.viz.timeline import Cell, TimelineView
from minipaged.viz.timeline_text import MARKS, heading, label, row_name, unit
from minipaged.viz.views import DECODE_COLOR, FREE_GREY, PREFILL_COLOR, WASTE_COLOR, hue

_FILLS: dict[str, str] = {
    "prefill": PREFILL_COLOR,
    "decode": DECODE_COLOR,
    "wait": "#FFFFFF",
    "idle": FREE_GREY,
    "preempt": WASTE_COLOR,
}


def draw_timeline_svg(view: TimelineView, width: int = 720) -> Svg:
    """Draw a timeline: dark is prefill, yellow decode, grey a seat that computes nothing, white waiting.

    A prefill says how many tokens it computed where the number fits. A bar at the right of a cell is the row's end.
    Steps that would be narrower than 10 go on below.

    Example:
        >>> from minipaged.viz.timeline import TimelineRow
        >>> cells = (Cell("prefill", 5), Cell("decode", 1), Cell("idle"), Cell("idle"))
        >>> picture = draw_timeline_svg(TimelineView((TimelineRow(0, None, cells),)))
        >>> picture.count(f'fill="{FREE_GREY}"')  # both are one shape, and the legend
        2
    """
    canvas = Canvas(width, heading(view))
    left = 16 + TEXT_WIDTH * max(len(text) for text in [unit(view), *map(row_name, view.rows)])
    step_width = min(36, max(10, int((width - left - 8) / max(1, view.num_steps))))
    per_band = max(1, int((width - left - 8) / step_width))
    y = 26.0
    for first in range(0, view.num_steps, per_band):
        steps = range(first, min(first + per_band, view.num_steps))
        y = _band(canvas, view, steps, (left, y, step_width))
    kinds = [kind for kind in MARKS if view.count(kind)]
    notes = [(_fill(canvas, kind), MARKS[kind][1]) for kind in kinds]
    if any(cell.is_last for row in view.rows for cell in row.cells if cell):
        notes.append((INK, "bar: the last token"))
    return canvas.finish(legend(canvas, y + 6, [], notes))


def _band(canvas: Canvas, view: TimelineView, steps: range, place: tuple[float, float, float]) -> float:
    """Draw all rows at some steps; return the height reached."""
    left, y, step_width = place
    canvas.text(left - 8, y + 12, unit(view), "end")
    every = 1 if step_width >= TEXT_WIDTH * len(str(view.first_step + steps[-1])) + 3 else 5
    for step in steps[::every]:
        canvas.text(left + (step - steps[0]) * step_width + 2, y + 12, str(view.first_step + step))
    y += 18
    for row in view.rows:
        canvas.rect(8, y + 3, 4, 12, hue(row.color_id))
        canvas.text(left - 8, y + 13, row_name(row), "end")
        _cells(canvas, row.cells[steps.start : steps.stop], (left, y, step_width))
        y += 22
    return y + 4


def _cells(canvas: Canvas, cells: Sequence[Cell | None], place: tuple[float, float, float]) -> None:
    """Draw a row. Neighbours of one kind are one shape."""
    left, y, step_width = place
    step = 0
    for kind, run in groupby(cells, key=lambda cell: cell and cell.kind):
        length = len(list(run))
        if kind is not None:
            canvas.rect(left + step * step_width, y, length * step_width, 18, _fill(canvas, kind))
            canvas.frame(left + step * step_width, y, length * step_width, 18)
            canvas.grid((left + (step + i) * step_width for i in range(1, length)), y, 18)
        step += length
    for step, cell in enumerate(cells):
        if cell is not None:
            _marks(canvas, cell, left + step * step_width, y, step_width)


def _marks(canvas: Canvas, cell: Cell, x: float, y: float, width: float) -> None:
    """Draw the end of a row and the number of tokens into a cell."""
    if cell.is_last:
        canvas.rect(x + width - 4, y, 4, 18, INK)
    number = label(cell)[1:]
    if number and TEXT_WIDTH * len(number) + (8 if cell.is_last else 2) <= width:
        canvas.text(x + width / 2 - 2 * cell.is_last, y + 13, number, "middle")


def _fill(canvas: Canvas, kind: str) -> str:
    return canvas.hatch(FREE_GREY, "#FFFFFF") if kind == "swapped" else _FILLS[kind]
