"""Drawings of the memory as SVG, for notebooks and docs.

Same views, same hues: one per sequence, grey = free, hatched = shared, pale = taken but empty. Each function
returns an `Svg`, a string that a notebook shows as a picture. Equal views give equal strings.
"""

from collections.abc import Sequence
from itertools import groupby

from minipaged.viz.canvas import Canvas, Svg, legend, slot_bar
from minipaged.viz.views import CACHED_COLOR, FREE_GREY, ArenaView, Holders, PoolView, RangeView, TableView, hue, letter

_UNOWNED = "#FFFFFF"


def _block_fill(canvas: Canvas, view: PoolView, block_id: int, holders: Holders) -> str:
    """Return a block's colour: its sequence's, two colours hatched where tables share it, grey where it is free."""
    held = holders.get(block_id)
    if held is None:
        if block_id in view.cached_ids:
            return CACHED_COLOR
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
    canvas = Canvas(width, title)
    holders = view.holders()
    draw_blocks = _large_blocks if view.num_blocks <= 64 else _small_blocks
    y = draw_blocks(canvas, view, holders)
    notes = [(FREE_GREY, "free")]
    if view.cached_ids:
        notes.append((CACHED_COLOR, "free, content cached"))
    if any(len(held) > 1 for held in holders.values()):
        notes.append((canvas.hatch("#777777", "#FFFFFF"), "hatched = shared"))
    if len(holders.keys() | view.free_ids) < view.num_blocks:
        notes.append((_UNOWNED, "in use, in no table"))
    return canvas.finish(legend(canvas, y + 8, [table.seq_id for table in view.tables], notes))


def _large_blocks(canvas: Canvas, view: PoolView, holders: Holders) -> float:
    """Draw each block as a bar of slots over its id; return the height reached."""
    bar_width, bar_height, step_x, step_y = 64, 18, 72, 40
    columns = max(1, (canvas.width - 8) // step_x)
    for block_id in range(view.num_blocks):
        x, y = 8 + block_id % columns * step_x, 26 + block_id // columns * step_y
        fill = _block_fill(canvas, view, block_id, holders)
        filled = _filled(block_id, holders, view.block_size)
        slot_bar(canvas, (x, y, bar_width, bar_height), fill, filled, view.block_size)
        canvas.text(x + bar_width / 2, y + bar_height + 11, str(block_id), "middle")
    return 26 + -(-view.num_blocks // columns) * step_y - 6


def _small_blocks(canvas: Canvas, view: PoolView, holders: Holders) -> float:
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


def _look(canvas: Canvas, view: PoolView, block_id: int, holders: Holders) -> tuple[str, float]:
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
    canvas = Canvas(width, title)
    for x, name, anchor in ((48, "index", "end"), (108, "block", "end"), (124, "slots", "start")):
        canvas.text(x, 38, name, anchor)
    bar_width = min(width - 132, block_size * (20 if token_texts is None else 80))
    for index, block_id in enumerate(table.block_ids[:max_rows]):
        y, filled = 44 + index * 24, table.filled(index, block_size)
        canvas.text(48, y + 13, str(index), "end")
        canvas.text(108, y + 13, str(block_id), "end")
        slot_bar(canvas, (124, y, bar_width, 18), hue(table.seq_id), filled, block_size)
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
    canvas = Canvas(width, f"arena: {view.num_slots} slots, {num_reserved} reserved, {num_tokens} hold tokens")
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
    return canvas.finish(legend(canvas, 30 + rows * 28, [own.seq_id for own in view.ranges], notes))


def _arena_range(canvas: Canvas, box: tuple[float, float, float, float], slots: range, own: RangeView) -> None:
    """Draw what a row of ``slots`` holds of one range."""
    color = hue(own.seq_id)
    filled, reserved, end = (own.start + count for count in (own.num_tokens, own.num_reserved, own.length))
    whole = range(own.start, end)
    _band(canvas, box, slots, whole, "#FFFFFF")
    _band(canvas, box, slots, range(own.start, filled), color)
    _band(canvas, box, slots, range(filled, reserved), color, opacity=0.25)
    _band(canvas, box, slots, whole, None)


def _band(
    canvas: Canvas,
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
