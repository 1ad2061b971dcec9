"""The drawing of the prefix index, from real hash chains and radix trees."""

from typing import Any

import pytest

from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.radix_tree import RadixTree
from minipaged.viz import (
    CACHED_COLOR,
    draw_index,
    draw_index_svg,
    draw_pool,
    draw_pool_svg,
    hue,
    view_cache,
    view_index,
)
from minipaged.viz.index import NodeView

PROMPT = list(range(1, 13))


def cache_with(index: Any) -> PrefixCache:
    """Return a cache in which two sequences share two blocks and a third, of another salt, has left."""
    cache = PrefixCache(12, 4, None, index, LRU())
    for seq_id, prompt, salt in [(0, [*PROMPT, 50], ""), (1, [*PROMPT[:8], 60, 61], ""), (2, [9] * 10, "team")]:
        cache.allocate(PrefixRoom([seq_id], [len(prompt)], 0, 1, [prompt], salt, [len(prompt) - 1]))
        cache.note_computed(seq_id, len(prompt), prompt)
        cache.take_copies()
        cache.release_pins()
    cache.free(2)
    return cache


def chain_cache() -> PrefixCache:
    return cache_with(HashChain("model", 4))


def tree_cache() -> PrefixCache:
    return cache_with(RadixTree(4))


def test_a_chain_is_drawn_block_behind_block_with_its_users():
    lines = str(draw_index(view_index(chain_cache()))).splitlines()
    keys = [line.split()[2] for line in lines if "[" in line]
    assert len(set(keys)) == 5 and all(len(bytes.fromhex(key)) == 4 for key in keys)
    assert [
        line.replace(key, "K") for line, key in zip((line for line in lines if "[" in line), keys, strict=True)
    ] == [
        "  0 # K [1 2 3 4]",
        "    1 # K [5 6 7 8]",
        "      2 A K [9 10 11 12]",
        "  5 = K [9 9 9 9]",
        "    6 = K [9 9 9 9]",
    ]
    assert lines[0] == "hash chain: 5 blocks can be found, of 4 slots"
    assert lines[1] == "no salt" and lines[5] == "salt 'team'"
    assert lines[-1] == "a letter: the sequence that uses it   # several sequences use it   = nobody uses it"


def test_the_keys_in_the_picture_are_those_that_the_chain_looks_for():
    cache = chain_cache()
    view = view_index(cache.index)
    entries = {entry.block_id: key.hex() for key, entry in cache.index.entries.items()}
    nodes = [node for _, nodes in view.roots for node in nodes]
    assert len(nodes) == len(entries)
    assert all(entries[node.block_id].startswith(str(node.key)) for node in nodes)


def test_a_tree_shows_a_part_full_leaf_and_no_keys():
    lines = str(draw_index(view_index(tree_cache()))).splitlines()
    assert lines[0] == "radix tree: 6 blocks can be found, of 4 slots"
    assert [line for line in lines if "[" in line][-3:] == ["  5 = [9 9 9 9]", "    6 = [9 9 9 9]", "      7 = [9 9]"]
    assert 'fill-opacity="0.25"' in draw_index_svg(view_index(tree_cache()))


@pytest.mark.parametrize("make", [chain_cache, tree_cache])
def test_every_node_stands_behind_its_parent_and_each_cached_block_is_there_once(make: Any):
    cache = make()
    view = view_index(cache)
    block_ids = [node.block_id for _, nodes in view.roots for node in nodes]
    assert sorted(block_ids) == [block for block in range(12) if cache.pool.is_cached(block)]
    for salt, nodes in view.roots:
        path: list[NodeView] = []
        for node in nodes:
            path[node.depth :] = [node]
            tokens = [token for each in path for token in each.token_ids]
            found = cache.index.match(tokens, salt, len(tokens))
            whole = [each.block_id for each in path if len(each.token_ids) == 4]
            assert found.block_ids == whole
            assert len(whole) == len(path) or found.partial == (node.block_id, len(node.token_ids))


def test_a_view_does_not_change_when_the_index_does_and_forgotten_blocks_are_gone():
    cache = tree_cache()
    view = view_index(cache)
    drawn = str(draw_index(view))
    cache.distrust([5])
    assert str(draw_index(view)) == drawn
    assert view_index(cache).num_blocks == view.num_blocks - 3
    assert "team" not in str(draw_index(view_index(cache))), "a salt without blocks has no row"


def test_text_can_stand_for_token_ids_and_stays_on_its_line():
    drawn = str(draw_index(view_index(tree_cache()), text_of=lambda ids: "\n" + "x" * len(ids)))
    assert r"0 # '\nxxxx'" in drawn
    picture = draw_index_svg(view_index(tree_cache()), text_of=lambda ids: "<\x1b&")
    assert "&lt;" in picture and "\x1b" not in picture


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_long_chain_stays_within_its_width_and_rows(width: int):
    chain = HashChain("model", 4)
    place = chain.root("")
    for block_id in range(60):
        place, _ = chain.insert(place, [1000 + block_id] * 4, block_id)
    lines = str(draw_index(view_index(chain), width=width, max_rows=25)).splitlines()
    assert max(map(len, lines[1:])) <= width
    assert lines[-1] == "... 36 more rows"
    assert len(lines) == 1 + 25 + 1
    assert "... 13 more rows" in draw_index_svg(view_index(chain), max_rows=48)


def test_an_empty_index_can_be_drawn():
    view = view_index(HashChain("model", 4))
    assert str(draw_index(view)) == "hash chain: 0 blocks can be found, of 4 slots"
    assert draw_index_svg(view).startswith("<svg")


def test_the_picture_has_the_pools_colours():
    picture = draw_index_svg(view_index(chain_cache()))
    hatch = f'fill="url(#hatch-{hue(0)[1:]}-{hue(1)[1:]})"'
    assert picture.count(hatch) == 2
    assert picture.count(f'fill="{CACHED_COLOR}"') == 2 + 1  # and the legend
    assert picture.count(f'fill="{hue(0)}"') == 1 + 1 + 1  # a block, the legend, and one stripe of the pattern


def test_one_pool_shows_private_shared_cached_and_free_blocks_together():
    view = view_cache(chain_cache())
    text = str(draw_pool(view))
    assert "12 blocks of 4 slots, 5 used, 7 free (2 of them cached)" in text
    assert " 0 ####   1 ####   2 AAAA   3 A___   4 BB__   5 ====   6 ====   7 ...." in text
    for note in ("A = sequence 0", "B = sequence 1", ". free", "= free, content cached", "# shared", "_ taken, empty"):
        assert note in text
    marks = str(draw_pool(view, width=20, max_rows=1)).splitlines()[1].split()[1]
    assert marks == "##Aab==....."
    picture = draw_pool_svg(view)
    for note in ("A = sequence 0", "B = sequence 1", "free", "free, content cached", "hatched = shared"):
        assert f">{note}<" in picture
    assert picture.count(f'fill="{CACHED_COLOR}"') == 2 + 1
