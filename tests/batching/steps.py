"""Drive a scheduler without a model: made-up tokens, and a memory that knows whose token lies in which slot."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache
from minipaged.batching.group import Group, Member
from minipaged.batching.plan import Event, NextToken, Plan
from minipaged.batching.preemption import Policy, Preemption
from minipaged.batching.scheduler import Scheduler
from minipaged.shapes import UNUSED_BLOCK
from minipaged.tiers import replacement, use

Answer = Callable[[Group], list[NextToken]]


class Memory:
    """What blocks and swap space hold, as plain Python.

    A token's key and value depend on all tokens up to it, so a slot holds the hash of that history. Every chunk is
    checked to find, in each slot that it would look at, the history of its own sequence. A fork, a copy, a swap or a
    chunk that goes wrong leaves somebody else's there, or none: blocks that get free are wiped.
    """

    def __init__(self, cache: BatchingCache | ArenaCache):
        self.cache = cache
        self.block_size = 1 if isinstance(cache, ArenaCache) else cache.pool.block_size
        self.slots: dict[int, int] = {}
        self.swapped: dict[int, dict[int, list[int | None]]] = {}  # by request and place

    def carry_out(self, plan: Plan, histories: dict[int, list[int]]) -> None:
        """Do what a plan says, in the order that it promises."""
        for swap in plan.swaps_out:
            self.swapped[swap.request_id] = {place: self.block(block_id) for place, block_id in swap.pairs}
        for swap in plan.swaps_in:
            places = self.swapped.pop(swap.request_id)
            for place, block_id in swap.pairs:
                self.write(block_id, places[place])
        for target, values in [(target, self.block(source)) for source, target in plan.copies]:
            self.write(target, values)
        for chunk in plan.chunks:
            history = histories[chunk.member.seq_id]
            before = [0, *history][chunk.start : chunk.stop]
            expected = [hash(pair) for pair in zip(before, chunk.token_ids, strict=True)]
            assert expected == history[chunk.start : chunk.stop], "a chunk has other tokens than its sequence"
            self.slots.update(zip(chunk.slots, expected, strict=True))
        for chunk in plan.chunks:
            self.check_reads(chunk.member.seq_id, chunk.start, chunk.stop, histories[chunk.member.seq_id])

    def check_reads(self, seq_id: int, start: int, stop: int, history: list[int]) -> None:
        """Look at what attention would look at."""
        window = getattr(self.cache, "window", None)
        first = 0 if window is None else max(0, start - window + 1)
        block_ids = list(self.cache.block_ids(seq_id))[first // self.block_size :]
        assert UNUSED_BLOCK not in block_ids, "a block was given back too early"
        found = [self.slots.get(slot) for slot in self.cache.slots(seq_id, first, stop)]
        assert found == history[first:stop], "a slot holds another token than its sequence's"

    def block(self, block_id: int) -> list[int | None]:
        return [self.slots.get(block_id * self.block_size + place) for place in range(self.block_size)]

    def write(self, block_id: int, values: list[int | None]) -> None:
        for place, value in enumerate(values):
            self.slots.pop(block_id * self.block_size + place, None)
            if value is not None:
                self.slots[block_id * self.block_size + place] = value

    def wipe_free_blocks(self) -> None:
        if isinstance(self.cache, BatchingCache):
            is_free = self.cache.pool.is_free
            self.slots = {slot: value for slot, value in self.slots.items() if not is_free(slot // self.block_size)}


class Driver:
    """A scheduler, the memory that its plans move about, and checks after every step.

    Tokens are all different, or random ones of a small vocabulary. Samples end after their most tokens; what a
    request's sequences do can be replaced by ``answer``, which returns the next tokens of a group.
    """

    def __init__(
        self,
        num_blocks: int = 100,
        block_size: int = 16,
        window: int | None = None,
        cache: BatchingCache | ArenaCache | None = None,
        rng: Random | None = None,
        scheduler_type: type[Scheduler] = Scheduler,
        **limits: Any,
    ):
        self.events: list[Event] = []
        self.cache: Any = cache or BatchingCache(num_blocks, block_size, window)
        self.scheduler: Any = scheduler_type(self.cache, listener=self.hear, **limits)
        self.memory = Memory(self.cache)
        self.rng = rng
        self.histories: dict[int, list[int]] = {}
        self.answers: dict[int, Answer] = {}
        self.num_outputs: Counter[int] = Counter()  # tokens by request
        self._request_ids, self._seq_ids, self._tokens = itertools.count(), itertools.count(100), itertools.count(1000)

    # -- what a caller does

    def add(
        self, prompt: int | list[int], max_output_tokens: int = 100, answer: Answer | None = None, **kw: Any
    ) -> int:
        """Queue a request and return its id; ids count from 0, those of sequences from 100.

        ``prompt`` is its tokens, or the number of them.
        """
        request_id, seq_id = next(self._request_ids), next(self._seq_ids)
        prompt = [self.token() for _ in range(prompt)] if isinstance(prompt, int) else prompt
        self.histories[seq_id] = list(itertools.accumulate(prompt, lambda *pair: hash(pair), initial=0))[1:]
        self.answers[request_id] = answer or self.samples
        self.scheduler.add(request_id, seq_id, prompt, max_output_tokens, **kw)
        return request_id

    def step(self, between: Callable[[], object] = lambda: None) -> Plan:
        """Make one step; ``between`` is called when it is computed but not yet reported."""
        scheduler = self.scheduler
        decoding = [group for group in scheduler.running if group.is_decoding]
        had_unfinished = scheduler.has_unfinished
        plan = scheduler.schedule()
        self.check_plan(plan)
        computed = {chunk.member for chunk in plan.chunks}
        if replacement("plan_step") is None:
            for group in decoding:
                assert not group.is_running or computed.issuperset(group.members), "somebody who decodes was left out"
            assert plan.chunks or not had_unfinished or replacement("choose_victim"), "a step went by for nothing"
        self.memory.carry_out(plan, self.histories)
        between()
        scheduler.update(plan, self.next_tokens(plan))
        self.check()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until everybody has ended and return the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_unfinished:
                return num_steps
            self.step()
        raise AssertionError(f"not done after {max_steps} steps")

    def step_until(self, act: str, request_id: int | None = None) -> Plan:
        """Step until something is told; return the plan of that step."""
        for _ in range(1000):
            plan = self.step()
            if self.acts(act, request_id=request_id):
                return plan
        raise AssertionError(f"no {act!r} in 1000 steps")

    def send_away(self, request_id: int, policy: Policy) -> None:
        """Make a step that only sends a request away."""

        def plan_step(scheduler: Scheduler) -> Plan:
            scheduler._preempt(self.group(request_id), plan := Plan(), "the test wants it")
            return plan

        self.scheduler.preemption = Preemption(policy)
        with use(plan_step=plan_step):
            self.step()

    def group(self, request_id: int) -> Group:
        return self.scheduler.groups[request_id]

    def acts(self, *acts: str, request_id: int | None = None) -> list[Event]:
        """Return what was told, of some acts and of one request if wanted."""
        return [e for e in self.events if e.act in acts and request_id in (None, e.request_id)]

    # -- tokens

    def token(self) -> int:
        return self.rng.randrange(3) if self.rng else next(self._tokens)

    def next_tokens(self, plan: Plan) -> list[NextToken]:
        groups = dict.fromkeys(chunk.group for chunk in plan.chunks if chunk.is_sampled and chunk.group.is_running)
        tokens = [token for group in groups for token in self.answers[group.request_id](group)]
        parents = {token.seq_id: self.histories[token.parent_id or token.seq_id] for token in tokens}
        for token in tokens:
            history = parents[token.seq_id]
            self.histories[token.seq_id] = [*history, hash((history[-1], token.token_id))]
        self.num_outputs.update(group.request_id for group in groups)
        return tokens

    def samples(self, group: Group) -> list[NextToken]:
        """Let all samples fork at the first token, and end at the last."""
        num_outputs = len(group.members[0].token_ids) - group.num_prompt_tokens
        is_last = num_outputs + 1 == group.max_output_tokens
        tokens = [self.next_of(member, is_last) for member in group.members]
        if num_outputs == 0:
            count = group.num_sequences - 1
            tokens += [self.fork_of(group.members[0], is_last) for _ in range(count)]
        return tokens

    def next_of(self, member: Member, is_last: bool = False) -> NextToken:
        return NextToken(member.seq_id, self.token(), is_last=is_last)

    def fork_of(self, member: Member, is_last: bool = False) -> NextToken:
        return NextToken(next(self._seq_ids), self.token(), member.seq_id, is_last)

    # -- checks

    def hear(self, event: Event) -> None:
        """Check an act before it happens."""
        self.events.append(event)
        scheduler = self.scheduler
        if event.act in ("admit", "resume"):
            group = self.group(event.request_id)
            assert all(group.order <= other.order for other in self.waiting()), "somebody was overtaken"
        if event.act == "preempt" and replacement("plan_step") is None:
            needy = self.group(int(event.reason.split()[1]))
            assert blocks_wanted(self.cache, needy.seq_ids) > self.cache.pool.num_free, "nobody had to go"
            assert len(scheduler.running) > 1
            if replacement("choose_victim") is None:
                assert scheduler.running[-1].request_id == event.request_id, "the newest goes first"

    def waiting(self) -> list[Group]:
        return list(self.scheduler.waiting)

    def check_plan(self, plan: Plan) -> None:
        assert plan.num_tokens == sum(chunk.stop - chunk.start for chunk in plan.chunks)
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        members = [chunk.member for chunk in plan.chunks]
        assert len(set(members)) == len(members), "a sequence has two chunks"
        slots = [slot for chunk in plan.chunks for slot in chunk.slots]
        assert len(set(slots)) == len(slots), "two tokens go into one slot"
        for chunk in plan.chunks:
            assert chunk.start == chunk.member.num_computed < chunk.stop
            assert chunk.slots == self.cache.slots(chunk.member.seq_id, chunk.start, chunk.stop)
            assert chunk.is_sampled == (chunk.stop == len(chunk.member.token_ids))

    def check(self) -> None:
        """Compare scheduler and cache with each other."""
        self.cache.check()
        self.memory.wipe_free_blocks()
        scheduler, waiting = self.scheduler, self.waiting()
        running = scheduler.running
        assert running == sorted(running, key=lambda group: group.order)
        assert sorted(map(id, [*running, *waiting])) == sorted(map(id, scheduler.groups.values()))
        assert scheduler.num_waiting == len(waiting)
        assert sum(group.num_sequences for group in running) <= scheduler.max_num_seqs
        swapped = [group.swapped for group in waiting if group.swapped]
        assert scheduler.num_swapped_blocks == sum(each.num_blocks for each in swapped)
        assert not any(group.swapped for group in running)
        assert all(group.is_running for group in running) and not any(group.is_running for group in waiting)
        lengths = {}
        for group in [*running, *waiting]:
            assert 1 <= len(group.members) <= group.num_sequences
            lengths |= self.lengths_of(group)
        if isinstance(self.cache, BatchingCache):
            assert {seq_id: table.num_tokens for seq_id, table in self.cache.tables.items()} == lengths
        else:
            assert {seq_id: own.num_tokens for seq_id, own in self.cache.ranges.items()} == lengths

    def lengths_of(self, group: Group) -> dict[int, int]:
        """Check the counts of a group's members and return how many slots each should have now."""
        for member in group.members:
            if group.is_decoding:
                assert member.num_computed == len(member.token_ids) - 1
            elif group.is_running or group.swapped:
                assert 0 <= member.num_computed <= member.target <= len(member.token_ids)
            else:
                assert member.num_computed == 0
        if group.swapped:
            assert group.swapped.tables.keys() == set(group.seq_ids)
        if not group.is_running:
            return {}
        return {each.seq_id: each.num_computed if group.is_decoding else each.target for each in group.members}


def blocks_wanted(cache: BatchingCache, seq_ids: Sequence[int]) -> int:
    """Count the blocks that one more token for each sequence takes: where the last is full, and for copies."""
    tables = [cache.tables[seq_id] for seq_id in seq_ids]
    full = sum(table.num_tokens % table.block_size == 0 for table in tables)
    open_blocks = Counter(table.block_ids[-1] for table in tables if table.num_tokens % table.block_size)
    return full + sum(count - 1 for count in open_blocks.values())
