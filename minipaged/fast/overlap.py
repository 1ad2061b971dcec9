"""A step is planned and launched while the one before it computes; the host learns tokens one step late.

Without that the GPU waits while Python plans, and Python waits while the GPU computes::

    plan 1 | compute 1 | tokens 1, plan 2 | compute 2 | tokens 2 ...

A plan needs no token, only that there will be one. So step 2 is planned and launched while step 1 computes, with
numbers in the place of the tokens that it will choose; the GPU puts them in itself::

    GPU      compute 1     | compute 2            | compute 3
    Python   plan 2, launch| tokens 1, plan 3, ...| tokens 2, ...

- A sequence that reaches its limit ends on time, since its length is known. One that ends at a token (an end token, a
  stop string) has by then a row in the step that runs: the row is computed for nothing, and its result is dropped.
  What it writes goes to slots of its own, and whoever gets its blocks writes later on the same stream.
- One that is sent away takes the number along in the place of its newest token. It comes back in a later step, and by
  then the token is known.
- Who needs the host for its next token makes its step wait: beams, the first step of several samples, penalties,
  ``min_tokens``, and log-probabilities.
"""

from dataclasses import dataclass

import torch

from minipaged.batching.generate import Engine as BatchingEngine
from minipaged.batching.group import Group
from minipaged.batching.plan import Chunk, NextToken, Plan
from minipaged.fast.device_batch import num_outputs
from minipaged.foundation.sampling import InvalidLogitsError, SampledToken
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.prefix.cache import PrefixCache
from minipaged.shapes import Float, Int, Tensor
from minipaged.sharing.family import num_sequences


