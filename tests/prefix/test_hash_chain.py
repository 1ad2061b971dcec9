"""Whole blocks by their keys: hits up to the limit, entries that come and go, and nobody else's blocks."""

import gc

from minipaged.prefix.block_key import block_key, root_key
from minipaged.prefix.hash_chain import HashChain
from tests.prefix.index_walk import chain_walk
from tests.walks import run_small_walks, run_walks


def filled(num_blocks: int = 3, block_size: int = 16) -> tuple[HashChain, list[int]]:
    """Return a chain in which block i holds the i-th piece of a sequence."""
    chain, tokens = HashChain("model", block_size), list(range(num_blocks * block_size))
    place = chain.root("")
    for i in range(num_blocks):
        place, gone = chain.insert(place, tokens[i * block_size : (i + 1) * block_size], i)
        assert gone == []
    return chain, tokens


def test_a_prompt_that_is_cached_as_a_whole_is_hit_up_to_its_last_block_before_the_last_token():
    chain, tokens = filled()
    hits = {length: 16 * len(chain.match(tokens[:length], "", length - 1).block_ids) for length in (15, 16, 17, 32, 33)}
    assert hits == {15: 0, 16: 0, 17: 16, 32: 16, 33: 32}
    assert all(chain.match(tokens[:length], "", length - 1).partial is None for length in hits)


def test_entries_are_under_the_keys_of_their_blocks():
    chain, tokens = filled(2, 4)
    first = block_key(root_key("model"), tokens[:4])
    assert list(chain.entries) == [first, block_key(first, tokens[4:])]
    assert [entry.block_id for entry in chain.entries.values()] == [0, 1]


def test_a_hit_ends_at_the_first_block_that_is_not_there():
    chain, tokens = filled()
    assert chain.forget(1) == [1]
    assert chain.match([*tokens, 0], "", 48).block_ids == [0]
    assert 2 in chain, "it cannot be reached, and is evicted in its turn"
    chain.check()


def test_a_block_that_comes_back_does_not_bring_back_what_stood_behind_it():
    """What stands behind it may be another sequence's by then; only what was entered behind the new one counts."""
    chain, tokens = filled()
    chain.forget(1)
    place, _ = chain.insert(chain.match(tokens, "", 16).place, tokens[16:32], 7)
    assert chain.match([*tokens, 0], "", 48).block_ids == [0, 7]
    place, gone = chain.insert(place, tokens[32:48], 8)
    assert gone == [2] and chain.match([*tokens, 0], "", 48).block_ids == [0, 7, 8]
    chain.check()


def test_a_block_behind_a_forgotten_one_is_not_entered():
    chain, tokens = filled(1)
    place = chain.match([*tokens, 0], "", 16).place
    chain.forget(0)
    assert chain.insert(place, tokens, 5) == (place, []) and 5 not in chain and not chain.entries


def test_equal_blocks_have_one_entry_and_the_first_stays():
    chain, tokens = filled(1)
    place, gone = chain.insert(chain.root(""), tokens, 9)
    assert gone == [] and 9 not in chain and place is chain.match([*tokens, 0], "", 16).place


def test_a_part_full_block_has_no_entry():
    chain, tokens = filled(1)
    place = chain.match([*tokens, 0], "", 16).place
    assert chain.insert(place, [1, 2, 3], 9) == (place, []) and 9 not in chain


def test_only_requests_of_a_salt_find_each_other():
    chain, tokens = filled(1)
    assert chain.match([*tokens, 0], "a", 16).block_ids == []
    chain.insert(chain.root("a"), tokens, 1)
    assert chain.match([*tokens, 0], "a", 16).block_ids == [1] and chain.match([*tokens, 0], "", 16).block_ids == [0]


def test_two_models_have_no_key_in_common():
    keys = []
    for name in ("model", "other"):
        chain = HashChain(name, 2)
        chain.insert(chain.root(""), [1, 2], 0)
        keys += chain.entries
    assert len(set(keys)) == 2


def test_a_salt_is_forgotten_with_its_last_block():
    chain = HashChain("model", 2)
    for i in range(100):
        chain.match([1, 2, 3], f"salt {i}", 2)
    chain.insert(chain.root("kept"), [1, 2], 7)
    gc.collect()
    assert list(chain._roots) == ["kept"]
    assert chain.match([1, 2, 3], "kept", 2).block_ids == [7]
    chain.forget(7)
    gc.collect()
    assert not chain._roots


def test_long_random_walks_agree_with_a_list(num_operations: int):
    events = run_walks(chain_walk, num_operations)
    assert events.keys() == {"insert", "known", "whole blocks", "nothing", "forget"}, events
    assert min(events.values()) > num_operations / 50, events


def test_small_random_walks_agree_with_a_list():
    assert run_small_walks(chain_walk).keys() >= {"insert", "whole blocks", "forget"}
