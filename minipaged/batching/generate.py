"""Rung 4's engine: carries out the scheduler's plans."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache
from minipaged.batching.limits import MAX_NUM_BATCHED_TOKENS, check_sequences
from minipaged.batching.params import SamplingParams
from minipaged.batching.plan import Chunk, NextToken, Plan
from minipaged.batching.preemption import Policy, Preemption
from minipaged.batching.rows import Rows
from minipaged.batching.scheduler import Scheduler
from minipaged.batching.swap_space import SwapSpace
from minipaged.contiguous.generate import Engine as ContiguousEngine
from minipaged.contiguous.generate import EngineOptions as ContiguousOptions
from minipaged.contiguous.generate import allocate_kv
from minipaged.errors import UserError
from minipaged.foundation.generate import Engine as FoundationEngine
from minipaged.foundation.model import Attend
from minipaged.foundation.philox import child_seed
from minipaged.foundation.sampling import SampledToken
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.shapes import Float, Tensor
from minipaged.sharing.family import Family, num_sequences
from minipaged.sharing.generate import Engine as SharingEngine
from minipaged.sharing.ops import copy_blocks

CacheKind = Literal["paged", "contiguous"]
CACHES = get_args(CacheKind)

Read = Callable[[int, Tensor], Tensor]
"""read(layer, q [T H D]) -> [T H D]: the attention of one layer, over keys and values that are written."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(ContiguousOptions):
    """Rung 1's options, and the scheduler's.

    Args:
        cache: "paged" is a block pool, "contiguous" rung 1's arena, in which requests reserve by ``reservation``.
        max_num_seqs: Most sequences that run at a time; None is 256, or the token budget where that is smaller.
        max_num_batched_tokens: Most tokens of one step.
        preemption: What happens to a request that is sent away; see `Preemption`.
    """

    cache: CacheKind = "paged"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS
    preemption: Policy = "auto"


