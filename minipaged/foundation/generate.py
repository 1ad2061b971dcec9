"""Rung 0's engine: static batches, no cache, every token recomputed at every step.

All engines of the ladder have the same four verbs: `Engine.add_request`, `Engine.step`, `Engine.abort` and
`Engine.has_unfinished`. A later rung overrides only what it changes: where keys and values live, what a decode
step reads, and at last who joins a batch and when.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from minipaged.errors import UserError
from minipaged.foundation.detokenizer import TextStream
from minipaged.foundation.model import Attend, DecoderModel
from minipaged.foundation.ops import causal_attention
from minipaged.foundation.philox import child_seed, draw_seed
from minipaged.foundation.sampling import SampledToken, SamplingParams, sample
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.shapes import Float, Int, Tensor
from minipaged.transfer import send

MAX_BATCH = 256
"""Most sequences of one static batch. A later rung makes this an option."""

MAX_PREFILL_TOKENS = 8192
"""Most prompt tokens of one forward pass, so that activations stay small; one longer prompt goes alone."""


@dataclass(frozen=True)
class EngineOptions:
    """What every engine needs beside the model.

    Args:
        max_model_len: Most tokens of one sequence, prompt and output together.
        decode: Turns token ids into text, special tokens left out; None when the model has no tokenizer.
        byte_token_ids: Tokens that stand for a single byte; see `TextStream`.
        eos_token_ids: Every token that ends an answer.
        generation_config: The model's own sampling defaults.
        seed: Makes the seeds of requests that bring none; None draws them at random.
    """

    max_model_len: int
    decode: Callable[[list[int]], str] | None = None
    byte_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    generation_config: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None


class Engine:
    """Generate text for a static batch: it is formed, runs until its longest member ends, then the next is formed.

    A finished sequence leaves the computation at once, but nobody takes its place before the batch has ended.
    """

    rung = "foundation"
    options_type: type[EngineOptions] = EngineOptions

    def __init__(self, model: DecoderModel, options: EngineOptions):
        self.model = model
        self.options = options
        self.waiting: deque[Sequence] = deque()  # in order of arrival
        self.admitted: deque[Sequence] = deque()  # members of the batch whose prompt has not been through the model
        self.running: list[Sequence] = []  # members of the batch that have their first token
        self.dropped: list[StepOutput] = []  # the ends of sequences that a failed step has cost, not yet reported
        self.request_ids = itertools.count()
        self.seq_ids = itertools.count()
        # Called just before a sequence's slots are given back: lessons and drawings look at the cache here.
        self.before_release: Callable[[Sequence], None] | None = None

    # -- the four verbs

    def add_request(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> int:
        """Queue a request and return its id.

        Raises:
            UserError: The prompt is empty, holds an id outside the vocabulary, or can never fit.
        """
        prompt = self.check_prompt(prompt_token_ids, params)
        params = params.resolve(self.options.generation_config)
        request_id = next(self.request_ids)
        eos = frozenset() if params.ignore_eos else self.options.eos_token_ids
        limit = self.max_output_tokens(len(prompt), params)
        self.waiting.append(
            Sequence(
                request_id=request_id,
                seq_id=next(self.seq_ids),
                prompt_token_ids=prompt,
                params=params,
                seed=self._seed_for(request_id, params),
                end_token_ids=eos | frozenset(params.stop_token_ids),
                max_output_tokens=limit if params.max_tokens is None else min(limit, params.max_tokens),
                text_stream=self.make_text_stream(params),
            )
        )
        return request_id

    def has_unfinished(self) -> bool:
        """Return whether any request waits or runs."""
        return bool(self.waiting or self.admitted or self.running or self.dropped)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run the model once and give every sequence that took part its next token.

        Returns:
            One output per sequence that took part; nothing when nothing is to be done.

        Raises:
            InvalidLogitsError: The model gave NaN. It and any other error in the middle of a step leave tokens and
                slots that do not fit together, so the whole batch is dropped: the next step reports each member
                with finish_reason "abort". Requests that wait are not touched.

        Cost:
            One pass over the weights, for a prefill as for a decode.
        """
        if self.dropped:
            outputs, self.dropped = self.dropped, []
            return outputs
        try:
            return self._run_batch()
        except BaseException:
            self.drop_batch()
            raise

    def _run_batch(self) -> list[StepOutput]:
        if not self.admitted and not self.running:
            self._form_batch()
        if self.admitted:
            batch = self._take_prefill_group()
            self.running += batch
            logits = self.prefill(batch)
        elif self.running:
            batch = self.running
            logits = self.decode(batch)
        else:
            return []
        outputs = self.choose(batch, logits)
        self.running = [seq for seq in self.running if seq.finish_reason is None]
        return outputs

    def abort(self, request_id: int) -> list[Result]:
        """Drop a request wherever it is, free what it holds, and return what it had.

        An id that is not there, because the request has ended or never was, gives an empty list.
        """
        self.dropped = [output for output in self.dropped if output.request_id != request_id]
        withdrawn = self.withdraw(request_id)
        for seq in withdrawn:
            if seq.finish_reason is None:
                seq.finish_reason = "abort"
                seq.text_stream.flush()
        return [seq.result() for seq in withdrawn]

    def withdraw(self, request_id: int) -> list[Sequence]:
        """Take a request's sequences out of the queues, free what they hold, and return them."""
        withdrawn = []
        for queue in (self.waiting, self.admitted, self.running):
            for seq in [seq for seq in queue if seq.request_id == request_id]:
                queue.remove(seq)
                # One that ended in a step that failed later has given back its slots.
                if queue is not self.waiting and seq.finish_reason is None:
                    self.give_back(seq)
                withdrawn.append(seq)
        return withdrawn

    def drop_batch(self) -> None:
        """Abort all members of the batch and note their ends for the next step."""
        for request_id in dict.fromkeys(seq.request_id for seq in (*self.admitted, *self.running)):
            for result in (results := self.abort(request_id)):
                is_last = result is results[-1]
                self.dropped.append(StepOutput(request_id, result.index, [], "", result, is_last))

    # -- what a later rung changes

    def max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens a prompt of this length can get at most."""
        return self.options.max_model_len - num_prompt_tokens

    def can_admit(self, seq: Sequence) -> bool:
        """Return whether the next batch has room for this sequence."""
        return len(self.admitted) < MAX_BATCH

    def admit(self, seq: Sequence) -> None:
        """Reserve what the sequence needs. Without a cache that is nothing."""

    def release(self, seq: Sequence) -> None:
        """Give back what the sequence holds."""

    def prefill(self, batch: list[Sequence]) -> Float[Tensor, "B V"]:
        """Run whole sequences through the model and return the logits after each one's last token."""
        lengths = [seq.num_tokens for seq in batch]
        starts = self.tensor([0, *itertools.accumulate(lengths)], torch.int32)
        token_ids = self.tensor(list(itertools.chain.from_iterable(seq.token_ids for seq in batch)))
        positions = self.tensor(list(itertools.chain.from_iterable(range(length) for length in lengths)))
        attend = self.attend_prefill(batch, starts)
        return self.model.forward(token_ids, positions, attend, starts[1:].long() - 1)

    def choose(self, batch: list[Sequence], logits: Float[Tensor, "B V"]) -> list[StepOutput]:
        """Choose the next token of each sequence, and release those that it ends."""
        tokens = sample(logits, batch, tier=self.model.tier)
        return [self.append(seq, token) for seq, token in zip(batch, tokens, strict=True)]

    def append(self, seq: Sequence, sampled: SampledToken) -> StepOutput:
        """Give one sequence its token."""
        text = seq.append(sampled)
        if seq.finish_reason is None:
            return StepOutput(seq.request_id, seq.index, [sampled.token_id], text)
        self.give_back(seq)
        return StepOutput(seq.request_id, seq.index, [sampled.token_id], text, seq.result(), is_last=True)

    def decode(self, batch: list[Sequence]) -> Float[Tensor, "B V"]:
        """Return the logits of the next token: here by running every sequence from its first token again."""
        return torch.cat([self.prefill(group) for group in _groups(batch)])

    def attend_prefill(self, batch: list[Sequence], query_starts: Int[Tensor, " B+1"]) -> Attend:
        """Return the attention of a prefill: each token sees those before it in its own sequence."""
        windows = self.model.config.layer_windows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v, query_starts, window=windows[layer], tier=self.model.tier)

        return attend

    def stats(self) -> dict[str, int]:
        """Return counters since the engine's start; blocks are 0 on a rung without a cache."""
        names = "num_blocks free_blocks used_blocks cached_blocks hit_tokens copies preemptions evictions"
        return dict.fromkeys(names.split(), 0)

    # -- helpers

    def give_back(self, seq: Sequence) -> None:
        """Release a sequence that has held something, after `before_release` has had its look."""
        if self.before_release is not None:
            self.before_release(seq)
        self.release(seq)

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Put a list of numbers on the model's device."""
        return send(values, dtype, self.model.device)

    def check_prompt(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list, or refuse a request that the engine can never serve."""
        prompt = list(prompt_token_ids)
        if not prompt:
            raise UserError("the prompt is empty: it must hold at least one token")
        vocab_size = self.model.config.vocab_size
        # All at once, since prompts are long: one look at each token in Python takes longer than to find it in a cache.
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:
            bad = next(each for each in prompt if type(each) is not int or not 0 <= each < vocab_size)
            raise UserError(f"prompt token {bad!r} is not an id of the vocabulary, 0 to {vocab_size - 1}")
        limit = self.options.max_model_len
        if len(prompt) >= limit:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; at most {limit - 1} fit with one token of answer "
                f"into the limit of {limit} (max_model_len)"
            )
        return prompt

    def make_text_stream(self, params: SamplingParams) -> TextStream:
        """Return an empty text for a new sequence."""
        return TextStream(self.options.decode, params, self.options.byte_token_ids)

    def _seed_for(self, request_id: int, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        # Child 0 keeps a seed, so request k takes child k + 1: no request shares the engine's own noise.
        return draw_seed() if self.options.seed is None else child_seed(self.options.seed, request_id + 1)

    def _form_batch(self) -> None:
        while self.waiting and self.can_admit(self.waiting[0]):
            self.admit(self.waiting[0])
            self.admitted.append(self.waiting.popleft())
        # `check_prompt` has refused what an empty cache could not hold; without progress step would return for ever.
        assert self.admitted or not self.waiting, "a request that was accepted does not fit an empty cache"

    def _take_prefill_group(self) -> list[Sequence]:
        group = next(_groups(list(self.admitted)))
        for _ in group:
            self.admitted.popleft()
        return group


def _groups(batch: list[Sequence]) -> Iterator[list[Sequence]]:
    """Cut a batch into runs of at most `MAX_PREFILL_TOKENS` tokens, at least one sequence each."""
    group: list[Sequence] = []
    num_tokens = 0
    for seq in batch:
        if group and num_tokens + seq.num_tokens > MAX_PREFILL_TOKENS:
            yield group
            group, num_tokens = [], 0
        group.append(seq)
        num_tokens += seq.num_tokens
    yield group
