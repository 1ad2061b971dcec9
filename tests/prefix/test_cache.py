"""The books of blocks that are found again: what is found, what it costs to enter, and what is held for a copy."""

import pytest

from minipaged.batching.cache import Swapped
from minipaged.errors import AccountingError
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from tests.prefix.steps import KINDS, Kind, admit, enter_and_leave, make_cache

BOTH = pytest.mark.parametrize("kind", KINDS)


def room(seq_id: int, tokens: list[int], salt: str = "") -> PrefixRoom:
    return PrefixRoom([seq_id], [len(tokens)], 0, 1, [tokens], salt, [len(tokens) - 1])


def group_room(tokens: list[list[int]], num_common: int) -> PrefixRoom:
    """Return the room of several sequences that come back; each has a newest token beyond."""
    lengths = [len(each) - 1 for each in tokens]
    return PrefixRoom(list(range(len(tokens))), lengths, num_common, 1, tokens, "", lengths)


def state_of(cache: PrefixCache) -> tuple[int, int, int]:
    return cache.pool.num_free, cache.pool.num_idle, cache.pool.num_cached


# -- what is found


@pytest.mark.parametrize(
    ("kind", "hits"),
    [
        ("hash", {15: 0, 16: 0, 17: 16, 32: 16, 33: 32, 34: 32}),
        ("radix", {15: 14, 16: 15, 17: 16, 32: 31, 33: 32, 34: 33}),
    ],
)
def test_of_a_prompt_that_comes_again_at_least_the_last_token_is_computed(kind: Kind, hits: dict[int, int]):
    for length, expected in hits.items():
        cache = make_cache(kind)
        tokens = list(range(length))
        assert [enter_and_leave(cache, tokens) for _ in range(3)] == [0, expected, expected]
        assert cache.num_hit_tokens == 2 * expected
        admit(cache, 7, tokens)
        table = cache.tables[7]
        assert table.num_tokens == length and len(table.block_ids) == -(-length // 16)
        cache.check()


def test_a_copied_block_is_found_to_the_token_where_two_texts_part():
    cache = make_cache("radix", block_size=4)
    enter_and_leave(cache, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert admit(cache, 1, [0, 1, 2, 3, 4, 5, 99, 98]) == 6
    assert cache.tables[1].block_ids[0] == 0 and cache.tables[1].block_ids[1] not in (0, 1, 2)
    assert cache.num_copies == 1 and cache.count_references()[1] == 1, "the source is held"
    cache.check()
    cache.release_pins()
    assert cache.count_references()[1] == 0 and cache.pool.is_cached(1)
    cache.check()


@BOTH
def test_a_salt_finds_only_its_own_blocks_and_the_empty_one_is_that_of_nobody(kind: Kind):
    cache = make_cache(kind)
    tokens = list(range(64))
    hits = [enter_and_leave(cache, tokens, salt) for salt in ("a", "b", "a", "", "")]
    expected = 48 if kind == "hash" else 63
    assert hits == [0, 0, expected, 0, expected]


@BOTH
def test_a_block_is_found_once_it_is_written_and_not_before(kind: Kind):
    cache = make_cache(kind)
    tokens = list(range(40))
    admit(cache, 1, tokens)
    assert cache.find(room(2, tokens)).matches[0].block_ids == []
    cache.note_computed(1, 31, tokens)
    assert len(cache.find(room(2, tokens)).matches[0].block_ids) == 1
    cache.note_computed(1, 32, tokens)
    assert len(cache.find(room(2, tokens)).matches[0].block_ids) == 2
    cache.check()


@BOTH
def test_a_sequence_that_is_dropped_leaves_what_it_has_computed_and_no_more(kind: Kind):
    cache = make_cache(kind)
    tokens = list(range(40))
    admit(cache, 1, tokens)
    cache.note_computed(1, 21, tokens)
    cache.free(1)
    assert admit(cache, 2, tokens) == (16 if kind == "hash" else 21)
    cache.free(2)
    cache.release_pins()
    cache.check()


@BOTH
def test_a_reused_block_is_not_found_under_its_old_name(kind: Kind):
    cache = make_cache(kind, num_blocks=4, block_size=4)
    x, y = list(range(8)), list(range(100, 116))
    assert enter_and_leave(cache, x) == 0
    assert enter_and_leave(cache, y) == 0 and cache.pool.num_evictions == 2
    cache.check()
    assert len(cache.index.match(x, "", 8).block_ids) == 0
    assert enter_and_leave(cache, x) == 0
    cache.check()


# -- what it costs to enter


@BOTH
def test_an_idle_block_that_is_hit_is_not_free_for_something_else(kind: Kind):
    """Five blocks are free, two of them hits. Seven tokens more take two blocks, and 16 more take four."""
    cache = make_cache(kind, num_blocks=5, block_size=4)
    tokens = list(range(8))
    enter_and_leave(cache, tokens)
    assert state_of(cache) == (5, 2, 2)
    assert cache.can_admit(room(1, [*tokens, *range(50, 62)])), "2 hits and 3 new blocks"
    assert cache.can_admit(room(1, [*tokens, *range(50, 58)]), headroom=1)
    assert not cache.can_admit(room(1, [*tokens, *range(50, 58)]), headroom=2)
    assert not cache.can_admit(room(1, [*tokens, *range(50, 63)]))
    assert cache.shortage(room(1, [*tokens, *range(50, 63)])) == "needs 4 blocks, 3 are free"
    with pytest.raises(AccountingError, match="needs 4 blocks, 3 are free"):
        cache.allocate(room(1, [*tokens, *range(50, 63)]))
    assert state_of(cache) == (5, 2, 2) and not cache.tables
    assert admit(cache, 1, [*tokens, *range(50, 62)]) == 8
    assert state_of(cache) == (0, 0, 2)
    cache.check()


@BOTH
def test_a_block_in_use_that_is_hit_costs_nothing(kind: Kind):
    cache = make_cache(kind, num_blocks=4, block_size=4)
    tokens = list(range(8))
    admit(cache, 1, [*tokens, 50])
    cache.note_computed(1, 9, [*tokens, 50])
    assert cache.pool.num_free == 1
    assert admit(cache, 2, [*tokens, 60]) == 8 and cache.pool.num_free == 0
    assert [cache.pool.num_references(b) for b in cache.tables[2].block_ids] == [2, 2, 1]
    cache.check()
    for seq_id in (1, 2):
        cache.free(seq_id)
    assert cache.pool.num_free == 4
    cache.check()


def test_a_block_whose_copy_would_not_fit_beside_it_is_not_copied():
    """Of three blocks the source would be held, so two were left where three are needed."""
    cache = make_cache("radix", num_blocks=3, block_size=4)
    enter_and_leave(cache, list(range(4)))
    tokens = [0, 1, *range(50, 60)]
    assert cache.can_admit(room(1, tokens))
    assert admit(cache, 1, tokens) == 0 and not cache._pinned and cache.num_copies == 0
    cache.check()
    cache.free(1)
    assert cache.pool.num_free == 3
    assert admit(make_full(4), 1, tokens) == 2, "with one block more it is"


def make_full(num_blocks: int) -> PrefixCache:
    cache = make_cache("radix", num_blocks, block_size=4)
    enter_and_leave(cache, list(range(4)))
    return cache


def test_the_source_of_a_copy_survives_the_evictions_of_its_own_request():
    cache = make_cache("radix", num_blocks=4, block_size=4)
    enter_and_leave(cache, list(range(4)))
    for i in range(3):
        enter_and_leave(cache, [100 * i + 50])
    source = cache.index.match([0, 1, 7], "", 2).partial
    assert cache.pool.num_idle == 4 and source == (0, 2), "it would be the first to go"
    assert admit(cache, 1, [0, 1, 77, 78, 79, 80, 81, 82, 83]) == 2
    assert 0 not in cache.tables[1].block_ids and cache.pool.is_cached(0) and cache.pool.num_free == 0
    cache.check()


# -- sequences that belong together


@BOTH
def test_forks_of_a_hit_prompt_share_its_blocks_and_each_enters_its_own(kind: Kind):
    cache = make_cache(kind, block_size=4)
    prompt = list(range(8))
    enter_and_leave(cache, prompt)
    cache.allocate(room(1, [*prompt, 8]))
    cache.note_computed(1, 9, [*prompt, 8])
    cache.fork(1, 2)
    tokens = {1: [*prompt, 8], 2: [*prompt, 8]}
    for i in range(4):
        for seq_id in tokens:
            tokens[seq_id].append(100 * seq_id + i)
            cache.append(seq_id)
            cache.take_copies()
            cache.note_computed(seq_id, 10 + i, tokens[seq_id])
            cache.check()
    assert [cache.pool.num_references(b) for b in cache.tables[1].block_ids[:2]] == [2, 2]
    for seq_id in tokens:
        assert cache.index.match(tokens[seq_id], "", 12).block_ids == cache.tables[seq_id].block_ids[:3]
        cache.free(seq_id)
    assert cache.pool.num_free == 100
    cache.check()


@BOTH
def test_what_the_first_of_several_has_not_computed_is_not_entered_by_the_others(kind: Kind):
    cache = make_cache(kind, num_blocks=20, block_size=4)
    common = list(range(9))
    assert cache.allocate(group_room([[*common, 50], [*common, 60]], 9)) == [0, 8]
    cache.note_computed(0, 2, [*common, 50])
    for seq_id in (0, 1):
        cache.free(seq_id)
        cache.check()
    assert cache.pool.num_free == 20
    expected = 2 if kind == "radix" else 0
    assert admit(cache, 5, common) in (0, expected)
    cache.check()


@BOTH
def test_several_that_come_back_find_their_own_blocks_beyond_what_they_share(kind: Kind):
    cache = make_cache(kind, num_blocks=20, block_size=4)
    tokens = [[*range(8), *range(50, 59)], [*range(8), *range(60, 69)]]
    for each in tokens:
        enter_and_leave(cache, each)
    starts = cache.allocate(group_room(tokens, 8))
    assert starts == [16, 16]
    tables = [cache.tables[i].block_ids for i in (0, 1)]
    assert tables[0][:2] == tables[1][:2] and not set(tables[0][2:]) & set(tables[1][2:])
    cache.check()


# -- leaving and coming back


@BOTH
def test_a_swapped_sequence_leaves_its_entries_and_goes_on_from_where_it_was(kind: Kind):
    cache = make_cache(kind, num_blocks=12, block_size=4)
    tokens = list(range(11))
    admit(cache, 1, tokens)
    cache.note_computed(1, 11, tokens)
    old = list(cache.tables[1].block_ids)
    swapped, block_ids = cache.swap_out([1])
    assert block_ids == old and state_of(cache) == (12, 2, 2)
    cache.check()
    assert len(cache.find(room(2, tokens)).matches[0].block_ids) == 2
    come_back(cache, swapped, tokens, old)


def come_back(cache: PrefixCache, swapped: Swapped, tokens: list[int], old: list[int]) -> None:
    cache.swap_in(swapped)
    new = cache.tables[1].block_ids
    assert not set(new) & set(old)
    cache.append(1)
    tokens.append(99)
    cache.note_computed(1, 12, tokens)
    cache.check()
    assert cache.index.match([*tokens, 0], "", 12).block_ids == [*old[:2], new[2]]
    cache.free(1)
    assert cache.pool.num_free == 12
    cache.check()


@BOTH
def test_a_swapped_sequence_whose_entries_are_gone_enters_its_blocks_again(kind: Kind):
    cache = make_cache(kind, num_blocks=6, block_size=4)
    tokens = list(range(11))
    admit(cache, 1, tokens)
    cache.note_computed(1, 11, tokens)
    swapped, _ = cache.swap_out([1])
    enter_and_leave(cache, list(range(100, 124)))
    cache.swap_in(swapped)
    cache.append(1)
    cache.note_computed(1, 12, [*tokens, 99])
    own = cache.tables[1].block_ids
    assert cache.index.match([*tokens, 99], "", 12).block_ids == own
    assert all(cache.pool.is_cached(block_id) for block_id in own)
    cache.check()


@BOTH
def test_a_sequence_that_computed_what_another_had_entered_is_found_after_the_other_is_gone(kind: Kind):
    cache = make_cache(kind, num_blocks=6, block_size=4)
    tokens = list(range(9))
    admit(cache, 1, tokens[:8])
    admit(cache, 2, tokens[:8])
    for seq_id in (1, 2):
        cache.note_computed(seq_id, 8, tokens[:8])
    own = list(cache.tables[2].block_ids)
    cache.free(1)
    enter_and_leave(cache, list(range(100, 116)))  # takes the first one's blocks
    assert cache.index.match(tokens, "", 8).block_ids == []
    for _ in range(4):
        cache.append(2)
    cache.note_computed(2, 12, [*tokens[:8], 1, 2, 3, 4])
    assert cache.index.match(tokens, "", 8).block_ids == own
    cache.check()


@BOTH
def test_blocks_that_left_the_window_are_given_up_from_the_end_of_their_sequence(kind: Kind):
    cache = make_cache(kind, num_blocks=8, block_size=4, window=5)
    tokens = list(range(24))
    admit(cache, 1, tokens)
    cache.note_computed(1, 24, tokens)
    assert cache.tables[1].num_released == 5
    cache.free(1)
    enter_and_leave(cache, list(range(100, 116)))  # two blocks are free, and two are given up
    assert len(cache.index.match([*tokens, 0], "", 24).block_ids) == 4
    cache.check()


@BOTH
def test_a_step_that_failed_leaves_no_part_full_block_and_holds_no_source(kind: Kind):
    """One sequence was about to come back out of the swap space, the other to begin with a copy."""
    cache = make_cache(kind, num_blocks=8, block_size=4)
    tokens = list(range(7))
    admit(cache, 1, tokens)
    cache.note_computed(1, 7, tokens)
    swapped, _ = cache.swap_out([1])
    cache.swap_in(swapped)
    admit(cache, 2, [0, 1, 2, 77, 78])
    assert len(cache._pinned) == (kind == "radix") and cache.pool.num_cached == 1
    cache.distrust()
    for seq_id in (1, 2):
        cache.free(seq_id)
    assert cache.pool.num_cached == 1 and cache.pool.num_free == 8 and not cache._pinned
    cache.check()
