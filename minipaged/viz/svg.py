"""The drawings of ``minipaged.viz`` as SVG, for notebooks and docs.

Same views, same hues: one per sequence, grey = free, hatched = shared, pale = taken but empty. Each function
returns an `Svg`, a string that a notebook shows as a picture. Equal views give equal strings.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from minipaged.viz.views import FREE_GREY, ArenaView, Holders, PoolView, RangeView, TableView, hue, letter

_FONT = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11"'
_INK = "#333333"
_INK_ON_HALO = f'fill="{_INK}" stroke="#FFFFFF" stroke-width="3" paint-order="stroke" xml:space="preserve"'
_UNOWNED = "#FFFFFF"
_CACHED = "#C9D8C5"


class Svg(str):
    """A picture's source that Jupyter shows as the picture."""

    def _repr_svg_(self) -> str:
        return str(self)


class _Canvas:
    """Collects shapes, the hatch patterns they need, and the picture's size."""

    def __init__(self, width: int, title: str) -> None:
        self.width, self.height, self.title = width, 0, title
        self._shapes: list[str] = []
        self._patterns: dict[str, str] = {}
        self.text(8, 16, title)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        faded = "" if opacity == 1.0 else f' fill-opacity="{opacity:g}"'
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{faded}/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{_INK}"/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {_INK_ON_HALO}>{escape(text)}</text>')

    def hatch(self, first: str, second: str) -> str:
        """Return a fill of slanted stripes in two colours. Its name is made of them, so equal names look equal."""
        name = f"hatch-{first[1:]}-{second[1:]}"
        self._patterns[name] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="{first}"/><rect width="3" height="6" fill="{second}"/></pattern>'
        )
        return f"url(#{name})"

    def finish(self, height: float) -> Svg:
        defs = "".join(self._patterns[name] for name in sorted(self._patterns))
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {height:g}" width="{self.width:g}" '
            f'height="{height:g}" role="img" {_FONT}><title>{escape(self.title)}</title><defs>{defs}</defs>'
            f'<rect width="100%" height="100%" fill="#FFFFFF"/>{"".join(self._shapes)}</svg>'
        )


def _legend(canvas: _Canvas, y: float, seq_ids: Sequence[int], others: Sequence[tuple[str, str]]) -> float:
    """Draw the swatches, wrapped to the picture's width; return the height reached."""
    named = [(hue(seq_id), f"{letter(seq_id)} = sequence {seq_id}") for seq_id in list(dict.fromkeys(seq_ids))[:8]]
    x = 8.0
    for fill, note in [*named, *others]:
        needed = 26 + 7 * len(note)
        if x > 8 and x + needed > canvas.width:
            x, y = 8.0, y + 18
        canvas.rect(x, y, 12, 12, fill)
        canvas.frame(x, y, 12, 12)
        canvas.text(x + 17, y + 10, note)
        x += needed
    return y + 20


def _block_fill(canvas: _Canvas, view: PoolView, block_id: int, holders: Holders) -> str:
    """Return a block's colour: its sequence's, two colours hatched where tables share it, grey where it is free."""
    held = holders.get(block_id)
    if held is None:
        if block_id in view.cached_ids:
            return _CACHED
        return FREE_GREY if block_id in view.free_ids else _UNOWNED
    first, *others = [hue(table.seq_id) for table, _ in held]
    if not others:
        return first
    return canvas.hatch(first, others[0] if others[0] != first else "#FFFFFF")


def _filled(block_id: int, holders: Holders, block_size: int) -> int:
    """Return the slots with tokens; a block in no table counts as full, so that it has one colour."""
    held = holders.get(block_id)
    return block_size if held is None else max(filled for _, filled in held)


