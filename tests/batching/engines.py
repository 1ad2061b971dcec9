"""An engine of this rung whose books are checked after every step, and ways to have requests sent away."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minipaged import LLM, SamplingParams, use
from minipaged.batching.group import Group
from minipaged.batching.plan import Event, Plan
from minipaged.batching.scheduler import Scheduler
from minipaged.foundation.sequence import Result, StepOutput


@dataclass
class Watched:
    """An engine with checked books, the events of its scheduler, and how many blocks were in use after each step."""

    llm: LLM
    events: list[Event] = field(default_factory=list)
    used_blocks: list[int] = field(default_factory=list)
    delivered: list[StepOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine: Any = self.llm.engine
        self.scheduler: Scheduler = self.engine.scheduler
        self.scheduler.listener = self.events.append
        step = self.engine.step

        def watched_step() -> list[StepOutput]:
            outputs = step()
            self.check()
            self.used_blocks.append(self.engine.stats()["used_blocks"])
            self.delivered += outputs
            return outputs

        self.engine.step = watched_step

    def check(self) -> None:
        """Hold the books of engine, scheduler, cache and swap space against each other."""
        engine, scheduler = self.engine, self.scheduler
        engine.cache.check()
        flight = getattr(engine, "in_flight", None)
        late = {seq.seq_id for seq in flight.seqs} if flight else set()  # the scheduler is a token ahead
        assert engine.members.keys() == engine.families.keys()
        for request_id in engine.members.keys() | scheduler.groups.keys():
            group, members = scheduler.groups.get(request_id), engine.members[request_id]
            known = [(seq.seq_id, seq.token_ids) for seq in members]
            planned = (
                [(m.seq_id, [token for token in m.token_ids if token >= 0]) for m in group.members] if group else []
            )
            assert planned == [each for each in known if each in planned]
            assert {seq_id for seq_id, tokens in known if (seq_id, tokens) not in planned} <= late
            if group is None:
                continue
            assert all(m.seq_id in late for m in group.members if m.token_ids[-1] < 0)
            assert engine.swap_space.holds(request_id) == (group.swapped is not None)
        running = [seq_id for group in scheduler.running for seq_id in group.seq_ids]
        assert sorted(engine.cache.seq_ids) == sorted(running), "only those that run have slots"
        assert sum(group.num_sequences for group in scheduler.running) <= scheduler.max_num_seqs
        assert not getattr(engine.cache, "_pinned", None), "a block is held for a copy that has been made"

    def generate(self, *arguments: Any, **others: Any) -> list[Result]:
        """Generate, and check that nothing is left behind."""
        results = self.llm.generate(*arguments, **others)
        self.assert_idle()
        return results

    def add(self, prompt: list[int], params: Any) -> int:
        """Queue a request."""
        return self.engine.add_request(prompt, params)

    def steps(self, count: int) -> list[StepOutput]:
        """Run some steps."""
        return [output for _ in range(count) for output in self.engine.step()]

    def run(self, at_most: int = 2000) -> list[StepOutput]:
        """Step until nothing is left to do, but not for ever."""
        outputs = []
        while self.engine.has_unfinished():
            at_most -= 1
            assert at_most, "the engine makes no progress"
            outputs += self.engine.step()
        self.assert_idle()
        return outputs

    def assert_idle(self) -> None:
        """Check that all slots are free and that no request has left a trace."""
        engine, stats = self.engine, self.engine.stats()
        self.check()
        assert not engine.has_unfinished() and not engine.members and not engine.running and not engine.dropped
        assert stats["free_blocks"] == stats["num_blocks"] and self.scheduler.num_swapped_blocks == 0
        assert not engine.swap_space._staging and not engine.cache.seq_ids

    @property
    def preemptions(self) -> int:
        """Return how often requests were sent away."""
        return self.engine.stats()["preemptions"]

    @property
    def swaps(self) -> int:
        """Return how often that was into the swap space."""
        return self.engine.stats()["swaps"]

    def chunks_of(self, request_id: int) -> list[int]:
        """Return how many tokens of a request each chunk of its prefills had."""
        return [each.num_tokens for each in self.events if each.act == "chunk" and each.request_id == request_id]


def watched(folder: Path, **options: Any) -> Watched:
    """Return a checked engine on this rung."""
    return Watched(LLM(folder, **({"rung": "batching", "dtype": "float32", "device": "cpu"} | options)))


def sent_away(when: Callable[[Group], bool]) -> AbstractContextManager[None]:
    """Have every running request sent away before a step that `when` says so of, though there are blocks enough."""

    def plan_step(scheduler: Scheduler) -> Plan:
        before = Plan()
        for group in reversed(list(scheduler.running)):
            if when(group):
                scheduler._preempt(group, before, "asked for")
        plan = type(scheduler).plan_step(scheduler)
        plan.swaps_out[:0] = before.swaps_out
        return plan

    return use(plan_step=plan_step)


def after_its_first_token(group: Group) -> bool:
    """Tell whether a request has just got its first token, for `sent_away`."""
    return group.is_decoding and group.num_preemptions == 0


def after_every_token() -> Callable[[Group], bool]:
    """Return a test whether a request has got a token since it was last sent away, for `sent_away`."""
    lengths: dict[int, int] = {}

    def has_grown(group: Group) -> bool:
        length = len(group.members[0].token_ids)
        if not group.is_decoding or lengths.get(group.request_id) == length:
            return False
        lengths[group.request_id] = length
        return True

    return has_grown


def prompt_of(num_tokens: int, seed: int = 3) -> list[int]:
    """Return some token ids."""
    return [(7 * i + seed) % 250 for i in range(num_tokens)]


def greedy(max_tokens: int = 8, **others: Any) -> SamplingParams:
    """Return parameters of a greedy answer of some length."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **others)


def tokens_of(results: list[Any]) -> list[list[int]]:
    """Return the tokens of each result."""
    return [result.token_ids for result in results]


def reference(folder: Path, prompts: list[list[int]], params: Any) -> list[Any]:
    """Return the answers of rung 0."""
    return LLM(folder, rung="foundation", dtype="float32", device="cpu").generate(prompts, params)


def send_away(w: Watched, request_id: int) -> None:
    """Have a request sent away between two steps, so that it waits when this returns."""
    plan = Plan()
    w.scheduler._preempt(w.scheduler.groups[request_id], plan, "asked for")
    w.engine._move_blocks(plan)
    w.check()
