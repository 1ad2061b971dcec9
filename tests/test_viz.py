"""Drawings of pools, block tables and arenas."""

import io
import xml.dom.minidom
from itertools import combinations

import pytest

from minipaged.batching.cache import BatchingCache, Room
from minipaged.contiguous.arena import Arena
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable
from minipaged.paged.cache import PagedCache
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.viz import (
    DECODE_COLOR,
    FREE_GREY,
    HUES,
    PREFILL_COLOR,
    WASTE_COLOR,
    ArenaView,
    PoolView,
    RangeView,
    TableView,
    TimelineView,
    WasteView,
    draw_arena,
    draw_arena_svg,
    draw_block_table,
    draw_block_table_svg,
    draw_block_tables,
    draw_index_svg,
    draw_pool,
    draw_pool_svg,
    draw_tile_walk_svg,
    draw_timeline_svg,
    draw_view,
    draw_waste_svg,
    hue,
    view_cache,
    view_index,
    view_pool,
    view_tile_walk,
)
from minipaged.viz.timeline import Cell, TimelineRow

SHARED = PoolView(6, 4, (TableView(0, (3, 1), 6), TableView(1, (3, 4), 8)), frozenset({0, 2, 5}))
"""Two sequences over one first block."""


def example_cache() -> PagedCache:
    cache = PagedCache(num_blocks=6, block_size=4)
    cache.allocate(0, num_prompt_tokens=3, max_slots=8)
    cache.allocate(1, num_prompt_tokens=5, max_slots=8)
    for _ in range(3):
        cache.append(0)
    return cache


def marks(drawing: object) -> str:
    """Return the rows of a map without heading, first ids and legend."""
    rows = [line for line in str(drawing).splitlines()[1:] if line.lstrip()[:1].isdigit()]
    return "".join(row.split(maxsplit=1)[1] for row in rows)


def test_a_view_says_what_the_real_cache_says() -> None:
    cache = example_cache()
    view = view_cache(cache)
    assert view == PoolView(6, 4, (TableView(0, (0, 3), 6), TableView(1, (1, 2), 5)), frozenset({4, 5}))
    assert view.holders()[3] == [(view.tables[0], 2)]


def test_a_view_does_not_change_when_the_cache_does() -> None:
    cache = example_cache()
    before = view_cache(cache)
    drawn = str(draw_view(before))
    cache.append(0)
    cache.free(1)
    assert str(draw_view(before)) == drawn
    assert view_cache(cache) != before
    cache.check()


def test_the_arena_is_viewed_with_its_reservations() -> None:
    arena = Arena(num_slots=16, max_model_len=7)
    arena.allocate(5, num_prompt_tokens=3, num_output_tokens=1)
    assert view_cache(arena) == ArenaView(16, (RangeView(5, 0, length=8, num_reserved=7, num_tokens=3),))


def test_a_rung_without_a_cache_has_no_view() -> None:
    assert view_cache(None) is None


def test_the_pool_shows_each_slot_while_blocks_fit() -> None:
    assert str(draw_pool(view_cache(example_cache()), width=40)).splitlines() == [
        "pool: 6 blocks of 4 slots, 4 used, 2 free",
        "0 AAAA  1 BBBB  2 B___  3 AA__  4 ....",
        "5 ....",
        "A = sequence 0   B = sequence 1   . free",
        "_ taken, empty",
    ]


def test_a_block_in_two_tables_is_marked_as_shared() -> None:
    assert "3 ####" in str(draw_pool(SHARED))
    assert "# shared" in str(draw_pool(SHARED))
    assert marks(draw_pool(SHARED, max_rows=1, width=30)) == ".a.#B."


def test_a_block_that_nobody_accounts_for_is_marked() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.allocate()
    text = str(draw_pool(view_pool(pool, {})))
    assert "0 ????  1 ...." in text
    assert "? in use, in no table" in text


def test_a_block_is_lower_case_on_the_map_until_its_last_slot_is_filled() -> None:
    table = BlockTable(block_size=4, block_ids=[7, 2, 5], num_tokens=11)
    pool = BlockPool(num_blocks=64, block_size=4)
    for _ in range(8):
        pool.allocate()
    for block_id in (0, 1, 3, 4, 6):
        pool.free(block_id)
    assert marks(draw_pool(view_pool(pool, {0: table}), max_rows=1))[:8] == "..A..a.A"
    table.num_tokens += 1
    assert marks(draw_pool(view_pool(pool, {0: table}), max_rows=1))[:8] == "..A..A.A"


