"""The walk of the decode kernels over one sequence: who reads which tokens, from which blocks, in what order."""

from dataclasses import dataclass

from minipaged.viz.drawing import Drawing, Line, Span
from minipaged.viz.pieces import cut_before, piece_of, share_of
from minipaged.viz.views import TableView, hue, letter


@dataclass(frozen=True)
class SlotRun:
    """Slots ``start`` to ``stop - 1`` of one block."""

    block_id: int
    start: int
    stop: int


@dataclass(frozen=True)
class TileView:
    """One turn of a program's loop: tokens ``start`` to ``stop - 1`` are read, from ``runs``.

    ``piece`` counts the visible pieces from 0. ``ends_piece`` says that the piece's sum is folded, or written down,
    after this tile.
    """

    start: int
    stop: int
    runs: tuple[SlotRun, ...]
    piece: int
    ends_piece: bool


@dataclass(frozen=True)
class TileWalkView:
    """What the programs of one sequence and one KV head do. ``programs`` has the tiles of each, in its order."""

    table: TableView
    block_size: int
    tile_keys: int
    window: int | None
    programs: tuple[tuple[TileView, ...], ...]

    @property
    def first(self) -> int:
        """Return the first visible token."""
        return 0 if self.window is None else max(0, self.table.num_tokens - self.window)

    @property
    def num_tiles(self) -> int:
        """Return how many tiles all programs read."""
        return sum(map(len, self.programs))

    @property
    def num_pieces(self) -> int:
        """Return how many pieces are folded."""
        return sum(tile.ends_piece for tiles in self.programs for tile in tiles)


def view_tile_walk(
    table: TableView, block_size: int, tile_keys: int, num_programs: int = 1, window: int | None = None
) -> TileWalkView:
    """Return the walk of `paged_attention`, or of the splits of `ragged_paged_attention`, over one sequence.

    Args:
        table: Its block table, the newest token included.
        block_size: Slots in a block.
        tile_keys: ``launch.decode_tiles(q, group).keys``, a power of two.
        num_programs: Programs that share the sequence: ``launch.programs_per_row(rows, pieces)``. The kernel of rung
            2 has one.
        window: As for attention; None sees all.

    Example:
        Ten tokens in blocks of 4, read by one program in tiles of 8: the second tile has two tokens, from block 5.

        >>> walk = view_tile_walk(TableView(0, (7, 2, 5), 10), block_size=4, tile_keys=8)
        >>> [[(run.block_id, run.start, run.stop) for run in tile.runs] for tile in walk.programs[0]]
        [[(7, 0, 4), (2, 0, 4)], [(5, 0, 2)]]
    """
    num_tokens = table.num_tokens
    first = 0 if window is None else max(0, num_tokens - window)
    programs = []
    for program in range(num_programs):
        begin, end = share_of(first, num_tokens, program, num_programs)
        begin = max(begin, first // tile_keys * tile_keys)
        tiles = []
        for start in range(begin, end, tile_keys):
            stop = start + tile_keys
            seen = range(max(first, start), min(end, stop))
            runs = _slot_runs(table, block_size, seen)
            is_cut = cut_before(stop) == stop or stop >= end
            tiles.append(TileView(seen.start, seen.stop, runs, piece_of(start) - piece_of(first), is_cut))
        programs.append(tuple(tiles))
    return TileWalkView(table, block_size, tile_keys, window, tuple(programs))


def _slot_runs(table: TableView, block_size: int, tokens: range) -> tuple[SlotRun, ...]:
    """Return where some neighbouring tokens lie."""
    runs = []
    for index in range(tokens.start // block_size, -(-tokens.stop // block_size)):
        start = max(tokens.start - index * block_size, 0)
        stop = min(tokens.stop - index * block_size, block_size)
        runs.append(SlotRun(table.block_ids[index], start, stop))
    return tuple(runs)


def draw_tile_walk(view: TileWalkView, width: int = 80, max_rows: int = 16) -> Drawing:
    """Draw the walk: a row for each tile of each program. The programs run at the same time, a program's tiles in turn.

    Args:
        view: The walk.
        width: Columns to use.
        max_rows: The middle of a longer walk is left out, and the drawing says so.

    Example:
        >>> print(draw_tile_walk(view_tile_walk(TableView(0, (7, 2, 5), 10), block_size=4, tile_keys=8)))
        tile walk of A: 10 tokens in blocks of 4, 2 tiles of 8 keys, 1 program
        program  tile  tokens  piece  blocks
              0     0  0-7         0  7 2
              0     1  8-9         0  5[0-1]  then piece 0 is done
        the result is piece 0
    """
    lines: list[Line] = [(Span(heading(view), hue(view.table.seq_id)),)]
    rows = [(program, number, tile) for program, tiles in enumerate(view.programs) for number, tile in enumerate(tiles)]
    tokens_width = max([len("tokens"), *(len(_tokens(tile)) for _, _, tile in rows)])
    lines.append((Span(f"program  tile  {'tokens':<{tokens_width}}  piece  blocks"),))
    head = len(rows) if len(rows) <= max_rows else max(1, max_rows // 2)
    tail = len(rows) if len(rows) <= max_rows else len(rows) - max(1, max_rows - head - 1)
    for place, (program, number, tile) in enumerate(rows):
        if head <= place < tail:
            if place == head:
                lines.append((Span(f"    ...  {tail - head} more tiles"),))
            continue
        before = f"{program:>7}  {number:>4}  {_tokens(tile):<{tokens_width}}  {tile.piece:>5}  "
        after = f"  then piece {tile.piece} is done" if tile.ends_piece else ""
        blocks = _blocks(tile, view.block_size, width - len(before) - len(after))
        lines.append((Span(before), Span(blocks, hue(view.table.seq_id)), Span(after)))
    return Drawing((*lines, *((Span(line),) for line in closing(view))))


def heading(view: TileWalkView) -> str:
    """Return the sizes of a walk in one line."""
    num_programs = len(view.programs)
    seen = "" if view.window is None else f" (the last {view.table.num_tokens - view.first} seen)"
    return (
        f"tile walk of {letter(view.table.seq_id)}: {view.table.num_tokens} tokens{seen} in blocks of "
        f"{view.block_size}, {_count(view.num_tiles, 'tile')} of {view.tile_keys} keys, "
        f"{_count(num_programs, 'program')}"
    )


def closing(view: TileWalkView) -> list[str]:
    """Return what happens after the walk, and who had nothing to do."""
    if not view.num_pieces:
        return ["no token is seen, so the result is zeros"]
    numbers = [str(number) for number in range(view.num_pieces)]
    if len(numbers) > 6:
        numbers[3:-1] = ["..."]
    folded = "piece 0" if view.num_pieces == 1 else f"pieces {' + '.join(numbers)}, folded from left to right"
    idle = [str(program) for program, tiles in enumerate(view.programs) if not tiles]
    nothing = f"{_count(len(idle), 'program')} found no piece to take" if idle else None
    return [f"the result is {folded}", *([nothing] if nothing else [])]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _tokens(tile: TileView) -> str:
    return f"{tile.start}-{tile.stop - 1}"


def _blocks(tile: TileView, block_size: int, width: int) -> str:
    """Return the blocks of a tile in the order of its tokens; slots stand behind one that is read in part."""
    texts = []
    for run in tile.runs:
        is_whole = run.stop - run.start == block_size
        texts.append(f"{run.block_id}" if is_whole else f"{run.block_id}[{run.start}-{run.stop - 1}]")
    text = " ".join(texts)
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."
