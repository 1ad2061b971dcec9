"""The walk of the decode kernels as SVG."""

from minipaged.viz.canvas import TEXT_WIDTH, Canvas, Svg, fit
from minipaged.viz.tile_walk import TileView, TileWalkView, closing, heading
from minipaged.viz.views import FREE_GREY, hue

MAX_PROGRAMS = 24
"""More programs than this are left out, and the picture says so."""


def draw_tile_walk_svg(view: TileWalkView, width: int = 720) -> Svg:
    """Draw the sequence from left to right: its blocks with their ids, the tiles of each program, the pieces.

    A tile's number is its turn in its program. Dashed lines are the cuts between pieces.

    Example:
        >>> from minipaged.viz.tile_walk import view_tile_walk
        >>> from minipaged.viz.views import TableView
        >>> picture = draw_tile_walk_svg(view_tile_walk(TableView(0, (7, 2, 5), 10), block_size=4, tile_keys=8))
        >>> picture.count(f'fill="{hue(0)}"')  # 2 tiles
        2
    """
    canvas = Canvas(width, heading(view))
    left = 8 + TEXT_WIDTH * 11
    num_slots = max(1, len(view.table.block_ids)) * view.block_size
    scale = (width - left - 8) / num_slots
    _blocks(canvas, view, left, scale)
    y = 66.0
    for program, tiles in enumerate(view.programs[:MAX_PROGRAMS]):
        canvas.text(left - 8, y + 14, f"program {program}", "end")
        for number, tile in enumerate(tiles):
            _tile(canvas, view, tile, number, (left, y, scale))
        y += 24
    if len(view.programs) > MAX_PROGRAMS:
        canvas.text(left, y + 12, f"... {len(view.programs) - MAX_PROGRAMS} more programs")
        y += 18
    _pieces(canvas, view, (left, y, scale))
    for line in closing(view):
        y += 16
        canvas.text(8, y + 18, fit(line, width - 16))
    return canvas.finish(y + 28)


def _blocks(canvas: Canvas, view: TileWalkView, left: float, scale: float) -> None:
    """Draw the block table as a row: the id of each block over its slots."""
    size = view.block_size
    canvas.text(left - 8, 46, "block", "end")
    num_blocks, filled = len(view.table.block_ids), view.table.num_tokens * scale
    canvas.rect(left, 34, filled, 18, FREE_GREY)
    canvas.rect(left + filled, 34, num_blocks * size * scale - filled, 18, FREE_GREY, opacity=0.25)
    canvas.frame(left, 34, num_blocks * size * scale, 18)
    if size * scale >= 3:
        canvas.grid((left + index * size * scale for index in range(1, num_blocks)), 34, 18)
    needed = TEXT_WIDTH * len(str(max(view.table.block_ids, default=0))) + 3
    every = 1
    while every * size * scale < needed:
        every *= 2
    for index, block_id in list(enumerate(view.table.block_ids))[::every]:  # behind the boxes, or they would cover it
        if (x := left + index * size * scale) + needed <= canvas.width - 8:
            canvas.text(x + (size * scale - needed) / 2 + 2 if every == 1 else x + 2, 47, str(block_id))


def _tile(canvas: Canvas, view: TileWalkView, tile: TileView, number: int, place: tuple[float, float, float]) -> None:
    left, y, scale = place
    x, tile_width = left + tile.start * scale, (tile.stop - tile.start) * scale
    canvas.rect(x, y, tile_width, 18, hue(view.table.seq_id), opacity=1.0 if number % 2 == 0 else 0.6)
    if tile_width >= 3:
        canvas.frame(x, y, tile_width, 18)
    if tile_width >= TEXT_WIDTH * len(str(number)) + 2:
        canvas.text(x + tile_width / 2, y + 13, str(number), "middle")


def _pieces(canvas: Canvas, view: TileWalkView, place: tuple[float, float, float]) -> None:
    """Draw the cuts across all programs, and the number of each piece below them."""
    left, y, scale = place
    canvas.text(left - 8, y + 12, "piece", "end")
    start = view.first
    for tile in sorted((tile for tiles in view.programs for tile in tiles), key=lambda tile: tile.start):
        if not tile.ends_piece:
            continue
        x, piece_width = left + start * scale, (tile.stop - start) * scale
        canvas.line(left + tile.stop * scale, 58, left + tile.stop * scale, y + 16, dash="3 2")
        if piece_width >= TEXT_WIDTH * len(str(tile.piece)) + 2:
            canvas.text(x + piece_width / 2, y + 12, str(tile.piece), "middle")
        start = tile.stop
