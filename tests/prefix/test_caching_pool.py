"""A pool whose free blocks may still be worth something: each is in use, queued or idle, and free counts once."""

from random import Random

import pytest

from minipaged.errors import AccountingError
from minipaged.prefix.caching_pool import CachingBlockPool
from minipaged.prefix.eviction import LRU
from tests.walks import run_small_walks, run_walks


class Forgotten:
    """Stands for an index in which each block may have others behind it."""

    def __init__(self) -> None:
        self.behind: dict[int, list[int]] = {}
        self.asked: list[int] = []

    def __call__(self, block_id: int) -> list[int]:
        self.asked.append(block_id)
        return [block_id, *self.behind.pop(block_id, [])]


def make_pool(num_blocks: int = 4) -> tuple[CachingBlockPool, Forgotten]:
    forget = Forgotten()
    return CachingBlockPool(num_blocks, 4, LRU(), forget), forget


def take(pool: CachingBlockPool, count: int, is_cached: bool = True) -> list[int]:
    block_ids = [pool.allocate() for _ in range(count)]
    if is_cached:
        for block_id in block_ids:
            pool.mark_cached(block_id)
    return block_ids


def test_an_idle_block_counts_as_free_once():
    pool, _ = make_pool()
    take(pool, 3)
    pool.free(2)
    pool.free(1)
    assert (pool.num_free, pool.num_idle, pool.num_cached, pool.free_block_ids) == (3, 2, 3, [3])
    assert not pool.is_free(1), "its content must not be wiped"
    pool.check()


def test_queued_blocks_are_taken_before_idle_ones_are_evicted():
    pool, forget = make_pool()
    take(pool, 2)
    pool.free(1)
    pool.free(0)
    assert take(pool, 2, is_cached=False) == [2, 3] and not forget.asked
    assert take(pool, 2, is_cached=False) == [1, 0] and forget.asked == [1, 0]
    assert pool.num_evictions == 2 and pool.num_cached == 0
    with pytest.raises(AccountingError, match="all 4 blocks"):
        pool.allocate()
    pool.check()


def test_a_block_in_use_is_not_evicted_and_one_that_comes_back_is_not_either():
    pool, forget = make_pool(2)
    take(pool, 2)
    pool.free(0)
    pool.share(0)
    assert pool.num_free == 0 and pool.num_references(0) == 1 and pool.num_cached == 2
    with pytest.raises(AccountingError):
        pool.allocate()
    pool.share(0)
    pool.free(0)
    assert pool.num_free == 0, "somebody has it still"
    pool.free(0)
    assert pool.num_free == 1 and not forget.asked
    pool.check()


def test_a_block_that_cannot_be_found_any_more_is_queued_and_one_in_use_stays_with_its_user():
    pool, forget = make_pool()
    take(pool, 4)
    for block_id in (0, 1, 2):
        pool.free(block_id)
    forget.behind[0] = [2, 3]
    assert pool.allocate() == 0
    assert (pool.num_free, pool.num_idle, pool.free_block_ids, pool.num_cached) == (2, 1, [2], 1)
    assert pool.num_references(3) == 1 and not pool.is_cached(3) and pool.is_cached(1)
    pool.free(3)
    assert pool.free_block_ids == [2, 3]
    pool.check()


def test_a_block_is_not_freed_twice_whether_it_is_cached_or_not():
    pool, _ = make_pool()
    take(pool, 1)
    take(pool, 1, is_cached=False)
    for block_id in (0, 1):
        pool.free(block_id)
        with pytest.raises(AccountingError):
            pool.free(block_id)
        pool.check()
    assert pool.num_free == 4


def test_a_free_block_that_is_not_cached_cannot_be_shared_and_no_block_beyond_the_pool_can():
    pool, _ = make_pool()
    for block_id in (0, 4, -1):
        with pytest.raises(AccountingError):
            pool.share(block_id)
        with pytest.raises(AccountingError):
            pool.free(block_id)


