"""Drawings of the real memory: the block pool, block tables and the contiguous arena.

A drawing has two steps. `view_cache` copies what a cache's own objects say into a small frozen view. A draw
function turns the view into text for the terminal or into SVG for notebooks and docs:

    pool: 8 blocks of 4 slots, 3 used, 5 free            block table of A: 10 tokens in 3 blocks, 2 slots empty
    0 ....  1 ....  2 AAAA  3 ....                       index  block  slots
    4 ....  5 AA__  6 ....  7 AAAA                           0      7  AAAA
    A = sequence 0   . free   _ taken, empty                 1      2  AAAA
                                                             2      5  AA__

No function here changes the cache, and equal views give equal drawings. The marks are the same everywhere: one
letter and one hue per sequence, ``.`` (grey) is free, ``_`` is a slot that is taken but holds no token, ``#``
(hatched in SVG) is a block that two or more block tables hold. ``views`` has the palette for every figure.
"""

from minipaged.viz.drawing import Drawing
from minipaged.viz.svg import Svg, draw_arena_svg, draw_block_table_svg, draw_pool_svg
from minipaged.viz.tables import draw_block_table, draw_block_tables
from minipaged.viz.text import draw_arena, draw_pool, draw_view
from minipaged.viz.views import (
    DECODE_COLOR,
    FREE_GREY,
    HUES,
    PREFILL_COLOR,
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

__all__ = [
    "DECODE_COLOR",
    "FREE_GREY",
    "HUES",
    "PREFILL_COLOR",
    "ArenaView",
    "Drawing",
    "PoolView",
    "RangeView",
    "Svg",
    "TableView",
    "draw_arena",
    "draw_arena_svg",
    "draw_block_table",
    "draw_block_table_svg",
    "draw_block_tables",
    "draw_pool",
    "draw_pool_svg",
    "draw_view",
    "hue",
    "letter",
    "view_arena",
    "view_cache",
    "view_pool",
]
