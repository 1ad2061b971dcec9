"""The bar of the memory, from the books of every kind of cache."""

import itertools
import random
import xml.dom.minidom
from typing import Any

import pytest

from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache, Room
from minipaged.contiguous.arena import RESERVATIONS, Arena
from minipaged.paged.cache import PagedCache
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.sharing.cache import SharingCache
from minipaged.viz import CACHED_COLOR, WASTE_COLOR, WasteView, draw_waste, draw_waste_svg, view_waste
from minipaged.viz.waste import MARKS

PROMPT = list(range(9))


def arena(reservation: str = "max") -> Arena:
    cache = Arena(num_slots=64, max_model_len=14, reservation=reservation)
    cache.allocate(0, 5, 3)
    cache.allocate(1, 9, 2)
    cache.append(0)
    return cache


def paged(cache_type: Any = PagedCache) -> Any:
    cache = cache_type(num_blocks=16, block_size=4)
    cache.allocate(0, 5, 8)
    cache.allocate(1, 9, 11)
    cache.append(0)
    return cache


def batching() -> BatchingCache:
    cache = BatchingCache(num_blocks=16, block_size=4)
    cache.allocate(Room([0], [5], 0, 3))
    cache.fork(0, 1)
    return cache


def scheduled_arena() -> ArenaCache:
    cache = ArenaCache(num_slots=64, max_model_len=14)
    cache.allocate(Room([0], [5], 0, 3))
    return cache


def prefix() -> PrefixCache:
    cache = PrefixCache(16, 4, None, HashChain("model", 4), LRU())
    cache.allocate(PrefixRoom([7], [9], 0, 1, [PROMPT], "", [8]))
    cache.note_computed(7, 9, PROMPT)
    cache.free(7)
    cache.allocate(PrefixRoom([8], [6], 0, 1, [[5] * 6], "", [5]))
    return cache


EXPECTED = {
    "arena": (arena, WasteView(64, 15, 13, 0, 4)),
    "oracle": (lambda: arena("oracle"), WasteView(64, 15, 4, 0, 5)),
    "paged": (paged, WasteView(64, 15, 0, 5, 0)),
    "sharing": (lambda: paged(SharingCache), WasteView(64, 15, 0, 5, 0)),
    "batching": (batching, WasteView(64, 5, 0, 3, 0)),
    "scheduled-arena": (scheduled_arena, WasteView(64, 5, 9, 0, 2)),
    "prefix": (prefix, WasteView(64, 6, 0, 2, 0, cached=8)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_view_is_what_the_cache_itself_says(name: str):
    make, expected = EXPECTED[name]
    view = view_waste(make())
    assert view == expected
    assert sum(view.kinds.values()) == view.num_slots


@pytest.mark.parametrize("reservation", RESERVATIONS)
def test_with_the_true_lengths_what_nobody_will_use_is_internal(reservation: str):
    cache = arena(reservation)
    view, blind = view_waste(cache, {0: 3, 1: 2}), view_waste(cache)
    assert view.reserved + view.internal == blind.reserved
    assert view.internal == {"max": 9, "pow2": 1, "oracle": 0}[reservation]


def test_what_is_free_is_what_the_pool_calls_free():
    cache = prefix()
    view = view_waste(cache)
    assert view.free == cache.pool.num_free * 4
    assert view.kinds["free"] + view.kinds["cached"] == view.free


def bar(drawing: Any, row: int = 0) -> str:
    return str(drawing).splitlines()[1 + row].split()[-1]


def test_a_small_memory_has_one_character_a_slot():
    drawn = draw_waste(view_waste(arena(), {0: 3, 1: 2}))
    assert bar(drawn) == "T" * 15 + "_" * 4 + "x" * 9 + "-" * 4 + "." * 32
    assert str(drawn).splitlines()[2:] == [
        "T    15  holds a token",
        "_     4  reserved, empty",
        "x     9  internal: taken, never used",
        "-     4  external: lost to rounding",
        ".    32  free",
        "all  64",
    ]


def test_in_a_large_memory_every_kind_keeps_at_least_one_character_and_the_bar_its_length():
    rng = random.Random(0)
    for _ in range(200):
        parts = [rng.choice([0, 1, rng.randrange(5000)]) for _ in range(6)]
        view = WasteView(sum(parts) + 100, *parts[:4], cached=parts[4])
        for width in (20, 80):
            drawn = bar(draw_waste(view, width))
            assert len(drawn) == min(width, view.num_slots)
            runs = {mark: len(list(run)) for mark, run in itertools.groupby(drawn)}
            for kind, count in view.kinds.items():
                shown = runs.get(MARKS[kind][0], 0)
                assert (shown > 0) == (count > 0)
                assert abs(shown - count * len(drawn) / view.num_slots) <= 5, "more than others had to be given"


def test_several_caches_stand_below_each_other_with_their_numbers_in_columns():
    drawn = draw_waste({"max": view_waste(arena()), "paged": view_waste(paged())}, width=60)
    lines = str(drawn).splitlines()
    assert [line[:7] for line in lines[1:3]] == ["max    ", "paged  "]
    assert max(map(len, lines)) <= 60
    assert "x               0      5  internal: taken, never used" in lines
    assert "cached" not in str(drawn), "what nobody has is not explained"


def test_the_parts_of_the_bar_in_svg_have_their_colours_and_fill_it():
    picture = draw_waste_svg({"prefix": view_waste(prefix()), "max": view_waste(arena(), {0: 3, 1: 2})})
    assert picture.count(f'fill="{CACHED_COLOR}"') == 2 + 1  # each bar, one of them without width, and the legend
    assert picture.count(f'fill="{WASTE_COLOR}"') == 2 + 1
    assert all(f">{number}<" in picture for number in (6, 8, 48, 15, 9, 32))


def test_a_name_with_a_control_character_leaves_the_picture_valid():
    picture = draw_waste_svg({"a\x1b<b>": view_waste(paged())})
    names = [node.firstChild.nodeValue for node in xml.dom.minidom.parseString(picture).getElementsByTagName("text")]
    assert "a?<b>" in names