class PoolWalk:
    """Compare the pool with a dict of counts and a list of idle blocks."""

    rules: tuple[str, ...] = ("allocate", "allocate", "share", "free", "free", "mark", "unmark")

    def __init__(self, rng: Random):
        self.num_blocks = rng.randint(1, 8)
        self.pool = CachingBlockPool(self.num_blocks, 4, LRU(), self.forget)
        self.counts: dict[int, int] = {}
        self.cached: set[int] = set()
        self.idle: list[int] = []
        self.rng = rng
        self.num_evictions = 0

    def forget(self, block_id: int) -> list[int]:
        assert block_id == self.idle[0], "not the one that was used longest ago"
        gone = {block_id} | {each for each in self.cached if self.rng.random() < 0.2}
        self.cached -= gone
        self.idle = [each for each in self.idle if each not in gone]
        self.num_evictions += len(gone)
        return list(gone)

    def allocate(self, rng: Random) -> str:
        num_free, num_idle = self.pool.num_free, len(self.idle)
        if num_free == 0:
            with pytest.raises(AccountingError):
                self.pool.allocate()
            return "full"
        block_id = self.pool.allocate()
        assert block_id not in self.counts and block_id not in self.idle and block_id not in self.cached
        self.counts[block_id] = 1
        return "evict" if num_free == num_idle else "take"

    def share(self, rng: Random) -> str | None:
        choices = [*self.counts, *self.idle]
        if not choices:
            return None
        block_id = rng.choice(choices)
        self.pool.share(block_id)
        self.counts[block_id] = self.counts.get(block_id, 0) + 1
        if block_id not in self.idle:
            return "share"
        self.idle.remove(block_id)
        return "share idle"

    def free(self, rng: Random) -> str | None:
        if not self.counts:
            return None
        block_id = rng.choice(list(self.counts))
        self.pool.free(block_id)
        self.counts[block_id] -= 1
        if self.counts[block_id]:
            return "free one of several"
        del self.counts[block_id]
        if block_id in self.cached:
            self.idle.append(block_id)
            return "free cached"
        return "free"

    def mark(self, rng: Random) -> str | None:
        choices = [block_id for block_id in self.counts if block_id not in self.cached]
        if not choices:
            return None
        block_id = rng.choice(choices)
        self.pool.mark_cached(block_id)
        self.cached.add(block_id)
        return "mark"

    def unmark(self, rng: Random) -> str | None:
        if not self.cached or rng.random() < 0.7:
            return None
        block_id = rng.choice(sorted(self.cached))
        self.pool.unmark_cached(block_id)
        self.cached.remove(block_id)
        if block_id not in self.idle:
            return "unmark"
        self.idle.remove(block_id)
        return "unmark idle"

    def check(self) -> None:
        pool = self.pool
        pool.check()
        assert [pool.num_references(i) for i in range(self.num_blocks)] == [
            self.counts.get(i, 0) for i in range(self.num_blocks)
        ]
        assert {i for i in range(self.num_blocks) if pool.is_cached(i)} == self.cached
        assert (pool.num_cached, pool.num_idle) == (len(self.cached), len(self.idle))
        assert pool.num_free == self.num_blocks - len(self.counts)
        assert pool.num_evictions == self.num_evictions
        assert all(not pool.is_free(i) for i in [*self.counts, *self.idle])


EVENTS = {
    *("full", "evict", "take", "share", "share idle", "free", "free cached", "free one of several"),
    *("mark", "unmark", "unmark idle"),
}


def test_long_random_walks_agree_with_counts_and_a_list(num_operations: int):
    events = run_walks(PoolWalk, num_operations)
    assert events.keys() == EVENTS and min(events.values()) > num_operations / 200, events


def test_small_random_walks_agree_with_counts_and_a_list():
    assert run_small_walks(PoolWalk).keys() >= {"take", "evict", "mark", "free cached"}
