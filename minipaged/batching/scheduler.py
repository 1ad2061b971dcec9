"""Who runs at each step: continuous batching over any cache, without a model and without tensors."""

from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from minipaged.batching.cache import Cache
from minipaged.batching.group import Group
from minipaged.batching.limits import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_PASSED, check_limits
from minipaged.batching.plan import Chunk, Event, NextToken, Plan, Swap, chunk_size
from minipaged.batching.preemption import Preemption, pick_victim
from minipaged.batching.registry import Registry
from minipaged.errors import AccountingError
from minipaged.tiers import declare_part, replacement

declare_part("plan_step", "(scheduler) -> Plan; decides what the next step computes")


class Scheduler(Registry):
    """Decide at every step which tokens run, and keep the cache's books.

    ``plan = schedule()`` says what the step computes; the caller does it and reports with ``update(plan, tokens)``.
    A step has a budget of tokens. First everybody who decodes gets one token per sequence. Prompts that have entered
    take what is left, in chunks, and then new requests enter, first come, first served within their priority. So a
    long prompt never holds up those that decode, and a request that waits is never overtaken.

    A request enters only when the cache has room for all its present tokens. It may then outgrow the cache: when a
    sequence finds no block for its next token, the newest request is sent away, until there is one. It comes back
    at its old place in the queue; what becomes of its keys and values is the choice of `Preemption`.

    Args:
        cache: Where the tokens' slots come from; see `Cache`.
        max_num_seqs: Most sequences that run at a time; None is 256, or the token budget where that is smaller.
        max_num_batched_tokens: Most tokens of one step.
        preemption: What happens to the blocks of a request that is sent away.
        listener: Called with every `Event`, in the middle of things: it looks, and changes nothing.

    Invariants:
        ``running`` is in the order of turns. The first of it is never sent away while others run, so it ends in a
        bounded number of steps: nobody can keep anybody from getting done. Nobody is sent away while the blocks
        that are needed are free.

    Raises:
        UserError: A limit is below 1, or more sequences may run than the budget has tokens.

    Cost:
        One step is linear in the running sequences. It does not depend on the length of the queue, but for the
        logarithm of a heap, or on the size of the cache.

    Source:
        Iteration-level scheduling: Orca (Yu et al., OSDI 2022). All-or-nothing preemption of a request's sequences:
        Kwon et al., SOSP 2023, section 4.5. Chunked prefill: Sarathi-Serve (Agrawal et al., OSDI 2024).

    Example:
        Blocks of 4 slots and 5 tokens a step. The prompt of 7 takes two steps, then the first token is there.

        >>> from minipaged.batching.cache import BatchingCache
        >>> scheduler = Scheduler(BatchingCache(num_blocks=8, block_size=4), max_num_batched_tokens=5)
        >>> scheduler.add(request_id=0, seq_id=7, prompt_token_ids=[1] * 7, max_output_tokens=2)
        >>> for tokens in ([], [NextToken(7, 50)], [NextToken(7, 51, is_last=True)]):
        ...     plan = scheduler.schedule()
        ...     print([(chunk.start, chunk.stop, chunk.slots[-1], chunk.is_sampled) for chunk in plan.chunks])
        ...     scheduler.update(plan, tokens)
        [(0, 5, 4, False)]
        [(5, 7, 6, True)]
        [(7, 8, 7, True)]
        >>> scheduler.has_unfinished, scheduler.cache.pool.num_free
        (False, 8)
    """

    def __init__(
        self,
        cache: Cache,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        preemption: Preemption | None = None,
        listener: Callable[[Event], None] | None = None,
    ):
        check_limits(max_num_seqs, max_num_batched_tokens)
        super().__init__(cache, max_num_seqs or min(MAX_NUM_SEQS, max_num_batched_tokens), listener)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.preemption = preemption or Preemption()
        self.num_preemptions = self.num_swaps = 0

    # -- one step

    def schedule(self) -> Plan:
        """Return what the next step computes; its slots are taken when this returns."""
        self.num_steps += 1
        return (replacement("plan_step") or type(self).plan_step)(self)

    def plan_step(self) -> Plan:
        """Let everybody decode, then go on with prompts that have entered, then let others enter."""
        plan = Plan()
        num_running = len(self.running)
        self.plan_decode(plan)
        for group in [group for group in self.running if not group.is_decoding]:
            self.plan_prefill(group, plan)
        if len(self.running) == num_running:  # else somebody was just sent away for want of room
            self.plan_admission(plan)
        if not self.running and (group := self.waiting.first()) is not None:
            raise AccountingError(f"request {group.request_id} can never enter: {self._reason_to_wait(group, plan, 0)}")
        return plan

    def update(self, plan: Plan, tokens: Iterable[NextToken]) -> None:
        """Note what a step has done.

        Args:
            plan: The plan that was carried out.
            tokens: The next token of every sampled sequence, and of those that fork from it, in the order that a
                request's members shall have from now on. A sampled sequence that no token continues is dropped.
                One that was aborted since ``schedule`` gets no token.
        """
        sampled: dict[int, Chunk] = {}
        for chunk in plan.chunks:
            group, member = chunk.group, chunk.member
            if not group.is_running or member.is_gone:
                continue  # aborted meanwhile
            member.num_computed = chunk.stop
            self.cache.note_computed(member.seq_id, chunk.stop, member.token_ids)
            if chunk.is_sampled:
                sampled[member.seq_id] = chunk
            else:
                group.is_decoding = group.is_prefilled
        changed: dict[Group, list[NextToken]] = {}
        for token in tokens:
            chunk = sampled[token.seq_id if token.parent_id is None else token.parent_id]
            if chunk.group.num_sequences == 1 and not token.is_last:  # the common case, kept short
                del sampled[token.seq_id]
                chunk.member.token_ids.append(token.token_id)
                chunk.group.is_decoding = True
            else:
                changed.setdefault(chunk.group, []).append(token)
        for chunk in sampled.values():
            changed.setdefault(chunk.group, [])  # one that no token continues
        for group, own in changed.items():
            self._change_members(group, own)
        self.running = [group for group in self.running if group.is_running]

    # -- parts of a step

    def plan_decode(self, plan: Plan) -> None:
        """Let each sequence that has its prompt behind it compute its newest token.

        Where the blocks run out, requests are sent away, the newest first. So ``running`` may be shorter afterwards.

        Args:
            plan: Gets the tokens, and what is copied and moved for them.
        """
        place = 0
        while place < len(self.running):
            group = self.running[place]
            if not group.is_decoding:
                place += 1
            elif self._make_room(group, place, plan):
                self._append(group, plan)
                place += 1

    def _make_room(self, group: Group, place: int, plan: Plan) -> bool:
        """Send groups away until ``group``, which stands at ``place``, can go on; False if it was sent away itself.

        Those before it have their slots for this step already, so the choice is among it and those after it.
        """
        while not self.cache.can_append(group.seq_ids):
            if len(self.running) == 1:
                raise AccountingError(f"request {group.request_id} has outgrown the cache, and nobody else runs")
            victim = pick_victim(self.running[place:])
            self._preempt(victim, plan, f"request {group.request_id} needs a block")
            if victim is group:
                return False
        return True

    def _append(self, group: Group, plan: Plan) -> None:
        """Let every member compute its newest token."""
        for member in group.members:
            start = member.num_computed
            slot = self.cache.append(member.seq_id)
            plan.add(Chunk(group, member, start, start + 1, [slot], True))
            self._tell("decode", group, member.seq_id, 1)
        self._take_copies(group, plan)

    def _take_copies(self, group: Group, plan: Plan) -> None:
        for source, target in (copies := self.cache.take_copies()):
            self._tell("copy", group, reason=f"block {source} to {target}")
        plan.copies += copies

    def plan_prefill(self, group: Group, plan: Plan) -> None:
        """Compute as much of a group's prompt, or of what it has to compute again, as the step has tokens left.

        Args:
            group: A running one that does not decode. Its slots were taken when it entered.
            plan: Gets the chunks; what it has already counts against the budget.
        """
        for member in group.members:
            start = member.num_computed
            stop = start + chunk_size(member.target - start, self.max_num_batched_tokens - plan.num_tokens)
            if stop > start:
                slots = self.cache.slots(member.seq_id, start, stop)
                plan.add(Chunk(group, member, start, stop, slots, stop == len(member.token_ids)))
                self._tell("chunk", group, member.seq_id, stop - start)
            if stop < member.target:
                return  # the others build on what the first has computed

    def plan_admission(self, plan: Plan) -> None:
        """Let requests enter in the order of their turn, as long as there are seats, tokens and slots.

        Those that enter stand in ``running`` afterwards, and have their first tokens in this step.

        Args:
            plan: Gets their first chunks; what it has already counts against the budget.
        """
        num_seats = sum(group.num_sequences for group in self.running)  # taken
        passed: list[Group] = []
        while (group := self.waiting.first()) is not None:
            reason = self._reason_to_wait(group, plan, num_seats)
            if passed and not reason and plan.num_tokens + group.num_tokens > self.max_num_batched_tokens:
                break  # its prompt would take the next steps' tokens from those that it overtakes
            if not reason:
                self.waiting.pop()
                self._enter(group, plan)
                num_seats += group.num_sequences
                continue
            self._tell("wait", group, reason=reason)
            if len(passed) == MAX_PASSED or not self.may_be_passed(group):
                break
            self.waiting.pop()
            passed.append(group)
        for group in passed:
            self.waiting.push(group)

    def may_be_passed(self, group: Group) -> bool:
        """Return whether those behind a group that cannot enter may: never on this rung."""
        return False

    def _reason_to_wait(self, group: Group, plan: Plan, num_seats: int) -> str | None:
        """Return why the group cannot enter now, while ``num_seats`` are taken; None if it can."""
        if num_seats + group.num_sequences > self.max_num_seqs:
            return f"needs {group.num_sequences} of {self.max_num_seqs} seats, {num_seats} are taken (max_num_seqs)"
        if plan.num_tokens + len(group.members) > self.max_num_batched_tokens:
            return f"the step has its {self.max_num_batched_tokens} tokens (max_num_batched_tokens)"
        # One that was sent away comes back only if everybody can grow by a block after that, or it would be sent away
        # again at once. With nobody else there the cache is its own.
        headroom = num_seats + len(group.members) if self.running and group.num_preemptions else 0
        if group.swapped:
            if not self.cache.can_swap_in(group.swapped, headroom):
                spare = f" and {headroom} to spare" if headroom else ""
                return f"needs {len(group.swapped.used_places)} blocks{spare} to be swapped in"
            return None
        room = group.waiting_room = group.waiting_room or group.room()
        if self.cache.can_admit(room, headroom):
            return None
        return self.cache.shortage(room, headroom) if self.listener or not self.running else "the cache is full"

    def _enter(self, group: Group, plan: Plan) -> None:
        """Give a group its slots and its first tokens of this step."""
        self._tell("resume" if group.num_preemptions else "admit", group)
        if group.swapped:
            pairs = self.cache.swap_in(group.swapped)
            self._forget_swapped(group)
            plan.swaps_in.append(Swap(group.request_id, pairs))
            self._tell("swap", group, reason=f"{len(pairs)} blocks in")
        else:
            room = group.waiting_room or group.room()
            group.waiting_room = None
            starts = self.cache.allocate(room)
            for member, target, start in zip(group.members, room.lengths, starts, strict=True):
                member.target, member.num_computed = target, start
            group.is_decoding = group.is_prefilled
            self._take_copies(group, plan)
        group.is_running = True
        insort(self.running, group, key=attrgetter("order"))
        if not group.is_decoding:
            self.plan_prefill(group, plan)
        elif self.cache.can_append(group.seq_ids):
            self._append(group, plan)

    def _preempt(self, group: Group, plan: Plan, reason: str) -> None:
        """Send a group back into the queue, to its old place."""
        num_blocks = self.cache.num_blocks_of(group.seq_ids)
        how, why = self.preemption.choose(group.num_tokens_computed(), num_blocks, self.num_swapped_blocks)
        self._tell("preempt", group, reason=f"{reason}; {how}: {why}")
        self.running.remove(group)
        group.is_running = False
        group.num_preemptions += 1
        self.num_preemptions += 1
        if how == "swap":
            group.swapped, block_ids = self.cache.swap_out(group.seq_ids)
            self.num_swapped_blocks += len(block_ids)
            self.num_swaps += 1
            plan.swaps_out.append(Swap(group.request_id, list(enumerate(block_ids))))
            self._tell("swap", group, reason=f"{len(block_ids)} blocks out")
        else:
            group.is_decoding = False
            for member in group.members:
                self.cache.free(member.seq_id)
                member.num_computed = 0
        self.waiting.push(group)

    def _change_members(self, group: Group, tokens: list[NextToken]) -> None:
        """Fork, extend and end the members of a group."""
        group.advance(tokens, self.cache)
        if not group.members:
            del self.groups[group.request_id]
            group.is_running = False  # and `update` takes it out
            self._tell("finish", group, reason="done")
        for token in [token for token in tokens if token.is_last and group.members]:  # the others go on
            self._tell("finish", group, token.seq_id, reason="done")