class Engine(SharingEngine):
    """Continuous batching.

    Changes of rung 3: there is no batch that is formed and runs to its end. The scheduler says at every step which
    tokens run, of prompts and of answers together, and one forward pass computes them all. Choosing tokens, samples
    and beams is rung 3's; what it forks and ends is reported to the scheduler, which keeps the cache's books.
    """

    rung = "batching"
    options_type = EngineOptions
    options: EngineOptions
    cache: BatchingCache | ArenaCache

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the scheduler, the cache's books and its memory."""
        options = self.options
        self.families: dict[int, Family] = {}  # by request, from its arrival to its end
        self.members: dict[int, list[Sequence]] = {}  # its living sequences
        self._tokens: list[NextToken] = []  # of the running step
        self._parents: dict[int, int] = {}  # of the sequences that it has forked
        if options.cache == "contiguous":
            num_slots = num_blocks * block_size
            kv = allocate_kv(self.model, (1, num_slots))
            self.kv = kv.view(*kv.shape[:2], num_slots, 1, *kv.shape[4:])  # blocks of one slot
            self.cache = ArenaCache(num_slots, options.max_model_len, options.reservation)
        else:
            self.kv = allocate_kv(self.model, (num_blocks, block_size))
            self.cache = self.make_bookkeeping(num_blocks, block_size)
        self.swap_space = SwapSpace(self.kv, self.model.tier)
        preemption = self.swap_space.preemption(options.preemption, self.model)
        self.scheduler = self.make_scheduler(preemption)

    def make_bookkeeping(self, num_blocks: int, block_size: int) -> BatchingCache:
        """Make a pool without promises."""
        return BatchingCache(num_blocks, block_size, self.window)

    @property
    def window(self) -> int | None:
        """Return how many tokens a layer sees at most, None if one of them sees all."""
        windows = self.model.config.layer_windows
        return max(windows) if all(windows) else None  # type: ignore[type-var]

    def make_scheduler(self, preemption: Preemption) -> Scheduler:
        """Make the scheduler over ``cache``."""
        options = self.options
        return Scheduler(self.cache, options.max_num_seqs, options.max_num_batched_tokens, preemption)

    # -- the four verbs

    def add_request(self, prompt_token_ids: Iterable[int], params: FoundationParams) -> int:
        """Queue a request and return its id.

        Raises:
            UserError: The prompt is empty, holds an id outside the vocabulary, or can never fit; or more sequences
                are asked for than may run.
        """
        request_id = super().add_request(prompt_token_ids, params)
        seq = self.waiting.pop()
        self.add_family(seq)
        self.members[request_id] = [seq]
        self.scheduler.add(
            request_id,
            seq.seq_id,
            seq.prompt_token_ids,
            seq.max_output_tokens,
            num_sequences(seq.params),
            **self.scheduling(seq.params),
        )
        return request_id

    def scheduling(self, params: FoundationParams) -> dict[str, Any]:
        """Return what the scheduler has to know of a request's parameters."""
        return {"priority": params.priority} if isinstance(params, SamplingParams) else {}

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return self.scheduler.has_unfinished or bool(self.dropped)

    def check_prompt(self, prompt_token_ids: Iterable[int], params: FoundationParams) -> list[int]:
        """Refuse what may never run."""
        check_sequences(num_sequences(params), self.scheduler.max_num_seqs)
        if num_sequences(params) > 1 and isinstance(self.cache, ArenaCache):
            raise UserError(
                f"the request has {num_sequences(params)} sequences; the contiguous cache cannot share, so it "
                "takes one (cache 'paged' can)"
            )
        return super().check_prompt(prompt_token_ids, params)

    def slots_per_sequence(self, num_prompt_tokens: int, params: FoundationParams) -> int:
        """Return the slots that a sequence of such a request can have when nobody else is there."""
        if isinstance(self.cache, ArenaCache):
            return self.cache.limit
        return super().slots_per_sequence(num_prompt_tokens, params)

    def abort(self, request_id: int, index: int | None = None) -> list[Result]:
        """Drop a request wherever it is, or one of its samples; free what it holds, and return what it had.

        Args:
            request_id: The request. Nothing happens if it has ended or never was.
            index: The sample to drop, while the others go on; None drops them all.

        Raises:
            UserError: The request's samples have no index before all have ended: beams, or ``best_of``.
        """
        if index is None:
            return super().abort(request_id)
        if type(index) is not int:
            raise UserError(f"index must be a whole number or None, not {index!r}")
        family = self.families.get(request_id)
        if family is None:
            return []
        if family.search is not None or family.holds_back:
            raise UserError("beams and the samples of best_of have no index before they are ranked; abort them all")
        gone = self._take_sample(family, self.members[request_id], index)
        if gone is None:
            return []
        gone.finish_reason = "abort"
        gone.text_stream.flush()
        family.results.append(gone.result())
        if not self.members[request_id]:
            del self.families[request_id], self.members[request_id]
            self.swap_space.drop(request_id)
        return family.results[-1:]

    def _take_sample(self, family: Family, members: list[Sequence], index: int) -> Sequence | None:
        """Take a living sample out of its request and the scheduler; None if no sample of that index lives."""
        leader = members[0]
        if not leader.output_token_ids:
            return self._take_unforked(family, members, index)
        gone = next((seq for seq in members if seq.index == index), None)
        if gone is not None:
            self._show_before_release(gone)
            members.remove(gone)
            self.scheduler.abort_sequence(gone.request_id, gone.seq_id)
            self.running = [seq for seq in self.running if seq is not gone]
        return gone

    def _take_unforked(self, family: Family, members: list[Sequence], index: int) -> Sequence | None:
        """Take away a sample of a request that has not forked yet: the sequence that is there stands for all."""
        leader = members[0]
        if index not in family.indices:
            return None
        if len(family.indices) == 1:
            self._show_before_release(leader)
            self.scheduler.abort(leader.request_id)
            self.running = [seq for seq in self.running if seq is not leader]
            members.clear()
            return leader
        family.indices.remove(index)
        self.scheduler.groups[leader.request_id].num_sequences -= 1  # the seat that it would have taken
        gone = self._without_text(leader, index=index, seed=child_seed(family.seed, index))
        leader.index, leader.seed = family.indices[0], child_seed(family.seed, family.indices[0])
        return gone

    def withdraw(self, request_id: int) -> list[Sequence]:
        """Take a request out of the scheduler, and with it its slots and its swap space."""
        members = self.members.pop(request_id, [])
        for seq in members:
            if seq.finish_reason is None:
                self._show_before_release(seq)
        self.scheduler.abort(request_id)
        self.swap_space.drop(request_id)
        self.running = [seq for seq in self.running if seq.request_id != request_id]
        return members

    def _show_before_release(self, seq: Sequence) -> None:
        group = self.scheduler.groups.get(seq.request_id)
        if self.before_release is not None and group is not None and group.is_running:
            self.before_release(seq)

    def drop_batch(self) -> None:
        """Abort what a failed step may have touched: all but those who wait, with their blocks in the swap space.

        The step may have broken off in the middle of the books, so only the queue of them is trusted.
        """
        waiting = {
            group.request_id
            for group in self.scheduler.waiting
            if not group.swapped or self.swap_space.holds(group.request_id)
        }
        lost = [request_id for request_id in self.members if request_id not in waiting]
        self.running = [seq for request_id in lost for seq in self.members[request_id]]
        for seq in self.running:
            if seq.finish_reason is None:
                self._show_before_release(seq)
        for group in self.scheduler.running:
            group.is_running = False
        self.scheduler.running = []
        FoundationEngine.drop_batch(self)
        for seq_id in self.cache.seq_ids:  # also those that had forked when the step broke off
            self.cache.free(seq_id)

    def stats(self) -> dict[str, int]:
        """Return the counters of the cache, and how often requests were sent away, and of that into the swap space."""
        counters = ContiguousEngine.stats(self) if isinstance(self.cache, ArenaCache) else super().stats()
        return counters | {"preemptions": self.scheduler.num_preemptions, "swaps": self.scheduler.num_swaps}

    # -- one step

    def _run_batch(self) -> list[StepOutput]:
        plan = self.scheduler.schedule()
        self._move_blocks(plan)
        self._tokens, self._parents = [], {}
        outputs: list[StepOutput] = []
        sampled = [chunk for chunk in plan.chunks if chunk.is_sampled]
        if plan.chunks:
            logits = self.compute(plan)
            outputs = self._choose_tokens(sampled, logits) if sampled else []
        self.scheduler.update(plan, self._tokens)
        self._note_living(sampled)
        return outputs

    def compute(self, plan: Plan) -> Float[Tensor, "R V"]:
        """Run the plan's chunks through the model; return the logits of those that are sampled."""
        rows = Rows.of(plan.chunks, self.cache, self.model.device)
        return self.model.forward(
            rows.token_ids, rows.positions, self.attend_rows(rows, self.read_rows(plan, rows)), rows.logits_at
        )

    def _move_blocks(self, plan: Plan) -> None:
        """Swap and copy blocks, in the order that the plan relies on."""
        for swap in plan.swaps_out:
            self.swap_space.take(swap)
        for swap in plan.swaps_in:
            self.swap_space.bring_back(swap)
        if plan.copies:
            copy_blocks(self.kv, self.tensor(plan.copies), tier=self.model.tier)

    def attend_rows(self, rows: Rows, read: Read) -> Attend:
        """Write the new tokens' K and V, then read."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, k, v, rows.slots)
            return read(layer, q)

        return attend

    def read_rows(self, plan: Plan, rows: Rows) -> Read:
        """Return the attention of rows whose keys and values are written."""
        windows, tier = self.model.config.layer_windows, self.model.tier

        def read(layer: int, q: Tensor) -> Tensor:
            return rows.attend(q, *self.kv[layer], window=windows[layer], tier=tier)

        return read

    # -- what rung 3 chooses is reported to the scheduler

    def _choose_tokens(self, sampled: list[Chunk], logits: Float[Tensor, "R V"]) -> list[StepOutput]:
        """Let rung 3 choose for the sampled sequences."""
        groups = {chunk.group.request_id: None for chunk in sampled}
        own = {seq.seq_id: seq for request_id in groups for seq in self.members[request_id]}
        batch = [own[chunk.member.seq_id] for chunk in sampled]
        self.running = list(batch)
        return self.choose(batch, logits)

    def _note_living(self, sampled: list[Chunk]) -> None:
        """Forget the sequences that have ended, and learn of those that have forked."""
        if sampled:
            living: dict[int, list[Sequence]] = {chunk.group.request_id: [] for chunk in sampled}
            for seq in self.running:
                if seq.finish_reason is None:
                    living[seq.request_id].append(seq)
            self.members |= living
            for request_id, members in living.items():
                if not members:
                    del self.members[request_id]
        self.running = [seq for group in self.scheduler.running for seq in self.members[group.request_id]]

    def append(self, seq: Sequence, sampled: SampledToken) -> StepOutput:
        """Give one sequence its token."""
        output = super().append(seq, sampled)
        self._report(seq, sampled.token_id, is_last=seq.finish_reason is not None)
        return output

    def release(self, seq: Sequence) -> None:
        """Do nothing: the scheduler frees the sequence when it hears of its end."""

    def _fork(self, parent: Sequence, **changes: Any) -> Sequence:
        """Make a sequence that shares the parent's blocks from the end of this step on."""
        child = self._without_text(parent, seq_id=next(self.seq_ids), **changes)
        self._parents[child.seq_id] = parent.seq_id
        return child

    def _extend_beams(self, beams: list[Sequence], survivors: list[tuple[int, int]]) -> list[Sequence]:
        """Give each surviving beam its token."""
        extended = super()._extend_beams(beams, survivors)
        for seq in extended:
            self._report(seq, seq.output_token_ids[-1])
        return extended

    def _report(self, seq: Sequence, token_id: int, is_last: bool = False) -> None:
        self._tokens.append(NextToken(seq.seq_id, token_id, self._parents.pop(seq.seq_id, None), is_last))

    def _members(self, request_id: int) -> list[Sequence]:
        return self.members.get(request_id, [])
