"""A walk over scheduler and pool together, and a run of requests from first to last."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from random import Random

from minipaged import use
from minipaged.contiguous.arena import Waste
from tests.batching.random_requests import RandomRequests


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

    def __init__(self, rng: Random, make_requests: Callable[[Random], RandomRequests] = RandomRequests):
        self.requests = make_requests(rng)
        self.driver: Any = self.requests.driver
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