def test_a_pool_of_thousands_of_blocks_stays_within_its_rows() -> None:
    table = TableView(0, tuple(range(1000, 1100)), 1600)
    view = PoolView(10_000, 16, (table,), frozenset(range(10_000)) - set(table.block_ids))
    drawing = draw_pool(view, width=80, max_rows=8)
    lines = str(drawing).splitlines()
    assert len(lines) <= 8 + 2
    assert max(map(len, lines)) <= 80
    assert lines[0] == "pool: 10000 blocks of 16 slots, 100 used, 9900 free, 32 blocks a character"
    # Blocks 1000 to 1099 touch groups 31 (992-1023) to 34 (1088-1119); only 32 and 33 are full.
    assert marks(drawing)[30:36] == ".aAAa."


def test_a_group_with_several_sequences_is_told_from_a_shared_one() -> None:
    apart = PoolView(256, 4, (TableView(0, (0,), 4), TableView(1, (1,), 4)), frozenset(range(2, 256)))
    assert marks(draw_pool(apart, width=80, max_rows=1))[0] == "+"
    assert "+ several sequences" in str(draw_pool(apart, width=80, max_rows=1))
    shared = PoolView(256, 4, (TableView(0, (0,), 4), TableView(1, (0,), 4)), frozenset(range(1, 256)))
    assert marks(draw_pool(shared, width=80, max_rows=1))[0] == "#"


def test_a_pool_with_many_sequences_names_only_some_and_says_how_many_more() -> None:
    tables = tuple(TableView(i, (i,), 4) for i in range(40))
    text = str(draw_view(PoolView(40, 4, tables, frozenset())))
    assert "and 32 more sequences" in text
    assert "and 32 more block tables" in text
    assert text.count(": 4 tokens") == 8


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 33, 256])
def test_a_block_table_says_how_full_its_last_block_is(block_size: int) -> None:
    num_tokens = 2 * block_size + 1
    text = str(draw_block_table(TableView(2, (9, 4, 6), num_tokens), block_size))
    assert text.startswith(f"block table of C: {num_tokens} tokens in 3 blocks, {block_size - 1} slots empty\n")
    last = text.splitlines()[-1].split()
    assert last[:2] == ["2", "6"]
    assert " ".join(last[2:]) == ("C" + "_" * (block_size - 1) if block_size <= 32 else f"1 of {block_size} filled")


def test_a_block_table_shows_the_text_of_its_tokens_on_one_line() -> None:
    drawn = draw_block_table(TableView(0, (7, 2), 6), 4, ["The", " cap", "ital", "\n", " of", "\x1b[2J", "unseen"])
    assert str(drawn).splitlines()[2:] == [
        r"    0      7  AAAA  The| cap|ital|\n",
        r"    1      2  AA__   of|\x1b[2J",
    ]


def test_a_long_block_table_puts_neighbours_into_one_row() -> None:
    table = TableView(0, (*range(5, 45), 90, 2), 16 * 41 + 3)
    rows = [line.split() for line in str(draw_block_table(table, 16)).splitlines()[2:]]
    assert rows == [["0-39", "5-44", "all", "640", "filled"], ["40", "90", "A" * 16], ["41", "2", "AAA" + "_" * 13]]


def test_a_last_block_with_empty_slots_keeps_its_own_row() -> None:
    table = TableView(0, tuple(range(40)), 16 * 39 + 3)
    rows = [line.split() for line in str(draw_block_table(table, 16)).splitlines()[2:]]
    assert rows == [["0-38", "0-38", "all", "624", "filled"], ["39", "39", "AAA" + "_" * 13]]


@pytest.mark.parametrize("max_rows", [1, 3, 4, 12])
def test_a_long_scattered_block_table_leaves_out_its_middle_and_counts_it(max_rows: int) -> None:
    table = TableView(0, tuple(range(0, 400, 2)), 800)
    rows = str(draw_block_table(table, 4, max_rows=max_rows)).splitlines()[2:]
    assert len(rows) == max(3, max_rows)
    assert rows[-1].split()[:2] == ["199", "398"]
    num_left_out = int(next(row for row in rows if "..." in row).split()[1])
    assert num_left_out + len(rows) - 1 == 200


