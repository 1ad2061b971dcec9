"""Scheduler and pool together: requests of all kinds come, grow, fork, are sent away, return and are dropped."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Any

import pytest

from minipaged import use
from minipaged.batching.cache import BatchingCache
from minipaged.batching.group import Group
from minipaged.batching.scheduler import Scheduler
from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from tests.batching.random_requests import RandomRequests
from tests.walks import run_small_walks, run_walks


class SchedulerWalk:
    """Let anything happen in any order. The driver checks every act, every plan and the books after every step."""

    rules: tuple[str, ...] = (
        "add",
        "add",
        "step",
        "step",
        "step",
        "step",
        "step",
        "abort",
        "abort_sequence",
        "step_and_abort",
        "send_away",
    )

    def __init__(self, rng: Random):
        self.requests = RandomRequests(rng)
        self.driver = self.requests.driver
        self.is_fair = rng.random() < 0.7

    def add(self, rng: Random) -> str | None:
        return self.requests.add() if self.requests.scheduler.num_waiting < 4 else None

    def step(self, rng: Random) -> str:
        before = len(self.driver.events)
        with self.victims(rng):
            self.driver.step()
        return kind_of_step([event.act for event in self.driver.events[before:]])

    def step_and_abort(self, rng: Random) -> str | None:
        """Drop somebody, wholly or in part, while a step runs."""
        if rng.random() < 0.8:
            return self.step(rng)
        states: list[str | None] = []
        how = rng.choice([self.requests.abort, self.requests.abort_sequence])
        with self.victims(rng):
            self.driver.step(between=lambda: states.append(how()))
        return states[0] and f"{states[0].split()[0]} in mid-step"

    def victims(self, rng: Random) -> AbstractContextManager[None]:
        """Send away the newest, or in some walks anybody: more kinds of requests then leave in more states."""
        return nullcontext() if self.is_fair else use(choose_victim=rng.choice)

    def send_away(self, rng: Random) -> str | None:
        """Send away somebody for whom there is room, in any state; most come back in the next step."""
        running = self.driver.scheduler.running
        if not running or rng.random() < 0.7:
            return None
        several = [group for group in running if len(group.members) > 1 and not group.is_decoding]
        policy = self.driver.scheduler.preemption
        self.driver.send_away(rng.choice(several or running).request_id, rng.choice(["recompute", "swap"]))
        self.driver.scheduler.preemption = policy
        return "send away"

    def abort(self, rng: Random) -> str | None:
        return self.requests.abort() if rng.random() < 0.15 else None

    def abort_sequence(self, rng: Random) -> str | None:
        return self.requests.abort_sequence()

    def check(self) -> None:
        self.driver.check()
        cache, size = self.driver.cache, self.requests.block_size
        slots, blocks = set(), set()
        for table in cache.tables.values():
            slots.update(table.slots(table.num_released * size, table.num_tokens))
            blocks.update(table.owned_block_ids)
        assert cache.pool.num_free == cache.pool.num_blocks - len(blocks), "a block is lost"
        assert cache.waste() == Waste(len(slots), 0, len(blocks) * size - len(slots), 0)


ACTS = ("wait", "admit", "chunk", "decode", "copy", "preempt", "swap", "resume", "finish")
RARE = ("swap", "resume", "preempt", "copy", "finish", "admit", "chunk", "decode")

STATES = ("queued", "mid-prefill", "decoding", "sent away", "swapped")
EVENTS = {
    *(f"add {kind}" for kind in ("lone", "samples", "beams")),
    *(f"step with {act}" for act in RARE),
    *(f"abort {state}" for state in STATES),
    *(f"abort one of 2 {state}" for state in ("decoding", "sent away", "swapped")),
    "abort leader of 2 sent away",
    "abort in mid-step",
    "send away",
    "empty step",
}


def kind_of_step(acts: list[str]) -> str:
    return next((f"step with {act}" for act in RARE if act in acts), "empty step")


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


def serve(requests: RandomRequests, num_requests: int) -> None:
    """Add requests while others run, drop some, and go on until all have ended.

    The first of those that run gets a token at every step and is never sent away. It computes its tokens once, or
    twice if it had been sent away before it was the first. That bounds the steps of all together.
    """
    rng, scheduler = requests.rng, requests.scheduler
    num_added = num_steps = 0
    while num_added < num_requests or scheduler.has_unfinished:
        if num_added < num_requests and scheduler.num_waiting < 4 and rng.random() < 0.6:
            requests.add()
            num_added += 1
        if rng.random() < 0.04:
            rng.choice([requests.abort, requests.abort_sequence])()
        num_steps += scheduler.has_unfinished
        assert num_steps <= requests.max_num_steps, "nobody gets done"
        requests.driver.step()


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
    def wrong(self: Any, group: Group, plan: Any) -> str | None:
        reason = reason_to_wait(self, group, plan)
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
