"""Scheduler, pool and index together: after every act each entry has to name what its block holds."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from minipaged import use
from minipaged.errors import AccountingError
from minipaged.prefix.cache import PrefixCache
from minipaged.prefix.caching_pool import CachingBlockPool
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.radix_tree import RadixTree
from minipaged.sharing.ref_pool import RefCountedBlockPool
from tests.batching.scheduler_walk import ACTS, EVENTS, SchedulerWalk, serve
from tests.prefix.steps import KINDS, Kind, PrefixRequests
from tests.walks import run_small_walks, run_walks

BOTH = pytest.mark.parametrize("kind", KINDS)
HITS = ("admit with hit", "resume with hit", "hit tokens", "evictions")


def maker(kind: Kind | None, walks: list[SchedulerWalk] | None = None) -> Callable[[Random], SchedulerWalk]:
    def make(rng: Random) -> SchedulerWalk:
        walk = SchedulerWalk(rng, lambda rng: PrefixRequests(rng, kind))
        if walks is not None:
            walks.append(walk)
        return walk

    return make


def seen_in(walks: list[SchedulerWalk]) -> Counter[str]:
    return sum((walk.driver.seen for walk in walks), Counter())


@BOTH
def test_long_random_walks_find_only_what_is_right_and_lose_no_block(kind: Kind, num_operations: int):
    walks: list[SchedulerWalk] = []
    events = run_walks(maker(kind, walks), num_operations)
    assert events.total() == num_operations and events.keys() >= EVENTS, EVENTS - events.keys()
    acts = Counter(event.act for walk in walks for event in walk.driver.events)
    assert acts.keys() == set(ACTS) and min(acts.values()) > num_operations / 100, acts
    seen = seen_in(walks)
    assert all(seen[each] > num_operations / 100 for each in HITS), seen
    reasons = Counter(event.reason for walk in walks for event in walk.driver.events if event.act == "wait")
    assert reasons["waits for a block that another request is computing"] > num_operations / 1000
    assert (seen["partial hit"] > num_operations / 100) == (kind == "radix"), seen


@BOTH
def test_small_random_walks_find_only_what_is_right_and_lose_no_block(kind: Kind):
    walks: list[SchedulerWalk] = []
    events = run_small_walks(maker(kind, walks))
    assert events.keys() >= {"add lone", "add samples", "add beams", "step with decode", "step with finish"}, events
    assert seen_in(walks)["hit tokens"] > 0


def test_three_thousand_requests_that_begin_alike_all_end_and_lose_no_block():
    acts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for seed in range(20):
        requests = PrefixRequests(Random(seed), KINDS[seed % 2], num_priorities=1)
        serve(requests, num_requests=150)
        cache, scheduler, memory = requests.driver.cache, requests.scheduler, requests.driver.memory
        assert cache.pool.num_free == cache.pool.num_blocks and not cache.tables and not cache._coming
        assert (
            cache.pool.num_idle
            == cache.pool.num_cached
            == len({slot // cache.pool.block_size for slot in memory.slots})
        )
        assert not scheduler.groups and not scheduler.running and scheduler.num_swapped_blocks == 0
        assert not memory.swapped
        ended = [event.request_id for event in requests.driver.acts("finish") if event.seq_id is None]
        assert sorted(ended) == list(range(150)), "a request ended twice or never"
        acts.update(event.act for event in requests.driver.events)
        seen += requests.driver.seen
    assert acts.keys() == set(ACTS) and acts["preempt"] > 100 and acts["swap"] > 100, acts
    assert all(seen[each] > 300 for each in (*HITS, "partial hit")), seen


def test_with_one_key_for_all_blocks_nothing_wrong_is_found(num_operations: int):
    walks: list[SchedulerWalk] = []
    with use(block_key=lambda parent, token_ids: b"one"):
        run_walks(maker("hash", walks), num_operations // 4)
    assert seen_in(walks)["hit tokens"] > 0


# -- a walk sees what is broken


def enter_at_once(allocate: Any) -> Any:
    """Make blocks visible before they are written."""

    def wrong(self: Any, room: Any) -> list[int]:
        starts = allocate(self, room)
        tokens = room.token_ids[0]
        if len(tokens) > self.pool.block_size:
            PrefixCache.note_computed(self, room.seq_ids[0], self.pool.block_size, tokens)
        return starts

    return wrong


def keep_the_entry(forget: Any) -> Any:
    return lambda self, block_id: [block_id]


def hit_everything(match: Any) -> Any:
    return lambda self, tokens, salt, limit, memo: match(self, tokens, salt, len(tokens))


def count_idle_twice(weigh: Any) -> Any:
    def wrong(self: Any, room: Any, matches: Any) -> Any:
        finding = weigh(self, room, matches)
        return type(finding)(finding.matches, finding.num_shared, finding.num_new, 0)

    return wrong


def hold_nothing(hold: Any) -> Any:
    def wrong(self: Any, match: Any) -> None:
        for block_id in match.block_ids:
            self.pool.share(block_id)

    return wrong


def hold_for_ever(release: Any) -> Any:
    return lambda self: None


def copy_nothing(start: Any) -> Any:
    def wrong(self: Any, room: Any, finding: Any, i: int) -> int:
        num_tokens = start(self, room, finding, i)
        self.pending_copies.clear()
        return num_tokens

    return wrong


def trust_everything(enter_tail: Any) -> Any:
    def wrong(self: Any, walk: Any, table: Any) -> None:
        walk.num_computed = min(table.num_tokens, len(walk.token_ids))
        enter_tail(self, walk, table)

    return wrong


def forget_to_retract(retract: Any) -> Any:
    return lambda self, walk: setattr(walk, "coming", None)


def free_for_good(free: Any) -> Any:
    """Queue a cached block as if it held nothing."""

    def wrong(self: Any, block_id: int) -> None:
        RefCountedBlockPool.free(self, block_id)

    return wrong


@pytest.mark.parametrize(
    ("kind", "owner", "name", "sabotage"),
    [
        ("hash", PrefixCache, "allocate", enter_at_once),
        ("radix", PrefixCache, "allocate", enter_at_once),
        ("hash", HashChain, "forget", keep_the_entry),
        ("radix", RadixTree, "forget", keep_the_entry),
        ("hash", HashChain, "match", hit_everything),
        ("radix", RadixTree, "match", hit_everything),
        ("hash", PrefixCache, "_weigh", count_idle_twice),
        ("radix", PrefixCache, "_hold", hold_nothing),
        ("radix", PrefixCache, "release_pins", hold_for_ever),
        ("radix", PrefixCache, "_start_table", copy_nothing),
        ("radix", PrefixCache, "_enter_tail", trust_everything),
        ("hash", PrefixCache, "_retract", forget_to_retract),
        ("hash", CachingBlockPool, "free", free_for_good),
        ("radix", CachingBlockPool, "free", free_for_good),
    ],
    ids=lambda value: value.__name__ if callable(value) and value.__name__.islower() else "",
)
def test_the_walk_sees_a_broken_part(kind: Kind, owner: Any, name: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, name, sabotage(getattr(owner, name)))
    with pytest.raises((AssertionError, AccountingError, KeyError)):
        run_walks(maker(kind), 10_000)
