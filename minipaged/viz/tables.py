"""Drawings of block tables for the terminal: one with its tokens, or several side by side."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from minipaged.viz.drawing import Drawing, Line, Span
from minipaged.viz.marks import SHARED, slot_bar
from minipaged.viz.views import TableView, hue, letter


def draw_block_table(
    table: TableView,
    block_size: int,
    token_texts: Sequence[str] | None = None,
    width: int = 80,
    max_rows: int = 12,
) -> Drawing:
    """Draw one block table: which block of the pool holds which tokens of the sequence.

    Args:
        table: The table at one moment.
        block_size: Slots in a block.
        token_texts: The text of each token in the cache, to stand beside its block.
        width: Columns to use.
        max_rows: A longer table has runs of neighbouring full blocks in one row; if that is still too long, the
            middle is left out, and the drawing says so.

    Example:
        >>> print(draw_block_table(TableView(0, (7, 2, 5), 10), block_size=4))
        block table of A: 10 tokens in 3 blocks, 2 slots empty
        index  block  slots
            0      7  AAAA
            1      2  AAAA
            2      5  AA__
    """
    num_blocks = len(table.block_ids)
    num_empty = num_blocks * block_size - table.num_tokens
    heading = (
        f"block table of {letter(table.seq_id)}: {table.num_tokens} tokens in {num_blocks} blocks, "
        f"{num_empty} slots empty"
    )
    runs = _runs([table], block_size, (), max_rows)
    lines = [
        (*index, *cell) for index, cell in zip(_indices(runs), _columns([table], runs, block_size)[0], strict=True)
    ]
    for row, run in enumerate(runs if token_texts else [], start=1):
        pieces = (token_texts or ())[run.first * block_size : min((run.last + 1) * block_size, table.num_tokens)]
        text = "" if run.is_left_out else _one_line(pieces, width - _length(lines[row]) - 2)
        lines[row] = (*lines[row], Span("  " + text))
    return Drawing(((Span(heading, hue(table.seq_id)),), *lines))


def draw_block_tables(
    tables: Sequence[TableView],
    block_size: int,
    shared_ids: Collection[int] = (),
    width: int = 80,
    max_rows: int = 12,
) -> Drawing:
    """Draw block tables side by side, as many in a row as fit: the same row is the same index in all of them.

    Args:
        tables: The tables at one moment.
        block_size: Slots in a block.
        shared_ids: The blocks that several tables hold; they are marked in the place of the sequence's letter.
        width: Columns to use.
        max_rows: Rows of a longer table are put together or left out as in `draw_block_table`.

    Example:
        Two continuations of 6 tokens: the first block is shared, the second was copied at the first write.

        >>> print(draw_block_tables([TableView(0, (7, 5), 7), TableView(1, (7, 2), 7)], 4, {7}, width=40))
        2 block tables
               A: 7 tokens   B: 7 tokens
        index  block  slots  block  slots
            0      7  ####       7  ####
            1      5  AAA_       2  BBB_
    """
    runs = _runs(tables, block_size, shared_ids, max_rows)
    indices = _indices(runs)
    columns = _columns(tables, runs, block_size, shared_ids)
    for table, column in zip(tables, columns, strict=True):
        column.insert(0, (Span("  "), Span(f"{letter(table.seq_id)}: {table.num_tokens} tokens", hue(table.seq_id))))
    indices.insert(0, (Span(" " * _length(indices[0])),))
    column_width = max(_length(cell) for column in columns for cell in column)
    per_row = max(1, (width - _length(indices[0])) // column_width)
    lines: list[Line] = [(Span(f"{len(tables)} block tables"),)]
    for first in range(0, len(columns), per_row):
        for index, *cells in zip(indices, *columns[first : first + per_row], strict=True):
            lines.append((*index, *(span for cell in cells for span in _padded(cell, column_width))))
    return Drawing(tuple(lines))


@dataclass(frozen=True)
class _Run:
    """Indices of block tables that have one row of a drawing."""

    first: int
    last: int
    is_left_out: bool = False

    @property
    def length(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        if self.is_left_out:
            return "..."
        return str(self.first) if self.length == 1 else f"{self.first}-{self.last}"


def _runs(tables: Sequence[TableView], block_size: int, shared_ids: Collection[int], max_rows: int) -> list[_Run]:
    """Return the rows of a drawing, at most ``max_rows`` but never fewer than 3: both ends and the gap."""
    num_rows, max_rows = max((len(table.block_ids) for table in tables), default=0), max(3, max_rows)
    runs = [_Run(index, index) for index in range(num_rows)]
    if len(runs) <= max_rows:
        return runs
    joined = runs[:1]
    for run in runs[1:]:
        if all(_continues(table, run.first, block_size, shared_ids) for table in tables):
            joined[-1] = _Run(joined[-1].first, run.last)
        else:
            joined.append(run)
    if len(joined) <= max_rows:
        return joined
    head, tail = max_rows - max_rows // 2 - 1, len(joined) - max_rows // 2
    return [*joined[:head], _Run(joined[head].first, joined[tail - 1].last, is_left_out=True), *joined[tail:]]


def _continues(table: TableView, index: int, block_size: int, shared_ids: Collection[int]) -> bool:
    """Return whether an entry can stand in one row with the one before it.

    It can if it is full, has the next block of the pool and is shared like the other, or if the table has neither.
    """
    if index >= len(table.block_ids):
        return index > len(table.block_ids)
    before, block_id = table.block_ids[index - 1 : index + 1]
    is_full = table.filled(index, block_size) == block_size
    return is_full and before == block_id - 1 and (before in shared_ids) == (block_id in shared_ids)


def _indices(runs: Sequence[_Run]) -> list[Line]:
    """Return the column of indices under its name."""
    texts = ["index", *map(str, runs)]
    width = max(map(len, texts))
    return [(Span(f"{text:>{width}}"),) for text in texts]


def _columns(
    tables: Sequence[TableView], runs: Sequence[_Run], block_size: int, shared_ids: Collection[int] = ()
) -> list[list[Line]]:
    """Return for each table its entries under their names, in columns of one width for the block ids."""
    entries = [[_entry(table, run, block_size, shared_ids) for run in runs] for table in tables]
    width = max(len(block) for column in entries for block, _ in [("block", ()), *column])
    names = ("block", (Span("slots"),))
    return [[(Span(f"  {block:>{width}}  "), *slots) for block, slots in [names, *column]] for column in entries]


def _entry(table: TableView, run: _Run, block_size: int, shared_ids: Collection[int]) -> tuple[str, Line]:
    """Return block id and slots of a table's entries ``run``; empty where the table ends before them."""
    block_ids = list(table.block_ids[run.first : run.last + 1])
    if not block_ids:
        return "", ()
    if run.is_left_out:
        return "", (Span(f"{len(block_ids)} more blocks"),)
    color, filled = hue(table.seq_id), table.filled(run.first, block_size)
    is_shared = block_ids[0] in shared_ids
    state = "shared" if is_shared else "filled"
    if len(block_ids) > 1:
        return f"{block_ids[0]}-{block_ids[-1]}", (Span(f"all {len(block_ids) * block_size} {state}", color),)
    if block_size > 32:
        return str(block_ids[0]), (Span(f"{filled} of {block_size} {state}", color),)
    mark = SHARED if is_shared else letter(table.seq_id)
    return str(block_ids[0]), tuple(slot_bar(mark, filled, block_size, color))


def _padded(line: Line, width: int) -> Line:
    return (*line, Span(" " * (width - _length(line))))


def _length(line: Iterable[Span]) -> int:
    return sum(len(span.text) for span in line)


def _one_line(pieces: Sequence[str], width: int) -> str:
    """Join token texts with ``|``, with line breaks and other controls made visible, and cut them to ``width``."""
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in "|".join(pieces))
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
