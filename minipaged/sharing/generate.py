"""Rung 3's engine: several sequences of one prompt, forked after its prefill."""

from dataclasses import dataclass, field, replace

from minipaged.foundation.detokenizer import TextStream
from minipaged.foundation.generate import MAX_BATCH
from minipaged.foundation.model import Attend
from minipaged.foundation.philox import child_seed
from minipaged.foundation.sampling import sample
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.paged.generate import Engine as PagedEngine
from minipaged.shapes import Float, Int, Tensor
from minipaged.sharing.cache import SharingCache
from minipaged.sharing.ops import copy_blocks
from minipaged.sharing.params import SamplingParams


class Engine(PagedEngine):
    """Static batches over shared blocks.

    Changes of rung 2: a request runs `SamplingParams.num_sequences` sequences. The prompt goes through the model
    once; then the sequence forks, and every child takes its own first token from the same logits.
    """

    rung = "sharing"
    cache: SharingCache

    def make_bookkeeping(self, num_blocks: int, block_size: int) -> SharingCache:
        """Make a pool that counts references."""
        self.families: dict[int, Family] = {}  # by request, while it runs
        return SharingCache(num_blocks, block_size)

    # -- room for a family

    def slots_per_sequence(self, num_prompt_tokens: int, params: FoundationParams) -> int:
        """Return the slots of the prompt's full blocks, which all share, and of an equal part of the others."""
        pool = self.cache.pool
        shared = num_prompt_tokens // pool.block_size
        return (shared + (pool.num_blocks - shared) // num_sequences(params)) * pool.block_size

    def can_admit(self, seq: Sequence) -> bool:
        """Return whether the batch and the pool have room for the whole family."""
        count = num_sequences(seq.params)
        members = sum(num_sequences(other.params) for other in self.admitted)
        return members + count <= MAX_BATCH and self.cache.can_admit(*self._room(seq))

    def admit(self, seq: Sequence) -> None:
        """Take the prompt's blocks, and promise the family its room."""
        max_tokens, num_prompt_tokens, count = self._room(seq)
        self.cache.allocate(seq.seq_id, num_prompt_tokens, max_tokens, count)
        family = self.families[seq.request_id] = Family(seq.params)
        if family.holds_back and seq.params.logprobs is None:
            seq.params = replace(seq.params, logprobs=0)  # to rank the samples by

    def abort(self, request_id: int) -> list[Result]:
        """Drop all sequences of a request; return what each had, and those that were held back."""
        family = self.families.pop(request_id, None)
        held = family.results if family and family.holds_back else []
        return held + super().abort(request_id)

    def stats(self) -> dict[str, int]:
        """Return the counters of the pool, and the copies made."""
        return super().stats() | {"copies": self.cache.num_copies}

    def _room(self, seq: Sequence) -> tuple[int, int, int]:
        num_prompt_tokens = len(seq.prompt_token_ids)
        return num_prompt_tokens + seq.max_output_tokens - 1, num_prompt_tokens, num_sequences(seq.params)

    # -- copy-on-write

    def attend_decode(self, batch: list[Sequence], slots: Int[Tensor, " B"]) -> Attend:
        """Make the copies that this step's writes need, in all layers at once; then go on as rung 2."""
        copies = self.cache.take_copies()
        if copies:
            copy_blocks(self.kv, self.tensor(copies), tier=self.model.tier)
        return super().attend_decode(batch, slots)

    # -- several samples

    def choose(self, batch: list[Sequence], logits: Float[Tensor, "B V"]) -> list[StepOutput]:
        """Fork sequences that have just had their prefill, then let every sequence take its own token."""
        rows, members = [], []
        for row, seq in enumerate(batch):
            family = [seq] if seq.output_token_ids else [seq, *self._fork(seq)]
            members += family
            rows += [row] * len(family)
        if len(members) > len(batch):
            logits = logits[self.tensor(rows)]
        outputs = []
        for seq, token in zip(members, sample(logits, members), strict=True):
            outputs += self._family_outputs(self.append(seq, token))
        return outputs

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """Make children 1 and up of a sequence; the parent is child 0."""
        children = []
        for index in range(1, num_sequences(parent.params)):
            child = replace(
                parent,
                seq_id=next(self.seq_ids),
                index=index,
                seed=child_seed(parent.seed, index),
                output_token_ids=[],
                logprobs=[],
                text_stream=TextStream(self.options.decode, parent.params),
            )
            self.cache.fork(parent.seq_id, child.seq_id)
            children.append(child)
        self.running += children
        return children

    def _family_outputs(self, output: StepOutput) -> list[StepOutput]:
        """Return what may leave the engine now: with ``best_of``, nothing before the whole family has ended."""
        family = self.families[output.request_id]
        if output.result is not None:
            family.results.append(output.result)
        is_last = len(family.results) == num_sequences(family.params)
        if is_last:
            del self.families[output.request_id]
        if not family.holds_back:
            return [replace(output, is_last=is_last)]
        best = family.best() if is_last else []
        return [
            StepOutput(output.request_id, result.index, result.token_ids, result.text, result, result is best[-1])
            for result in best
        ]


@dataclass
class Family:
    """The sequences of one request: what was asked for, and which have ended."""

    params: FoundationParams
    results: list[Result] = field(default_factory=list)

    @property
    def holds_back(self) -> bool:
        """Return whether nobody can know before the end which samples will be returned."""
        return num_sequences(self.params) > getattr(self.params, "n", 1)

    def best(self) -> list[Result]:
        """Return the n samples with the best mean log-probability, best first, counted anew from 0."""
        assert isinstance(self.params, SamplingParams)
        ranked = sorted(self.results, key=lambda result: (-_mean_logprob(result), result.index))
        kept = ranked[: self.params.n]
        if self.params.logprobs is None:  # they were asked for only to rank by them
            kept = [replace(result, logprobs=None) for result in kept]
        return [replace(result, index=index) for index, result in enumerate(kept)]


def num_sequences(params: FoundationParams) -> int:
    """Return how many sequences a request runs at once; rung 0's parameters ask for one."""
    return params.num_sequences if isinstance(params, SamplingParams) else 1


def _mean_logprob(result: Result) -> float:
    assert result.logprobs
    return sum(each.logprob for each in result.logprobs) / len(result.logprobs)
