"""Random walks over bookkeeping: a seeded driver for many operations, hypothesis for small cases that shrink."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Protocol

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

STEPS_PER_WALK = 250


class Walk(Protocol):
    """Some bookkeeping under test, and a simple model of what it should hold.

    ``rules`` names methods that take a random generator, do one operation at random in both, and return what
    happened, or None if nothing could be done. ``check`` compares the two.
    """

    rules: tuple[str, ...]

    def check(self) -> None: ...


def run_walks(make: Callable[[Random], Walk], num_operations: int, seed: int = 0) -> Counter[str]:
    """Do that many operations, on a new walk every `STEPS_PER_WALK`, and return how often each thing happened."""
    events: Counter[str] = Counter()
    walk_seed = seed
    while (left := num_operations - events.total()) > 0:
        rng = Random(walk_seed)
        walk = make(rng)
        events += _run_walk(walk, rng, min(left, STEPS_PER_WALK))
        walk_seed += 1
    return events


def _run_walk(walk: Walk, rng: Random, num_operations: int) -> Counter[str]:
    events: Counter[str] = Counter()
    while events.total() < num_operations:
        event = getattr(walk, rng.choice(walk.rules))(rng)
        walk.check()
        if event is not None:
            events[event] += 1
    return events


def run_small_walks(make: Callable[[Random], Walk], num_examples: int = 30) -> Counter[str]:
    """Let hypothesis look for a walk that fails; it shows the shortest that it finds."""
    events: Counter[str] = Counter()

    class Machine(RuleBasedStateMachine):
        @initialize(rng=st.randoms(use_true_random=False))
        def start(self, rng: Random) -> None:
            self.walk = make(rng)

        @rule(data=st.data(), rng=st.randoms(use_true_random=False))
        def act(self, data: st.DataObject, rng: Random) -> None:
            event = getattr(self.walk, data.draw(st.sampled_from(self.walk.rules)))(rng)
            self.walk.check()
            if event is not None:
                events[event] += 1

    case = Machine.TestCase
    case.settings = settings(max_examples=num_examples, stateful_step_count=30, deadline=None, derandomize=True)
    case("runTest").runTest()
    return events
