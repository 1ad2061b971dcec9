"""Drawings of the memory as text for the terminal."""

from collections.abc import Iterable, Sequence

from minipaged.viz.drawing import Drawing, Line, Span, merged
from minipaged.viz.marks import CACHED, EMPTY, FREE, LOST, MAX_NAMED, MIXED, NOTES, SHARED, UNOWNED, slot_bar
from minipaged.viz.tables import draw_block_table, draw_block_tables
from minipaged.viz.views import FREE_GREY, ArenaView, Holders, PoolView, hue, letter


def draw_pool(view: PoolView, width: int = 80, max_rows: int = 8) -> Drawing:
    """Draw every block of a pool.

    While all slots fit, each block stands with its id and one character a slot. Larger pools have one character a
    block, and still larger ones one character for 2, 4, 8, ... neighbouring blocks.

    Args:
        view: The pool at one moment.
        width: Columns to use.
        max_rows: Rows to use, heading and legend not counted.

    Cost:
        Reads each block once; the drawing has at most ``width * max_rows`` marks.

    Example:
        >>> from minipaged.viz.views import TableView
        >>> pool = PoolView(8, 4, (TableView(0, (7, 2, 5), 10),), frozenset({0, 1, 3, 4, 6}))
        >>> print(draw_pool(pool, width=40))
        pool: 8 blocks of 4 slots, 3 used, 5 free
        0 ....  1 ....  2 AAAA  3 ....  4 ....
        5 AA__  6 ....  7 AAAA
        A = sequence 0   . free   _ taken, empty
        >>> print(draw_pool(pool, width=40, max_rows=1))
        pool: 8 blocks of 4 slots, 3 used, 5 free
        0 ..A..a.A
        A = sequence 0   . free   a not full
    """
    id_width = len(str(view.num_blocks - 1))
    columns = max(1, (width + 2) // (id_width + view.block_size + 3))
    group = 1
    if columns * max_rows >= view.num_blocks and id_width + 1 + view.block_size <= width:
        rows = _block_rows(view, columns, id_width)
    else:
        columns, group = _fit(view.num_blocks, width - id_width - 1, max_rows)
        rows = _map_rows(view, columns, group, id_width)
    num_free = len(view.free_ids)
    cached = f" ({len(view.cached_ids)} of them cached)" if view.cached_ids else ""
    heading = (
        f"pool: {view.num_blocks} blocks of {view.block_size} slots, {view.num_blocks - num_free} used, "
        f"{num_free} free{cached}{_scale(group, 'blocks')}"
    )
    legend = _legend(rows, (table.seq_id for table in view.tables), NOTES, width)
    return Drawing(((Span(heading),), *rows, *legend))


def draw_arena(view: ArenaView, width: int = 80, max_rows: int = 8) -> Drawing:
    """Draw the contiguous rung's memory: what holds tokens, what is only reserved, what is free.

    Args:
        view: The arena at one moment.
        width: Columns to use.
        max_rows: Rows to use, heading and legend not counted. A character then stands for 2, 4, 8, ... slots.

    Example:
        >>> from minipaged.viz.views import RangeView
        >>> print(draw_arena(ArenaView(16, (RangeView(0, 0, 8, 7, 5), RangeView(1, 12, 4, 4, 4)))))
        arena: 16 slots, 11 reserved, 9 hold tokens
         0 AAAAA__-....BBBB
        A = sequence 0   B = sequence 1   . free   _ reserved, empty   - lost to rounding
    """
    label_width = len(str(view.num_slots))
    columns, group = _fit(view.num_slots, width - label_width - 1, max_rows)
    rows = []
    for start in range(0, view.num_slots, columns * group):
        stop = min(start + columns * group, view.num_slots)
        marks = [_arena_mark(view, i, min(i + group, stop)) for i in range(start, stop, group)]
        rows.append((Span(f"{start:>{label_width}} "), *merged(marks)))
    num_reserved = sum(own.num_reserved for own in view.ranges)
    num_tokens = sum(own.num_tokens for own in view.ranges)
    heading = (
        f"arena: {view.num_slots} slots, {num_reserved} reserved, {num_tokens} hold tokens{_scale(group, 'slots')}"
    )
    notes = NOTES | {EMPTY: "reserved, empty"}
    return Drawing(((Span(heading),), *rows, *_legend(rows, (own.seq_id for own in view.ranges), notes, width)))


def draw_view(view: PoolView | ArenaView, width: int = 80, max_rows: int = 8) -> Drawing:
    """Draw a cache's whole view: the arena, or the pool and its block tables, at most 8 of them."""
    if isinstance(view, ArenaView):
        return draw_arena(view, width, max_rows)
    drawing = draw_pool(view, width, max_rows)
    shared = frozenset(block_id for block_id, held in view.holders().items() if len(held) > 1)
    if len(view.tables) == 1:
        return drawing + draw_block_table(view.tables[0], view.block_size, width=width, max_rows=max_rows)
    if view.tables:
        drawing += draw_block_tables(view.tables[:MAX_NAMED], view.block_size, shared, width, max_rows)
    if len(view.tables) > MAX_NAMED:
        drawing += Drawing(((Span(f"and {len(view.tables) - MAX_NAMED} more block tables"),),))
    return drawing


def _fit(count: int, width: int, max_rows: int) -> tuple[int, int]:
    """Return columns, and how many things one character stands for, so that ``count`` fits into the rows.

    Both are powers of two: numbers at the left margin are then easy to add to.
    """
    columns = 1 << (max(1, width).bit_length() - 1)
    group = 1
    while columns * max(1, max_rows) * group < count:
        group *= 2
    return columns, group


def _scale(group: int, things: str) -> str:
    return f", {group} {things} a character" if group > 1 else ""


def _legend(rows: Iterable[Line], seq_ids: Iterable[int], notes: dict[str, str], width: int) -> list[Line]:
    """Return lines that explain the marks that occur in ``rows``, and no others."""
    marks = {mark for row in rows for span in row if span.color for mark in span.text}
    named = [seq_id for seq_id in seq_ids if {letter(seq_id), letter(seq_id).lower(), SHARED, MIXED} & marks]
    spans = [Span(f"{letter(seq_id)} = sequence {seq_id}   ", hue(seq_id)) for seq_id in named[:MAX_NAMED]]
    if len(named) > MAX_NAMED:
        spans.append(Span(f"and {len(named) - MAX_NAMED} more sequences   "))
    spans += [Span(f"{mark} {note}   ", FREE_GREY) for mark, note in notes.items() if mark in marks]
    spans += [Span(f"{mark} not full   ", FREE_GREY) for mark in sorted(marks) if mark.islower()][:1]
    lines: list[Line] = [()]
    for span in spans:
        used = sum(len(before.text) for before in lines[-1])
        if used and used + len(span.text.rstrip()) > width:
            lines.append(())
        lines[-1] += (span,)
    return lines


def _block_rows(view: PoolView, columns: int, id_width: int) -> list[Line]:
    """Return rows of blocks, each with its id and one character a slot."""
    holders = view.holders()
    rows = []
    for start in range(0, view.num_blocks, columns):
        row: list[Span] = []
        for block_id in range(start, min(start + columns, view.num_blocks)):
            row += [Span(f"{block_id:>{id_width}} "), *_block_slots(view, block_id, holders), Span("  ")]
        rows.append(tuple(row))
    return rows


def _block_slots(view: PoolView, block_id: int, holders: Holders) -> list[Span]:
    held = holders.get(block_id)
    if held is None:
        return [Span(_unheld_mark(view, (block_id,)) * view.block_size, FREE_GREY)]
    seq_id = held[0][0].seq_id
    mark = SHARED if len(held) > 1 else letter(seq_id)
    return slot_bar(mark, max(filled for _, filled in held), view.block_size, hue(seq_id))


def _unheld_mark(view: PoolView, block_ids: Sequence[int]) -> str:
    """Return the mark of blocks that stand in no table."""
    if not view.free_ids.issuperset(block_ids):
        return UNOWNED
    return FREE if view.cached_ids.isdisjoint(block_ids) else CACHED


def _map_rows(view: PoolView, columns: int, group: int, id_width: int) -> list[Line]:
    """Return rows of one character per ``group`` blocks."""
    holders = view.holders()
    rows = []
    for start in range(0, view.num_blocks, columns * group):
        stop = min(start + columns * group, view.num_blocks)
        marks = [_group_mark(view, range(i, min(i + group, stop)), holders) for i in range(start, stop, group)]
        rows.append((Span(f"{start:>{id_width}} "), *merged(marks)))
    return rows


def _group_mark(view: PoolView, block_ids: Sequence[int], holders: Holders) -> Span:
    """Return the one character for a run of blocks: a capital only where one sequence has filled every slot."""
    held = [holders[block_id] for block_id in block_ids if block_id in holders]
    if not held:
        return Span(_unheld_mark(view, block_ids), FREE_GREY)
    seq_ids = {table.seq_id for tables in held for table, _ in tables}
    first = min(seq_ids)
    if len(seq_ids) > 1:
        is_shared = any(len(tables) > 1 for tables in held)
        return Span(SHARED if is_shared else MIXED, hue(first), is_filled=True)
    is_full = len(held) == len(block_ids) and all(tables[0][1] == view.block_size for tables in held)
    return Span(letter(first) if is_full else letter(first).lower(), hue(first), is_filled=is_full)


def _arena_mark(view: ArenaView, start: int, stop: int) -> Span:
    """Return the mark of slots [start, stop): a letter if any holds a token, else whether any is reserved or lost."""
    for own in view.ranges:
        if own.start < stop and start < own.start + own.length:
            if start < own.start + own.num_tokens:
                return Span(letter(own.seq_id), hue(own.seq_id), is_filled=True)
            return Span(EMPTY if start < own.start + own.num_reserved else LOST, hue(own.seq_id))
    return Span(FREE, FREE_GREY)