def draw_pool_svg(view: PoolView, width: int = 720) -> Svg:
    """Draw every block of a pool: with its id and its slots up to 64 blocks, as small squares above that.

    Example:
        >>> pool = PoolView(8, 4, (TableView(0, (7, 2, 5), 10),), frozenset({0, 1, 3, 4, 6}))
        >>> picture = draw_pool_svg(pool)
        >>> picture.count('fill="#0072B2"'), picture.count('fill-opacity="0.25"')  # 3 blocks + legend; 1 part empty
        (5, 1)
    """
    num_used = view.num_blocks - len(view.free_ids)
    title = f"pool: {view.num_blocks} blocks of {view.block_size} slots, {num_used} used"
    canvas = _Canvas(width, title)
    holders = view.holders()
    draw_blocks = _large_blocks if view.num_blocks <= 64 else _small_blocks
    y = draw_blocks(canvas, view, holders)
    notes = [(FREE_GREY, "free")]
    if view.cached_ids:
        notes.append((_CACHED, "free, content cached"))
    if any(len(held) > 1 for held in holders.values()):
        notes.append((canvas.hatch("#777777", "#FFFFFF"), "hatched = shared"))
    if len(holders.keys() | view.free_ids) < view.num_blocks:
        notes.append((_UNOWNED, "in use, in no table"))
    return canvas.finish(_legend(canvas, y + 8, [table.seq_id for table in view.tables], notes))