@dataclass
class Flight:
    """A step whose tokens are still on their way.

    Args:
        chunks: What it computes.
        sampled: The chunks that choose a token; entry i of ``token_ids`` is that of ``sampled[i]``.
        seqs: The sequences of ``sampled``.
        token_ids: The tokens, on the host.
        event: Happens when they are there; None where they are.
    """

    chunks: list[Chunk]
    sampled: list[Chunk]
    seqs: list[Sequence]
    token_ids: Int[Tensor, " R"]
    event: torch.cuda.Event | None

    @classmethod
    def of(cls, chunks: list[Chunk], sampled: list[Chunk], seqs: list[Sequence], chosen: Int[Tensor, " R"]) -> "Flight":
        """Begin to copy the tokens that a step has chosen to the host."""
        if chosen.device.type != "cuda":
            return cls(chunks, sampled, seqs, chosen.clone(), None)
        token_ids = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=True)
        token_ids.copy_(chosen, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(chunks, sampled, seqs, token_ids, event)

    def wait(self) -> list[tuple[Chunk, Sequence, int]]:
        """Return the tokens when they are there, without those of sequences that have ended meanwhile.

        Raises:
            InvalidLogitsError: A row of the logits had no best token; that of a sequence that was aborted counts too,
                since what it has written is in the cache.
        """
        if self.event is not None:
            self.event.synchronize()
        token_ids = self.token_ids.tolist()
        bad = [i for i, seq in enumerate(self.seqs) if token_ids[i] < 0 and seq.finish_reason in (None, "abort")]
        if bad:
            raise InvalidLogitsError(bad, [float("nan")] * len(bad))
        return [
            (chunk, seq, token_id)
            for chunk, seq, token_id in zip(self.sampled, self.seqs, token_ids, strict=True)
            if seq.finish_reason is None
        ]


class OverlappingEngine(BatchingEngine):
    """The order of plan, launch and tokens. What is launched, and how, `FastEngine` says.

    Invariants:
        Between two steps, the newest token of each sampled row of ``in_flight`` stands as a negative number in the
        scheduler's books and is missing in those of the engine; all other tokens are known to both.
    """

    is_late: bool
    """Whether tokens may land one step late."""

    def begin(self) -> None:
        """Start with nothing in flight."""
        self.in_flight: Flight | None = None
        self._late_groups: dict[int, Group] = {}  # of the step in flight; the scheduler may have let go of them
        self._landed: list[StepOutput] = []  # what this step has to tell of the one before
        self.num_late_steps = 0

    # -- what is launched

    def is_decode(self, plan: Plan) -> bool:
        """Return whether the step is one token of each of its sequences, and runs in a batch of a fixed size."""
        raise NotImplementedError

    def arrange(self, plan: Plan) -> None:
        """Put the rows of a decode step into the order in which they run best."""
        raise NotImplementedError

    def launch(self, plan: Plan, sampled: list[Chunk], seqs: list[Sequence], is_decode: bool) -> Flight:
        """Start the forward pass, the choice of tokens, and their way to the host."""
        raise NotImplementedError

    def launch_logits(self, plan: Plan, seqs: list[Sequence], is_decode: bool) -> Float[Tensor, "R V"]:
        """Start the forward pass, and return the logits of the sampled rows."""
        raise NotImplementedError

    # -- one step

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs, or has a token on its way."""
        return super().has_unfinished() or self.in_flight is not None

    def run_ahead(self) -> list[StepOutput]:
        """Plan and launch a step, then hand out the tokens of the one before."""
        self._landed = []
        plan = self.scheduler.schedule()
        self._move_blocks(plan)
        self._tokens, self._parents = [], {}
        is_decode = self.is_decode(plan)
        if is_decode:
            self.arrange(plan)
        sampled = [chunk for chunk in plan.chunks if chunk.is_sampled]
        seqs = self._sequences(sampled)
        if any(self._needs_host(seq) for seq in seqs):
            return self._run_late(plan, sampled, seqs, is_decode)
        flight = self.launch(plan, sampled, seqs, is_decode) if plan.chunks else None
        outputs = self._land()
        if not self.is_late or self.before_release is not None:  # a look at the cache wants it as it was
            return outputs + self._finish(plan, flight)
        self._update(plan, flight)
        self.in_flight = flight
        self.num_late_steps += flight is not None
        return outputs

    def _sequences(self, sampled: list[Chunk]) -> list[Sequence]:
        own = {chunk.group.request_id: self.members[chunk.group.request_id] for chunk in sampled}
        by_id = {seq.seq_id: seq for members in own.values() for seq in members}
        return [by_id[chunk.member.seq_id] for chunk in sampled]

    def _needs_host(self, seq: Sequence) -> bool:
        """Return whether the next token of a sequence can only be chosen by the host."""
        params = seq.params
        if params.logprobs is not None or params.presence_penalty or params.frequency_penalty:
            return True
        if params.repetition_penalty != 1 or len(seq.output_token_ids) < params.min_tokens:
            return True
        family = self.families[seq.request_id]
        return family.search is not None or (not seq.output_token_ids and num_sequences(params) > 1)

    def _run_late(self, plan: Plan, sampled: list[Chunk], seqs: list[Sequence], is_decode: bool) -> list[StepOutput]:
        """Run a step whose tokens the host chooses, for which it must know all before: those in flight land first."""
        logits = self.launch_logits(plan, seqs, is_decode)
        outputs = self._land()
        is_alive = [chunk.group.is_running and not chunk.member.is_gone for chunk in sampled]
        living = [chunk for chunk, alive in zip(sampled, is_alive, strict=True) if alive]
        if living:
            if len(living) < len(sampled):
                logits = logits[self.tensor([row for row, alive in enumerate(is_alive) if alive])]
            outputs = outputs + self._choose_tokens(living, logits)
        self.scheduler.update(plan, self._tokens)
        self._note_living(living)
        return outputs

    def _finish(self, plan: Plan, flight: Flight | None) -> list[StepOutput]:
        """Hand out the tokens of a step at once and then tell the scheduler, as the rungs do."""
        landed = flight.wait() if flight else []
        self.running = [seq for _, seq, _ in landed]
        outputs: list[StepOutput] = []
        for _, seq, token_id in landed:
            outputs += self._family_outputs(self.append(seq, SampledToken(token_id, None)))
        self.scheduler.update(plan, self._tokens)
        self._note_living([chunk for chunk, _, _ in landed])
        return outputs

    def _update(self, plan: Plan, flight: Flight | None) -> None:
        """Tell the scheduler that every sequence has got a token, whose number stands for it until it lands."""
        tokens = []
        sampled = flight.sampled if flight else []
        for i, chunk in enumerate(sampled):
            if chunk.group.is_running and not chunk.member.is_gone:
                is_last = num_outputs(chunk) + 1 >= chunk.group.max_output_tokens
                tokens.append(NextToken(chunk.member.seq_id, -1 - i, None, is_last))
        self._late_groups = {chunk.group.request_id: chunk.group for chunk in sampled}
        self.scheduler.update(plan, tokens)

    def _land(self) -> list[StepOutput]:
        """Hand out the tokens of the step in flight. Those of sequences that have ended meanwhile are dropped.

        If it fails, or the rest of the step does, `drop_batch` finds what was in flight and what has landed.
        """
        for chunk, seq, token_id in self.in_flight.wait() if self.in_flight else ():
            chunk.member.token_ids[chunk.stop] = token_id
            outputs = self._family_outputs(self.append(seq, SampledToken(token_id, None)))
            if seq.finish_reason is not None:
                self._end(seq)
            self._landed += outputs
        self.in_flight = None
        self._tokens = []
        self.running = [seq for group in self.scheduler.running for seq in self.members[group.request_id]]
        return self._landed

    def _report(self, seq: Sequence, token_id: int, is_last: bool = False) -> None:
        if self.in_flight is None:  # else the scheduler has counted this token when its step was launched
            super()._report(seq, token_id, is_last)

    def _end(self, seq: Sequence) -> None:
        """Take a sequence that has its last token out of all books that still have it."""
        self.scheduler.abort_sequence(seq.request_id, seq.seq_id, reason="done")
        members = self.members[seq.request_id]
        members.remove(seq)
        if not members:
            del self.members[seq.request_id]
            self.swap_space.drop(seq.request_id)

    def group_of(self, request_id: int) -> Group | None:
        """Return the scheduler's record of a request, also of one that has just ended."""
        return self.scheduler.groups.get(request_id) or self._late_groups.get(request_id)

    def drop_batch(self) -> None:
        """Abort what a failed step may have touched, and who waits with a token that will never land.

        What the step in flight has written is in the cache's index already, and nobody knows whether it is right.
        """
        flight, self.in_flight = self.in_flight, None
        landed, self._landed = self._landed, []
        for chunk in flight.sampled if flight else ():
            if chunk.group.request_id in self.scheduler.groups and not chunk.group.is_running:
                self.scheduler.abort(chunk.group.request_id)
        if flight:
            self._distrust(flight)
        super().drop_batch()
        self.dropped[:0] = landed

    def abort(self, request_id: int, index: int | None = None) -> list[Result]:
        """Drop a request, or one of its samples, wherever it is; a token on its way to it is dropped too."""
        results = super().abort(request_id, index)
        flight = self.in_flight
        if flight and not any(seq.finish_reason is None for seq in flight.seqs):  # nobody waits for it
            self.in_flight = None
            try:
                flight.wait()
            except InvalidLogitsError:
                self._distrust(flight)
        return results

    def _distrust(self, flight: Flight) -> None:
        """Let the cache forget what a step has written of which nobody knows whether it is right."""
        if isinstance(self.cache, PrefixCache):
            size = self.cache.pool.block_size
            self.cache.distrust({slot // size for chunk in flight.chunks for slot in chunk.slots})
