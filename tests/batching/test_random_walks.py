"""Scheduler and pool together: requests of all kinds come, grow, fork, are sent away, return and are dropped."""

from collections import Counter
from random import Random
from typing import Any

import pytest

from minipaged import use
from minipaged.batching.cache import BatchingCache
from minipaged.batching.group import Group
from minipaged.batching.scheduler import Scheduler
from minipaged.errors import AccountingError
from tests.batching.random_requests import RandomRequests
from tests.batching.scheduler_walk import ACTS, EVENTS, SchedulerWalk, serve
from tests.walks import run_small_walks, run_walks


def test_long_random_walks_lose_no_block_and_mix_up_no_token(num_operations: int):
    walks: list[SchedulerWalk] = []

    def make(rng: Random) -> SchedulerWalk:
        walks.append(SchedulerWalk(rng))
        return walks[-1]

    events = run_walks(make, num_operations)
    assert events.total() == num_operations
    assert events.keys() >= EVENTS, EVENTS - events.keys()
    acts = Counter(event.act for walk in walks for event in walk.driver.events)
    assert acts.keys() == set(ACTS) and min(acts.values()) > num_operations / 100, acts


def test_small_random_walks_lose_no_block_and_mix_up_no_token():
    events = run_small_walks(SchedulerWalk)
    assert events.keys() >= {"add lone", "add samples", "add beams", "step with decode", "step with finish"}, events


def test_three_thousand_requests_with_random_aborts_all_end_and_lose_no_block():
    acts: Counter[str] = Counter()
    num_ended = 0
    for seed in range(20):
        requests = RandomRequests(Random(seed), num_priorities=1)
        serve(requests, num_requests=150)
        cache, scheduler = requests.driver.cache, requests.scheduler
        assert cache.pool.num_free == cache.pool.num_blocks and not cache.tables
        assert not scheduler.groups and not scheduler.running and scheduler.num_swapped_blocks == 0
        assert not requests.driver.memory.swapped and not requests.driver.memory.slots
        ended = [event.request_id for event in requests.driver.acts("finish") if event.seq_id is None]
        assert sorted(ended) == list(range(150)), "a request ended twice or never"
        num_ended += len(ended)
        acts.update(event.act for event in requests.driver.events)
    assert num_ended == 3000
    assert acts.keys() == set(ACTS) and acts["preempt"] > 300 and acts["swap"] > 300, acts


def no_copy(cache: BatchingCache, seq_id: int) -> None:
    """Write into the shared block."""


def test_the_walk_sees_a_missing_copy():
    with use(prepare_write=no_copy), pytest.raises(AssertionError):
        run_walks(SchedulerWalk, 3000)


def release_too_much(release: Any) -> Any:
    return lambda self, seq_id, token: release(self, seq_id, token + 1)


def swap_in_wrong_order(swap_in: Any) -> Any:
    def wrong(self: Any, swapped: Any) -> list[tuple[int, int]]:
        pairs = swap_in(self, swapped)
        return [(place, block_id) for (place, _), (_, block_id) in zip(pairs, pairs[::-1], strict=True)]

    return wrong


def preempt_too_early(can_append: Any) -> Any:
    return lambda self, seq_ids: can_append(self, seq_ids) and self.pool.num_free > 2


def share_too_much(num_common: Any) -> Any:
    return lambda self: num_common(self) and len(self.members[0].token_ids)


def enter_too_early(can_admit: Any) -> Any:
    return lambda self, room, headroom=0: can_admit(self, room, headroom - 1)


def forget_a_seat(reason_to_wait: Any) -> Any:
    def wrong(self: Any, group: Group, plan: Any, num_seats: int) -> str | None:
        reason = reason_to_wait(self, group, plan, num_seats)
        return None if reason and "seats" in reason else reason

    return wrong


def keep_what_was_swapped(forget_swapped: Any) -> Any:
    return lambda self, group: setattr(group, "swapped", None)


@pytest.mark.parametrize(
    ("owner", "name", "sabotage"),
    [
        (BatchingCache, "release_before", release_too_much),
        (BatchingCache, "swap_in", swap_in_wrong_order),
        (BatchingCache, "can_append", preempt_too_early),
        (BatchingCache, "can_admit", enter_too_early),
        (Group, "_num_common", share_too_much),
        (Scheduler, "_reason_to_wait", forget_a_seat),
        (Scheduler, "_forget_swapped", keep_what_was_swapped),
    ],
    ids=lambda value: value.__name__ if callable(value) and value.__name__.islower() else "",
)
def test_the_walk_sees_a_broken_part(owner: Any, name: str, sabotage: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owner, name, sabotage(getattr(owner, name)))
    with pytest.raises((AssertionError, AccountingError)):
        run_walks(SchedulerWalk, 20_000)