def test_block_tables_stand_side_by_side_and_shared_blocks_are_marked_in_each() -> None:
    assert str(draw_view(SHARED, width=40)).splitlines()[-5:] == [
        "2 block tables",
        "       A: 6 tokens   B: 8 tokens",
        "index  block  slots  block  slots",
        "    0      3  ####       3  ####",
        "    1      1  AA__       4  BBBB",
    ]


@pytest.mark.parametrize(("width", "num_bands"), [(80, 1), (79, 2), (55, 2), (54, 3), (1, 3)])
def test_block_tables_that_do_not_fit_beside_each_other_stand_below(width: int, num_bands: int) -> None:
    tables = [TableView(i, (0, i + 1), 32) for i in range(3)]
    lines = str(draw_block_tables(tables, 16, {0}, width)).splitlines()
    assert len(lines) == 1 + num_bands * 4
    assert sum("index" in line for line in lines) == num_bands
    if width > 27:
        assert max(map(len, lines)) <= width


def test_rows_of_long_tables_are_put_together_where_all_tables_allow_it() -> None:
    # Blocks 0 to 9 are shared, and 10 and 11 follow them in one table only.
    tables = [TableView(0, (*range(12), 20), 50), TableView(1, (*range(10), 30, 31, 40), 49)]
    rows = [line.split() for line in str(draw_block_tables(tables, 4, range(10), max_rows=4)).splitlines()[3:]]
    assert rows == [
        ["0-9", "0-9", "all", "40", "shared", "0-9", "all", "40", "shared"],
        ["10-11", "10-11", "all", "8", "filled", "30-31", "all", "8", "filled"],
        ["12", "20", "AA__", "40", "B___"],
    ]


def test_a_table_that_ends_before_its_neighbours_has_empty_rows_and_counts_its_own_blocks_in_the_gap() -> None:
    tables = [TableView(0, tuple(range(0, 40, 2)), 80), TableView(1, tuple(range(1, 21, 2)), 40)]
    rows = [line.split() for line in str(draw_block_tables(tables, 4, max_rows=3)).splitlines()[3:]]
    assert rows == [
        ["0", "0", "AAAA", "1", "BBBB"],
        ["...", "18", "more", "blocks", "9", "more", "blocks"],
        ["19", "38", "AAAA"],
    ]


def test_no_row_reaches_beyond_the_end_of_a_table_or_of_what_is_shared() -> None:
    def rows(*tables: TableView, shared: range = range(0)) -> list[list[str]]:
        return [line.split()[:5] for line in str(draw_block_tables(tables, 4, shared, max_rows=3)).splitlines()[3:]]

    long, short = TableView(0, tuple(range(10)), 40), TableView(1, tuple(range(10, 15)), 20)
    assert rows(long, short) == [["0-4", "0-4", "all", "20", "filled"], ["5-9", "5-9", "all", "20", "filled"]]
    assert rows(long, shared=range(7)) == [["0-6", "0-6", "all", "28", "shared"], ["7-9", "7-9", "all", "12", "filled"]]


def test_the_arena_shows_tokens_reservations_and_free_slots() -> None:
    arena = Arena(num_slots=24, max_model_len=7)
    starts = [arena.allocate(seq_id, num_prompt_tokens=2 + seq_id, num_output_tokens=1) for seq_id in range(3)]
    arena.free(1)
    expected = ["........"] * 3
    expected[starts[0] // 8], expected[starts[2] // 8] = "AA_____-", "CCCC___-"
    assert str(draw_arena(view_cache(arena), width=100)).splitlines() == [
        "arena: 24 slots, 14 reserved, 6 hold tokens",
        " 0 " + "".join(expected),
        "A = sequence 0   C = sequence 2   . free   _ reserved, empty   - lost to rounding",
    ]


def test_a_large_arena_stays_within_its_rows_and_hides_no_token() -> None:
    view = ArenaView(8192, (RangeView(0, 0, 8192, 8192, 1),))
    drawing = draw_arena(view, width=80, max_rows=4)
    assert len(str(drawing).splitlines()) <= 6
    assert marks(drawing) == "A" + "_" * 255
    assert "32 slots a character" in str(drawing)


@pytest.mark.parametrize("width", [1, 10, 79, 200])
def test_drawings_take_any_width(width: int) -> None:
    for view in (SHARED, ArenaView(100, (RangeView(0, 10, 20, 15, 5),)), PoolView(1, 1, (), frozenset({0}))):
        assert all(str(draw_view(view, width=width, max_rows=3)).splitlines())


def test_a_drawing_in_colours_has_the_same_text_and_the_sequence_hues() -> None:
    from rich.console import Console

    drawing = draw_view(SHARED)
    text = drawing.rich()
    assert [line.rstrip() for line in text.plain.splitlines()] == str(drawing).splitlines()
    assert {hue(0).lower(), hue(1).lower(), FREE_GREY.lower()} <= {str(span.style).split()[-1] for span in text.spans}
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="truecolor").print(text)
    assert "38;2;0;114;178" in out.getvalue()  # hue(0)


