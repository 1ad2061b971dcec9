"""Rung 3's engine: several sequences of one prompt, forked after its prefill or, as beams, at every step."""

import time
from dataclasses import replace
from typing import Any

from minipaged.foundation.generate import MAX_BATCH
from minipaged.foundation.model import Attend
from minipaged.foundation.philox import child_seed
from minipaged.foundation.sampling import SampledToken, penalized_logprobs, sample
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.paged.generate import Engine as PagedEngine
from minipaged.shapes import Float, Int, Tensor
from minipaged.sharing.beam import Beam
from minipaged.sharing.cache import SharingCache
from minipaged.sharing.family import Family, num_returned, num_sequences
from minipaged.sharing.ops import copy_blocks


class Engine(PagedEngine):
    """Static batches over shared blocks.

    Changes of rung 2: a request runs `SamplingParams.num_sequences` sequences, its family. The prompt goes through
    the model once. Samples then fork from it and each takes its own tokens; beams fork at every step from those
    that live on.
    """

    rung = "sharing"
    cache: SharingCache

    def make_bookkeeping(self, num_blocks: int, block_size: int) -> SharingCache:
        """Make a pool that counts references."""
        self.families: dict[int, Family] = {}  # by request, while it runs
        return SharingCache(num_blocks, block_size)

    # -- room for a family

    def slots_per_sequence(self, num_prompt_tokens: int, params: FoundationParams) -> int:
        """Return the slots of the prompt's full blocks, which all share, and of an equal part of the others.

        A prompt that fits alone always gets one token for each sequence: the last token needs no slot.
        """
        pool = self.cache.pool
        shared = num_prompt_tokens // pool.block_size
        own = (pool.num_blocks - shared) // num_sequences(params)
        return min(max((shared + own) * pool.block_size, num_prompt_tokens), pool.num_blocks * pool.block_size)

    def can_admit(self, seq: Sequence) -> bool:
        """Return whether the batch and the pool have room for the whole family."""
        count = num_sequences(seq.params)
        members = sum(num_sequences(other.params) for other in self.admitted)
        return members + count <= MAX_BATCH and self.cache.can_admit(*self._room(seq))

    def admit(self, seq: Sequence) -> None:
        """Take the prompt's blocks, and promise the family its room."""
        self.cache.allocate(seq.seq_id, *self._room(seq))
        self.add_family(seq)

    def add_family(self, seq: Sequence) -> None:
        """Note what the request wants of the sequences that will fork from this one."""
        family = self.families[seq.request_id] = Family.of(seq)
        if family.holds_back and seq.params.logprobs is None:
            seq.params = replace(seq.params, logprobs=0)  # to rank the samples by

    def abort(self, request_id: int) -> list[Result]:
        """Drop all sequences of a request; return what each had, and those that were held back.

        Of a beam search that are the ``n`` best of the beams that live. A request that has not forked yet returns all
        its samples, without tokens.
        """
        family = self.families.pop(request_id, None)
        if family is None or family.search is None:
            dropped = super().abort(request_id)
            if family is None:
                return dropped
            dropped = family.samples_of(dropped)
            return family.best(dropped) if family.holds_back else dropped
        for rank, seq in enumerate(self._members(request_id)):  # in the order of their sums
            seq.index = rank
            seq.text_stream.push(seq.output_token_ids)
        return super().abort(request_id)[: num_returned(family.params)]

    def stats(self) -> dict[str, int]:
        """Return the counters of the pool, and the copies made."""
        return super().stats() | {"copies": self.cache.num_copies}

    def _room(self, seq: Sequence) -> tuple[int, int, int]:
        num_prompt_tokens = len(seq.prompt_token_ids)
        return num_prompt_tokens, num_prompt_tokens + seq.max_output_tokens - 1, num_sequences(seq.params)

    # -- copy-on-write

    def attend_decode(self, batch: list[Sequence], slots: Int[Tensor, " B"]) -> Attend:
        """Make the copies that this step's writes need, in all layers at once; then go on as rung 2."""
        copies = self.cache.take_copies()
        if copies:
            copy_blocks(self.kv, self.tensor(copies), tier=self.model.tier)
        return super().attend_decode(batch, slots)

    # -- several sequences of one prompt

    def choose(self, batch: list[Sequence], logits: Float[Tensor, "B V"]) -> list[StepOutput]:
        """Let every sample take its token and every beam search make its step."""
        samples: list[int] = []  # rows of the batch
        searches: dict[int, list[int]] = {}  # rows by request
        for row, seq in enumerate(batch):
            is_beam = self.families[seq.request_id].search is not None
            (searches.setdefault(seq.request_id, []) if is_beam else samples).append(row)
        outputs = self._choose_samples([batch[row] for row in samples], self._pick(logits, samples))
        for request_id, rows in searches.items():  # a batch may have them in any order, a search has the best first
            rank = {seq.seq_id: place for place, seq in enumerate(self._members(request_id))}
            rows.sort(key=lambda row: rank[batch[row].seq_id])
        # All searches look at their logits before one moves on: an error costs nobody what has just been found.
        families = [[batch[row] for row in rows] for rows in searches.values()]
        logprobs = [
            penalized_logprobs(self._pick(logits, rows), beams)
            for rows, beams in zip(searches.values(), families, strict=True)
        ]
        for beams, own in zip(families, logprobs, strict=True):
            outputs += self._advance_search(beams, own)
        return outputs

    def _pick(self, logits: Float[Tensor, "B V"], rows: list[int]) -> Float[Tensor, "R V"]:
        return logits if rows == list(range(len(logits))) else logits[self.tensor(rows)]

    def _fork(self, parent: Sequence, **changes: Any) -> Sequence:
        """Make a sequence that shares the parent's blocks and prompt."""
        child = self._without_text(parent, seq_id=next(self.seq_ids), **changes)
        self.cache.fork(parent.seq_id, child.seq_id)
        return child

    def _without_text(self, seq: Sequence, **changes: Any) -> Sequence:
        stream = self.make_text_stream(seq.params)
        return replace(seq, **({"output_token_ids": [], "logprobs": [], "text_stream": stream} | changes))

    # -- samples

    def _choose_samples(self, batch: list[Sequence], logits: Float[Tensor, "B V"]) -> list[StepOutput]:
        """Fork sequences that have just had their prefill, then let every sequence take its own token."""
        rows, members = [], []
        for row, seq in enumerate(batch):
            family = [seq] if seq.output_token_ids else [seq, *self._fork_samples(seq)]
            members += family
            rows += [row] * len(family)
        outputs = []
        for seq, token in zip(members, sample(self._pick(logits, rows), members, tier=self.model.tier), strict=True):
            outputs += self._family_outputs(self.append(seq, token))
        return outputs

    def _fork_samples(self, parent: Sequence) -> list[Sequence]:
        """Make the other samples of a request."""
        family = self.families[parent.request_id]
        indices = [index for index in family.indices if index != parent.index]
        children = [self._fork(parent, index=index, seed=child_seed(family.seed, index)) for index in indices]
        self.running += children  # a fork before an error is freed by `drop_batch`
        return children

    def _family_outputs(self, output: StepOutput) -> list[StepOutput]:
        """Return what may leave the engine now: with ``best_of``, nothing before the whole family has ended."""
        family = self.families[output.request_id]
        if output.result is None:
            return [] if family.holds_back else [output]
        family.results.append(output.result)
        is_last = len(family.results) == num_sequences(family.params)
        if is_last:
            del self.families[output.request_id]
        if not family.holds_back:
            return [replace(output, is_last=is_last)]
        return _whole_outputs(output.request_id, family.best() if is_last else [])

    # -- beams

    def _advance_search(self, beams: list[Sequence], logprobs: Float[Tensor, "W V"]) -> list[StepOutput]:
        """Make one step of a beam search: drop, fork and extend its sequences, or end it."""
        request_id = beams[0].request_id
        search = self.families[request_id].search
        assert search is not None
        survivors = search.advance(logprobs)
        # First the dropped beams go: their blocks may be the ones that the next writes take.
        kept = set() if search.done else {parent for parent, _ in survivors}
        for i, beam in enumerate(beams):
            if i not in kept:
                self.give_back(beam)
        self.running = [seq for seq in self.running if seq.request_id != request_id]
        if not search.done:
            self.running += self._extend_beams(beams, survivors)
            return []
        family = self.families.pop(request_id)
        best = search.best(num_returned(family.params))
        if not best:
            raise RuntimeError("beam search has nothing to go on with: every token is banned")
        return _whole_outputs(request_id, [self._beam_result(beams[0], i, beam) for i, beam in enumerate(best)])

    def _extend_beams(self, beams: list[Sequence], survivors: list[tuple[int, int]]) -> list[Sequence]:
        """Return a sequence for each survivor: the parent itself for its first child, a fork for any other."""
        extended: list[Sequence] = []
        for parent, _ in survivors:
            seq = beams[parent]
            if seq in extended:
                seq = self._fork(seq, output_token_ids=list(seq.output_token_ids))
            extended.append(seq)
        for seq, (_, token_id) in zip(extended, survivors, strict=True):  # when no fork needs the old tokens any more
            seq.first_token_time = seq.first_token_time or time.perf_counter()
            seq.output_token_ids.append(token_id)
        return extended

    def _beam_result(self, seq: Sequence, index: int, beam: Beam) -> Result:
        """Return a finished beam as a result, with its text."""
        seq = self._without_text(seq, index=index)
        for token_id in beam.token_ids:
            seq.append(SampledToken(token_id, None))
        return replace(seq.result(), score=beam.score)

    def _members(self, request_id: int) -> list[Sequence]:
        return [seq for seq in self.running if seq.request_id == request_id]


def _whole_outputs(request_id: int, results: list[Result]) -> list[StepOutput]:
    """Return finished samples as one output each."""
    return [
        StepOutput(request_id, result.index, result.token_ids, result.text, result, is_last=result is results[-1])
        for result in results
    ]