def _large_blocks(canvas: _Canvas, view: PoolView, holders: Holders) -> float:
    """Draw each block as a bar of slots over its id; return the height reached."""
    bar_width, bar_height, step_x, step_y = 64, 18, 72, 40
    columns = max(1, (canvas.width - 8) // step_x)
    for block_id in range(view.num_blocks):
        x, y = 8 + block_id % columns * step_x, 26 + block_id // columns * step_y
        fill = _block_fill(canvas, view, block_id, holders)
        filled = _filled(block_id, holders, view.block_size)
        _slot_bar(canvas, (x, y, bar_width, bar_height), fill, filled, view.block_size)
        canvas.text(x + bar_width / 2, y + bar_height + 11, str(block_id), "middle")
    return 26 + -(-view.num_blocks // columns) * step_y - 6


def _slot_bar(canvas: _Canvas, box: tuple[float, float, float, float], fill: str, filled: int, block_size: int) -> None:
    """Draw one block: the part with tokens full, the empty part pale, lines between slots while they are few."""
    x, y, width, height = box
    used = width * filled / block_size
    if used:
        canvas.rect(x, y, used, height, fill)
    if used < width:
        canvas.rect(x + used, y, width - used, height, fill, opacity=0.25)
    for slot in range(1, block_size if block_size <= 16 else 0):
        canvas.rect(x + width * slot / block_size - 0.5, y, 1, height, "#FFFFFF")
    canvas.frame(x, y, width, height)


def _small_blocks(canvas: _Canvas, view: PoolView, holders: Holders) -> float:
    """Draw a square for each block and return the height reached.

    Neighbours that look the same are one shape under a grid of white lines: a pool of thousands stays a small file.
    """
    side, top, left = 10, 26, 8 + 7 * len(str(view.num_blocks)) + 6
    columns = max(8, (canvas.width - left - 8) // side // 8 * 8)
    for start in range(0, view.num_blocks, columns):
        y = top + start // columns * side
        block_ids = range(start, min(start + columns, view.num_blocks))
        canvas.text(left - 6, y + 9, str(start), "end")
        column = 0
        for (fill, opacity), run in groupby(_look(canvas, view, block_id, holders) for block_id in block_ids):
            length = len(list(run))
            canvas.rect(left + column * side, y, length * side, side, fill, opacity)
            column += length
        canvas.rect(left, y + side - 1, columns * side, 1, "#FFFFFF")
    bottom = top + -(-view.num_blocks // columns) * side
    for column in range(1, columns + 1):
        canvas.rect(left + column * side - 1, top, 1, bottom - top, "#FFFFFF")
    return bottom


def _look(canvas: _Canvas, view: PoolView, block_id: int, holders: Holders) -> tuple[str, float]:
    """Return fill and opacity of a small square: a block with empty slots is paler."""
    is_full = _filled(block_id, holders, view.block_size) == view.block_size
    return _block_fill(canvas, view, block_id, holders), 1.0 if is_full else 0.5


def draw_block_table_svg(
    table: TableView, block_size: int, token_texts: Sequence[str] | None = None, width: int = 720, max_rows: int = 64
) -> Svg:
    """Draw one block table: a row for each block, with its index, its id, its slots and the tokens in them.

    Args:
        table: The table at one moment.
        block_size: Slots in a block.
        token_texts: The text of each token in the cache, to stand in its slot.
        width: Width of the picture.
        max_rows: What a longer table has beyond them is left out, and the picture says so.

    Example:
        >>> picture = draw_block_table_svg(TableView(0, (7, 2, 5), 10), block_size=4)
        >>> picture.count("</text>")  # title, three column names, index and id of three blocks
        10
    """
    num_blocks = len(table.block_ids)
    title = f"block table of {letter(table.seq_id)}: {table.num_tokens} tokens in {num_blocks} blocks"
    canvas = _Canvas(width, title)
    for x, name, anchor in ((48, "index", "end"), (108, "block", "end"), (124, "slots", "start")):
        canvas.text(x, 38, name, anchor)
    bar_width = min(width - 132, block_size * (20 if token_texts is None else 80))
    for index, block_id in enumerate(table.block_ids[:max_rows]):
        y, filled = 44 + index * 24, table.filled(index, block_size)
        canvas.text(48, y + 13, str(index), "end")
        canvas.text(108, y + 13, str(block_id), "end")
        _slot_bar(canvas, (124, y, bar_width, 18), hue(table.seq_id), filled, block_size)
        texts = (token_texts or ())[index * block_size : index * block_size + filled]
        for slot, text in enumerate(texts):
            shown = repr(text)[1:-1][: max(1, int(bar_width / block_size) // 7)]
            canvas.text(124 + bar_width * (slot + 0.5) / block_size, y + 13, shown, "middle")
    y = 44 + min(num_blocks, max_rows) * 24
    if num_blocks > max_rows:
        canvas.text(124, y + 12, f"... {num_blocks - max_rows} more blocks")
        y += 20
    return canvas.finish(y + 4)


def draw_arena_svg(view: ArenaView, width: int = 720, rows: int = 1) -> Svg:
    """Draw the contiguous rung's memory as bands: tokens full, reserved but empty pale, lost to rounding white.

    Example:
        >>> arena = ArenaView(16, (RangeView(0, 0, 8, 7, 5), RangeView(1, 12, 4, 4, 4)))
        >>> draw_arena_svg(arena).count('fill-opacity="0.25"')  # the 2 slots that A has and does not fill
        1
    """
    num_reserved, num_tokens = sum(own.num_reserved for own in view.ranges), sum(own.num_tokens for own in view.ranges)
    canvas = _Canvas(width, f"arena: {view.num_slots} slots, {num_reserved} reserved, {num_tokens} hold tokens")
    row_slots = -(-view.num_slots // rows)
    for row in range(rows):
        slots = range(row * row_slots, min(view.num_slots, (row + 1) * row_slots))
        box = (8, 26 + row * 28, (width - 16) / row_slots, 22)
        _band(canvas, box, slots, slots, FREE_GREY)
        for own in view.ranges:
            _arena_range(canvas, box, slots, own)
    notes = [(FREE_GREY, "free")]
    if any(own.length > own.num_reserved for own in view.ranges):
        notes.append(("#FFFFFF", "lost to rounding"))
    return canvas.finish(_legend(canvas, 30 + rows * 28, [own.seq_id for own in view.ranges], notes))


def _arena_range(canvas: _Canvas, box: tuple[float, float, float, float], slots: range, own: RangeView) -> None:
    """Draw what a row of ``slots`` holds of one range."""
    color = hue(own.seq_id)
    filled, reserved, end = (own.start + count for count in (own.num_tokens, own.num_reserved, own.length))
    whole = range(own.start, end)
    _band(canvas, box, slots, whole, "#FFFFFF")
    _band(canvas, box, slots, range(own.start, filled), color)
    _band(canvas, box, slots, range(filled, reserved), color, opacity=0.25)
    _band(canvas, box, slots, whole, None)


def _band(
    canvas: _Canvas,
    box: tuple[float, float, float, float],
    slots: range,
    part: range,
    fill: str | None,
    opacity: float = 1.0,
) -> None:
    """Draw the slots of ``part`` that lie in the row; its frame only where ``fill`` is None."""
    left, y, slot_width, height = box
    start, stop = max(part.start, slots.start), min(part.stop, slots.stop)
    if start >= stop:
        return
    x, width = left + (start - slots.start) * slot_width, (stop - start) * slot_width
    if fill is None:
        canvas.frame(x, y, width, height)
    else:
        canvas.rect(x, y, width, height, fill, opacity)