def test_sequences_keep_their_colour_when_others_leave() -> None:
    alone = PoolView(6, 4, SHARED.tables[1:], frozenset({0, 1, 2, 5}))
    assert hue(1) in draw_pool_svg(alone)
    assert hue(0) not in draw_pool_svg(alone)


def test_the_palette_keeps_its_colours_apart() -> None:
    def distance(first: str, second: str) -> int:
        channels = [(int(first[i : i + 2], 16), int(second[i : i + 2], 16)) for i in (1, 3, 5)]
        return max(abs(a - b) for a, b in channels)

    palette = [*HUES, FREE_GREY, PREFILL_COLOR, DECODE_COLOR, WASTE_COLOR]
    assert all(distance(a, b) > 40 for a, b in combinations(palette, 2))


TIMELINE = TimelineView(
    tuple(
        TimelineRow(i, None, (*[Cell("wait")] * i, Cell("prefill", 10**i), *[Cell("swapped")] * (99 - i), Cell("idle")))
        for i in range(6)
    )
)
WASTE = WasteView(10_000, 3, 4000, 5, 700, 70)
WALKED = TableView(1, tuple(range(3000, 2800, -1)), 3190)


def deep_chain() -> HashChain:
    chain = HashChain("model", 4)
    place = chain.root("")
    for block_id in range(30):
        place, _ = chain.insert(place, [10**6 + block_id] * 4, block_id)
    return chain


SVGS = {
    "pool": lambda: draw_pool_svg(SHARED),
    "large-pool": lambda: draw_pool_svg(PoolView(9000, 16, (TableView(3, (7, 8, 9), 40),), frozenset(range(10, 9000)))),
    "table": lambda: draw_block_table_svg(SHARED.tables[0], 4, ["<s>", "&", "\n", "日本", " 'x'", '"']),
    "long-table": lambda: draw_block_table_svg(TableView(0, tuple(range(500)), 2000), 4),
    "arena": lambda: draw_arena_svg(ArenaView(100, (RangeView(0, 10, 60, 50, 5), RangeView(1, 70, 30, 30, 0))), rows=3),
    "timeline": lambda: draw_timeline_svg(TIMELINE),
    "waste": lambda: draw_waste_svg({"a long name & more": WASTE, "b": WASTE}),
    "tile-walk": lambda: draw_tile_walk_svg(view_tile_walk(WALKED, 16, 64, 70)),
    "index": lambda: draw_index_svg(view_index(deep_chain())),
}


@pytest.mark.parametrize("name", SVGS)
def test_svg_is_well_formed_small_and_the_same_each_time(name: str) -> None:
    picture = SVGS[name]()
    document = xml.dom.minidom.parseString(picture)
    assert document.documentElement.tagName == "svg"
    assert picture == SVGS[name]() == picture._repr_svg_()
    assert len(picture) < 60_000
    for node in document.getElementsByTagName("rect"):
        assert node.getAttribute("width") == "100%" or float(node.getAttribute("width")) >= 0


NARROW = {
    "pool": lambda width: draw_pool_svg(SHARED, width),
    "large-pool": lambda width: draw_pool_svg(PoolView(9000, 16, (TableView(3, (7, 8), 30),), frozenset()), width),
    "table": lambda width: draw_block_table_svg(SHARED.tables[0], 4, ["<s>", "&"], width),
    "arena": lambda width: draw_arena_svg(ArenaView(100, (RangeView(0, 10, 60, 50, 5),)), width),
    "timeline": lambda width: draw_timeline_svg(TIMELINE, width),
    "waste": lambda width: draw_waste_svg({"max": WASTE, "paged": WASTE}, width),
    "tile-walk": lambda width: draw_tile_walk_svg(view_tile_walk(WALKED, 16, 64, 7), width),
    "index": lambda width: draw_index_svg(view_index(deep_chain()), width),
}


