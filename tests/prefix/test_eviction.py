"""Which cached block is given up: the one that was used longest ago, the end of a sequence first, in constant time."""

import statistics
import time

import pytest

from minipaged.errors import UserError
from minipaged.prefix.cache import PrefixCache
from minipaged.prefix.eviction import EVICTION_POLICIES, LRU, make_policy
from tests.prefix.steps import KINDS, Kind, PrefixDriver, admit, count_calls, enter_and_leave, make_cache

BOTH = pytest.mark.parametrize("kind", KINDS)


def evicted_order(policy: LRU) -> list[int]:
    return [policy.evict() for _ in range(len(policy))]


def test_the_block_that_came_first_goes_first():
    policy = LRU()
    for block_id in (3, 1, 2):
        policy.add(block_id)
    assert len(policy) == 3 and evicted_order(policy) == [3, 1, 2] and len(policy) == 0


def test_a_block_that_was_used_again_goes_last():
    policy = LRU()
    for block_id in (3, 1, 2):
        policy.add(block_id)
    policy.remove(3)
    policy.add(3)
    assert evicted_order(policy) == [1, 2, 3]


def test_a_policy_goes_by_name_and_an_unknown_one_is_refused():
    assert isinstance(make_policy("lru"), LRU) and set(EVICTION_POLICIES) >= {"lru"}
    assert make_policy("lru") is not make_policy("lru")
    with pytest.raises(UserError, match="eviction_policy must be one of lru, not 'mru'"):
        make_policy("mru")


# -- in a cache


@BOTH
def test_a_sequence_is_evicted_from_its_end(kind: Kind):
    cache = make_cache(kind, num_blocks=6, block_size=4)
    tokens = list(range(16))
    enter_and_leave(cache, tokens)
    for num_left in (3, 2, 1, 0):
        while cache.pool.num_free > cache.pool.num_idle:
            cache.pool.allocate()
        cache.pool.allocate()
        assert len(cache.index.match(tokens, "", 16).block_ids) == num_left


@BOTH
def test_the_sequence_that_was_used_longest_ago_is_evicted_first(kind: Kind):
    cache = make_cache(kind, num_blocks=6, block_size=4)
    texts = [[i] * 8 for i in range(3)]
    for tokens in texts:
        enter_and_leave(cache, tokens)
    enter_and_leave(cache, texts[0] + [9] * 3)  # uses the first again; its tail takes one block
    found = [len(cache.index.match(tokens, "", 8).block_ids) for tokens in texts]
    assert found == [2, 1, 2], "the end of the second makes room for the tail"


@BOTH
def test_a_block_in_use_is_never_evicted(kind: Kind):
    driver = PrefixDriver(kind, num_blocks=8, block_size=4, max_num_seqs=8)
    first = driver.add(list(range(12)), 5)
    driver.step()
    held = list(driver.cache.tables[100].block_ids)
    for i in range(1, 6):
        driver.add([i * 100 + j for j in range(9)], 1)
    for _ in range(6):
        driver.step()
        if first in driver.scheduler.groups:
            assert driver.cache.tables[100].block_ids[:3] == held[:3]
    assert driver.cache.pool.num_evictions > 0 and not driver.acts("preempt")
    driver.run()


@BOTH
def test_a_parent_that_is_evicted_takes_its_idle_children_along_and_leaves_no_wrong_entry(kind: Kind):
    """The second sequence computes its own copy of the first block, so its second one outlives the first's parent."""
    cache = make_cache(kind, num_blocks=5, block_size=4)
    tokens = list(range(9))
    admit(cache, 1, tokens[:5])
    admit(cache, 2, tokens)  # nothing is written yet, so nothing is found
    cache.note_computed(1, 5, tokens[:5])
    cache.note_computed(2, 9, tokens)
    parent = cache.tables[1].block_ids[0]
    child = cache.tables[2].block_ids[1]
    assert parent in cache.index and child in cache.index and cache.tables[2].block_ids[0] not in cache.index
    cache.free(1)
    while parent in cache.index:
        cache.pool.allocate()
    cache.index.check()
    cache.pool.check()
    assert cache.index.match(tokens, "", 8).block_ids == []
    assert (child in cache.index) == (kind == "hash"), "the tree forgets what cannot be reached; the chain in its turn"
    assert cache.pool.num_references(child) == 1
    cache.note_computed(2, 9, tokens)
    cache.free(2)
    cache.index.check()


# -- cost


def full_cache(kind: Kind, num_blocks: int) -> PrefixCache:
    """Return a cache full of idle blocks: sequences of eight blocks, of which two are common."""
    cache = make_cache(kind, num_blocks, block_size=2)
    for i in range(num_blocks // 6 + 1):
        enter_and_leave(cache, [1, 2, 3, 4, i, i, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    assert cache.pool.num_cached > num_blocks * 0.99
    return cache


@BOTH
def test_a_hundred_thousand_cached_blocks_cost_a_look_up_and_an_eviction_no_more_than_a_hundred(kind: Kind):
    def costs(num_blocks: int) -> list[int]:
        cache = full_cache(kind, num_blocks)
        tokens = [1, 2, 3, 4, 7, 7, 1, 1, 2, 2, 0]
        match, evict = lambda: cache.index.match(tokens, "", 10), cache.pool.allocate
        assert len(match().block_ids) == 5
        return [count_calls(match), *(count_calls(evict) for _ in range(6))]

    assert costs(100_000) == costs(96)


def test_the_first_of_many_blocks_is_found_at_once_after_half_of_them_have_gone():
    """A plain dict would look through the gaps of all that have gone."""

    def seconds(num_blocks: int) -> float:
        policy = LRU()
        for block_id in range(num_blocks):
            policy.add(block_id)
        for _ in range(num_blocks // 2):
            policy.evict()
        times = []
        for _ in range(100):
            start = time.perf_counter()
            policy.evict()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    assert seconds(100_000) < 20 * seconds(500)
