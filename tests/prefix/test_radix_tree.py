"""The longest cached beginning, to the token, in a tree whose nodes are blocks."""

import gc

import pytest

from minipaged.prefix.radix_tree import RadixTree, num_common
from tests.prefix.index_walk import tree_walk
from tests.walks import run_small_walks, run_walks


def filled(num_tokens: int, block_size: int = 16) -> tuple[RadixTree, list[int]]:
    """Return a tree in which block i holds the i-th piece of a sequence, the last perhaps in part."""
    tree, tokens = RadixTree(block_size), list(range(num_tokens))
    place = tree.root("")
    for i in range(-(-num_tokens // block_size)):
        place, gone = tree.insert(place, tokens[i * block_size : (i + 1) * block_size], i)
        assert gone == []
    return tree, tokens


def num_hits(tree: RadixTree, tokens: list[int], limit: int, salt: str = "") -> int:
    match = tree.match(tokens, salt, limit)
    return len(match.block_ids) * tree.block_size + (match.partial[1] if match.partial else 0)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33])
def test_a_prompt_that_was_sent_before_is_hit_up_to_its_last_token(length: int):
    tree, tokens = filled(length)
    assert num_hits(tree, tokens, length - 1) == length - 1


@pytest.mark.parametrize("num_cached", [1, 15, 16, 17, 32, 40])
def test_no_more_is_hit_than_was_cached(num_cached: int):
    tree, tokens = filled(num_cached)
    assert num_hits(tree, [*tokens, 77, 78, 79], num_cached + 2) == num_cached
    assert num_hits(tree, [*tokens[: num_cached - 1], 77, 78], num_cached) == num_cached - 1


def test_of_several_blocks_the_one_that_goes_on_longest_is_copied():
    tree = RadixTree(4)
    root = tree.root("")
    for block_id, tokens in enumerate([[1, 2, 3, 4], [1, 2, 9, 9], [1, 3, 0, 0], [2, 2, 2, 2]]):
        tree.insert(root, tokens, block_id)
    found = {
        tokens: tree.match([*tokens, 0], "", len(tokens)).partial for tokens in [(1, 2, 3), (1, 2, 9), (1, 3), (2,)]
    }
    assert found == {(1, 2, 3): (0, 3), (1, 2, 9): (1, 3), (1, 3): (2, 2), (2,): (3, 1)}
    assert tree.match([1, 2, 8, 8, 0], "", 4).partial in ((0, 2), (1, 2))
    assert tree.match([7, 7, 7, 7, 0], "", 4).partial is None


def test_a_part_full_block_makes_room_for_a_longer_one_and_not_for_a_shorter():
    tree = RadixTree(4)
    root = tree.root("")
    assert tree.insert(root, [1, 2], 0)[1] == [] and 0 in tree
    assert tree.insert(root, [1], 1)[1] == [] and 1 not in tree
    assert tree.insert(root, [1, 2, 3], 2)[1] == [0] and 0 not in tree
    assert tree.insert(root, [1, 2, 3, 4], 3)[1] == [2] and 2 not in tree
    assert tree.insert(root, [1, 2, 3], 4)[1] == [] and 4 not in tree
    tree.check()


def test_a_part_full_block_has_nothing_behind_it():
    tree, _ = filled(3, 4)
    assert tree.match([0, 1, 2, 9, 9], "", 4).block_ids == [] and tree.match([0, 1, 2, 9, 9], "", 4).partial == (0, 3)


def test_with_a_block_all_behind_it_is_forgotten():
    tree, tokens = filled(40)
    tree.insert(tree.match(tokens, "", 16).place, [9] * 16, 7)
    assert sorted(tree.forget(1)) == [1, 2] and 7 in tree
    assert sorted(tree.forget(0)) == [0, 7]
    assert tree.match(tokens, "", 39).block_ids == []
    tree.check()


def test_a_block_behind_a_forgotten_one_is_not_entered():
    tree, tokens = filled(32)
    place = tree.match([*tokens, 0], "", 32).place
    tree.forget(0)
    assert tree.insert(place, [1] * 16, 5) == (place, []) and 5 not in tree
    tree.check()


def test_only_requests_of_a_salt_find_each_other():
    tree, tokens = filled(20)
    assert num_hits(tree, tokens, 19, "a") == 0 and num_hits(tree, tokens, 19) == 19
    tree.insert(tree.root("a"), tokens[:16], 5)
    assert tree.match(tokens, "a", 19).block_ids == [5]


def test_a_salt_is_forgotten_with_its_last_block():
    tree = RadixTree(2)
    for i in range(100):
        tree.match([1, 2, 3], f"salt {i}", 2)
    tree.insert(tree.root("kept"), [1, 2], 7)
    gc.collect()
    assert list(tree._roots) == ["kept"] and tree.match([1, 2, 3], "kept", 2).block_ids == [7]
    tree.forget(7)
    gc.collect()
    assert not tree._roots


def test_what_two_pieces_have_in_common_ends_at_the_first_difference():
    assert [num_common(*pair) for pair in [((), (1,)), ((1, 2), (1, 2)), ((1, 2), (1, 3)), ([2], [1])]] == [0, 2, 1, 0]


def test_long_random_walks_agree_with_a_list(num_operations: int):
    events = run_walks(tree_walk, num_operations)
    kinds = {"insert", "tail", "longer", "known", "whole blocks", "part of a block", "nothing", "forget"}
    assert events.keys() == kinds | {"forget several"}, events
    assert min(events.values()) > num_operations / 100, events


def test_small_random_walks_agree_with_a_list():
    assert run_small_walks(tree_walk).keys() >= {"insert", "tail", "part of a block", "forget"}