def extent(node: xml.dom.minidom.Element) -> tuple[float, float]:
    """Return where a shape or a text begins and ends from left to right."""
    if node.tagName == "path":
        xs = [float(point.split()[0]) for point in node.getAttribute("d").replace("L", "M").split("M")[1:]]
        return min(xs), max(xs)
    x = float(node.getAttribute("x"))
    if node.tagName == "rect":
        return x, x + float(node.getAttribute("width"))
    length = 6.6 * len(node.firstChild.nodeValue)  # 0.6 of the size of the font
    left = x - {"start": 0, "middle": length / 2, "end": length}[node.getAttribute("text-anchor")]
    return left, left + length


@pytest.mark.parametrize("width", [300, 480, 720])
@pytest.mark.parametrize("name", NARROW)
def test_no_picture_reaches_beyond_the_width_that_was_asked_for(name: str, width: int) -> None:
    document = xml.dom.minidom.parseString(NARROW[name](width)).documentElement
    assert document.getAttribute("width") == str(width)
    height = float(document.getAttribute("height"))
    ground, *shapes = [node for node in document.childNodes if node.tagName in ("rect", "text", "path")]
    assert (ground.getAttribute("width"), ground.getAttribute("fill")) == ("100%", "#FFFFFF"), "for dark pages"
    for node in shapes:
        left, right = extent(node)
        assert left >= -0.5 and right <= width + 0.5, node.toxml()
        assert float(node.getAttribute("y") or 0) <= height, node.toxml()


def test_a_title_that_does_not_fit_is_cut_but_still_said_in_full() -> None:
    picture = draw_arena_svg(ArenaView(100_000, ()), width=200)
    document = xml.dom.minidom.parseString(picture)
    assert document.getElementsByTagName("title")[0].firstChild.nodeValue.startswith("arena: 100000 slots, 0 reserved,")
    assert document.getElementsByTagName("text")[0].firstChild.nodeValue.endswith("...")


def test_a_block_that_a_window_has_given_back_is_not_shown_as_the_sequences() -> None:
    cache = BatchingCache(num_blocks=6, block_size=4, window=4)
    cache.allocate(Room([0], [12], 0, 1))
    cache.note_computed(0, 12, [1] * 12)
    view = view_cache(cache)
    assert view.tables == (TableView(0, (0, 1, 2), 12, num_released=2),)
    assert marks(draw_pool(view, max_rows=1, width=20)) == "..A..."


def test_shared_blocks_are_hatched_in_svg_and_others_are_not() -> None:
    assert draw_pool_svg(SHARED).count(f'fill="url(#hatch-{hue(0)[1:]}-{hue(1)[1:]})"') == 1
    assert "hatch" not in draw_pool_svg(view_cache(example_cache()))


def test_a_long_block_table_in_svg_says_what_it_leaves_out() -> None:
    assert "... 436 more blocks" in SVGS["long-table"]()


def test_cached_blocks_that_nobody_uses_are_free_and_have_a_mark_of_their_own():
    view = PoolView(8, 4, (TableView(0, (7, 2), 8),), frozenset({0, 1, 3, 4, 5, 6}), cached_ids=frozenset({3, 4}))
    drawn = str(draw_pool(view, width=40))
    assert "8 blocks of 4 slots, 2 used, 6 free (2 of them cached)" in drawn
    assert "3 ====" in drawn and "4 ====" in drawn and "= free, content cached" in drawn
    assert "0 ..A==..A" in str(draw_pool(view, width=40, max_rows=1))
    assert "free, content cached" in draw_pool_svg(view)
    assert "free, content cached" not in draw_pool_svg(PoolView(8, 4, view.tables, view.free_ids))


def test_the_view_of_a_pool_that_remembers_tells_cached_from_free():
    cache = PrefixCache(4, 4, None, HashChain("model", 4), LRU())
    prompt = list(range(9))
    cache.allocate(PrefixRoom([7], [9], 0, 1, [prompt], "", [8]))
    cache.note_computed(7, 9, prompt)
    assert view_cache(cache).cached_ids == frozenset()
    cache.free(7)
    view = view_cache(cache)
    assert view.cached_ids == {0, 1} and view.free_ids == {0, 1, 2, 3}
