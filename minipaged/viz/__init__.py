"""Drawings of the real memory: the block pool, block tables and the contiguous arena.

A drawing has two steps. `view_cache` copies what a cache's own objects say into a small frozen view. A draw
function turns the view into text for the terminal or into SVG for notebooks and docs:

    pool: 8 blocks of 4 slots, 3 used, 5 free            block table of A: 10 tokens in 3 blocks, 2 slots empty
    0 ....  1 ....  2 AAAA  3 ....                       index  block  slots
    4 ....  5 AA__  6 ....  7 AAAA                           0      7  AAAA
    A = sequence 0   . free   _ taken, empty                 1      2  AAAA
                                                             2      5  AA__

Beside these it draws a batch over time (`watch`, `draw_timeline`), the memory split by what it is used for
(`draw_waste`), the walk of an attention kernel over the blocks of a sequence (`draw_tile_walk`), and which blocks a
prefix cache can find (`draw_index`).

No function here changes the cache, and equal views give equal drawings. The marks are the same everywhere: one
letter and one hue per sequence, ``.`` (grey) is free, ``_`` is a slot that is taken but holds no token, ``#``
(hatched in SVG) is a block that two or more block tables hold. ``views`` has the palette for every figure.
"""

from minipaged.viz.canvas import Svg
from minipaged.viz.drawing import Drawing
from minipaged.viz.index import IndexView, draw_index, draw_index_svg, view_index
from minipaged.viz.pieces import cut_before, num_pieces, piece_of, share_of
from minipaged.viz.svg import draw_arena_svg, draw_block_table_svg, draw_pool_svg
from minipaged.viz.tables import draw_block_table, draw_block_tables
from minipaged.viz.text import draw_arena, draw_pool, draw_view
from minipaged.viz.tile_walk import TileWalkView, draw_tile_walk, view_tile_walk
from minipaged.viz.tile_walk_svg import draw_tile_walk_svg
from minipaged.viz.timeline import Timeline, TimelineView
from minipaged.viz.timeline_svg import draw_timeline_svg
from minipaged.viz.timeline_text import draw_timeline
from minipaged.viz.views import (
    CACHED_COLOR,
    DECODE_COLOR,
    FREE_GREY,
    HUES,
    PREFILL_COLOR,
    WASTE_COLOR,
    ArenaView,
    PoolView,
    RangeView,
    TableView,
    hue,
    letter,
    view_arena,
    view_cache,
    view_pool,
)
from minipaged.viz.waste import WasteView, draw_waste, draw_waste_svg, view_waste
from minipaged.viz.watch import watch

__all__ = [
    "CACHED_COLOR",
    "DECODE_COLOR",
    "FREE_GREY",
    "HUES",
    "PREFILL_COLOR",
    "WASTE_COLOR",
    "ArenaView",
    "Drawing",
    "IndexView",
    "PoolView",
    "RangeView",
    "Svg",
    "TableView",
    "TileWalkView",
    "Timeline",
    "TimelineView",
    "WasteView",
    "cut_before",
    "draw_arena",
    "draw_arena_svg",
    "draw_block_table",
    "draw_block_table_svg",
    "draw_block_tables",
    "draw_index",
    "draw_index_svg",
    "draw_pool",
    "draw_pool_svg",
    "draw_tile_walk",
    "draw_tile_walk_svg",
    "draw_timeline",
    "draw_timeline_svg",
    "draw_view",
    "draw_waste",
    "draw_waste_svg",
    "hue",
    "letter",
    "num_pieces",
    "piece_of",
    "share_of",
    "view_arena",
    "view_cache",
    "view_index",
    "view_pool",
    "view_tile_walk",
    "view_waste",
    "watch",
]
