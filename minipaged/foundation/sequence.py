"""One request from the engine's side: a sequence while it runs, its result when it has ended."""

import time
from dataclasses import dataclass, field

from minipaged.foundation.detokenizer import TextStream
from minipaged.foundation.sampling import SampledToken, SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class Metrics:
    """Times of one finished sequence. Times are in seconds, from the moment the request was added."""

    num_prompt_tokens: int
    num_generated_tokens: int
    time_to_first_token: float | None
    total_time: float

    @property
    def tokens_per_second(self) -> float:
        """Return generated tokens over the whole time of the request, waiting and prefill included."""
        return self.num_generated_tokens / self.total_time if self.total_time > 0 else 0.0


@dataclass(frozen=True)
class Result:
    """One finished sample.

    ``token_ids`` holds every generated token, the end token too; ``text`` does not show the end token.
    ``finish_reason`` is "stop" (an end token or a stop string), "length" (``max_tokens``, the model's limit or the
    cache's) or "abort". ``index`` counts the samples of one prompt. ``seed`` makes the sample again. ``score`` is
    what the samples of a request were ranked by, None where nothing was ranked.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    index: int
    seed: int
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics
    score: float | None = None


@dataclass(frozen=True)
class StepOutput:
    """What one step added to one sequence.

    ``result`` is set on the last output of the sequence, ``is_last`` on the last output of the whole request.
    """

    request_id: int
    index: int
    token_ids: list[int]
    text: str
    result: Result | None = None
    is_last: bool = False


@dataclass(eq=False)
class Sequence:
    """One prompt and what has been generated for it.

    Invariants:
        The cache holds keys and values of every token but the newest: after g generated tokens that is
        ``len(prompt_token_ids) + g - 1`` slots, since the newest token has not been through the model yet.
    """

    request_id: int
    seq_id: int  # names the sequence in the cache; a later rung has several sequences of one request
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_token_ids: frozenset[int]
    max_output_tokens: int
    text_stream: TextStream
    index: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and output in one list."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Return how many tokens prompt and output have together."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def append(self, sampled: SampledToken) -> str:
        """Add a sampled token, decide whether the sequence is finished, and return the text that came out."""
        token_id = sampled.token_id
        self.first_token_time = self.first_token_time or time.perf_counter()
        self.output_token_ids.append(token_id)
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
        is_end = token_id in self.end_token_ids
        delta = self.text_stream.push(token_id, is_end_token=is_end)
        if is_end or self.text_stream.stopped:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.max_output_tokens:
            self.finish_reason = "length"
        if self.finish_reason is None:
            return delta
        delta += self.text_stream.flush()
        if self.text_stream.stopped:  # a stop string can match in text that was held back
            self.finish_reason = "stop"
        return delta

    def result(self) -> Result:
        """Return the finished sample."""
        assert self.finish_reason is not None
        first = self.first_token_time
        return Result(
            prompt_token_ids=self.prompt_token_ids,
            token_ids=self.output_token_ids,
            text=self.text_stream.text,
            finish_reason=self.finish_reason,
            index=self.index,
            seed=self.seed,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            metrics=Metrics(
                num_prompt_tokens=len(self.prompt_token_ids),
                num_generated_tokens=len(self.output_token_ids),
                time_to_first_token=None if first is None else first - self.arrival_time,
                total_time=time.perf_counter() - self.arrival_time,
            ),
        )
