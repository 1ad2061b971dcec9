"""Beam search: which of the continuations of a few living beams live on, and which finished ones are kept."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from minipaged.foundation.filters import best_tokens
from minipaged.shapes import Float, Tensor


@dataclass(frozen=True)
class Beam:
    """A continuation of the prompt.

    Args:
        token_ids: Its tokens, an end token too.
        cumulative_logprob: The sum of their log-probabilities.
        score: What a finished beam is ranked by, ``cumulative_logprob / len(token_ids) ** length_penalty``; None
            while it lives, when all beams are of one length and the sum ranks them.
    """

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    score: float | None = None


class BeamSearch:
    """The state of one search. It knows neither model nor cache, only numbers.

    At every step all one-token continuations of all living beams are candidates, ordered by the sum of their
    log-probabilities. The best ``beam_width`` that do not end live on. One that ends is kept if it is among the
    best ``beam_width`` candidates of its step and among the best ``beam_width`` finished beams of the search.

    Args:
        beam_width: Beams that live at a time, and finished beams that are kept.
        max_tokens: Every beam ends at this length.
        end_token_ids: Tokens that end a beam.
        length_penalty: See `Beam`. Log-probabilities are negative, so above 0 it favours long beams.
        early_stopping: When the search is done once ``beam_width`` beams have finished. True: at once. False: when
            the best living beam would not beat the worst kept one if it ended now. "never": when it could not beat
            it at any length, if its log-probability stayed what it is, the best that can happen. A width of 1 is
            greedy decoding and always done at once.

    Invariants:
        ``live`` is ordered by ``cumulative_logprob`` and ``finished`` by score, best first; neither has more than
        ``beam_width`` members. All living beams have ``num_tokens`` tokens.

    Cost:
        A step looks at ``beam_width * V`` numbers and fetches ``beam_width * (1 + end tokens)`` of them from the
        device: each living beam can lose one candidate per end token, so that many always leave enough that live.

    Source:
        The rules are those of ``generate(num_beams=...)`` in the transformers library.

    Example:
        Three tokens with these probabilities, of which token 0 ends a beam; two beams.

        >>> search = BeamSearch(beam_width=2, max_tokens=3, end_token_ids={0})
        >>> search.advance(torch.tensor([[0.1, 0.6, 0.3]]).log())
        [(0, 1), (0, 2)]

        Four tenths of the second beam end: 0.3 * 0.4 = 0.12. Better are 0.6 * 0.5 = 0.3 and 0.6 * 0.4 = 0.24, both
        of beam 0: it forks and beam 1 is dropped, and what ended is third of two and forgotten.

        >>> search.advance(torch.tensor([[0.1, 0.5, 0.4], [0.4, 0.3, 0.3]]).log())
        [(0, 1), (0, 2)]
        >>> len(search.finished), search.done
        (0, False)

        The third token is the last. 0.3 * 0.8 and 0.24 * 0.9 are the best two.

        >>> search.advance(torch.tensor([[0.8, 0.1, 0.1], [0.05, 0.9, 0.05]]).log())
        []
        >>> [(beam.token_ids, round(beam.score, 3)) for beam in search.best(2)], search.done
        ([((1, 1, 0), -0.476), ((1, 2, 1), -0.511)], True)
    """

    def __init__(
        self,
        beam_width: int,
        max_tokens: int,
        end_token_ids: Collection[int],
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ):
        self.beam_width = beam_width
        self.max_tokens = max_tokens
        self.end_token_ids = frozenset(end_token_ids)
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.num_tokens = 0
        self.live = [Beam()]  # the prompt alone
        self.finished: list[Beam] = []

    def advance(self, logprobs: Float[Tensor, "W V"]) -> list[tuple[int, int]]:
        """Make one step.

        Args:
            logprobs: The log-probabilities of the next token, a row for each living beam in the order of ``live``.

        Returns:
            For each beam that lives now the index of its parent among those that lived before, and its new token.
        """
        assert not self.done and len(logprobs) == len(self.live), (self.done, logprobs.shape)
        self.num_tokens += 1
        survivors, live = [], []
        for rank, (cumulative_logprob, parent, token_id) in enumerate(self._candidates(logprobs)):
            token_ids = (*self.live[parent].token_ids, token_id)
            if token_id in self.end_token_ids or self.num_tokens == self.max_tokens:
                if rank < self.beam_width:
                    score = cumulative_logprob / self.num_tokens**self.length_penalty
                    self.finished.append(Beam(token_ids, cumulative_logprob, score))
            elif len(live) < self.beam_width:
                live.append(Beam(token_ids, cumulative_logprob))
                survivors.append((parent, token_id))
        self.live = live
        self.finished = self.best(self.beam_width)
        return survivors

    def best(self, n: int) -> list[Beam]:
        """Return the n finished beams of the highest score, best first."""
        return sorted(self.finished, key=_score, reverse=True)[:n]  # keeps the order of equals

    @property
    def done(self) -> bool:
        """Return whether the search is over."""
        if not self.live:
            return True
        if len(self.finished) < self.beam_width:
            return False
        if self.early_stopping is True or self.beam_width == 1:
            return True
        # The sum only falls. Divided by a power above 0 of the length it is best at the longest length.
        looks_ahead = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if looks_ahead else self.num_tokens
        return self.live[0].cumulative_logprob / length**self.length_penalty <= _score(self.finished[-1])

    def _candidates(self, logprobs: Float[Tensor, "W V"]) -> list[tuple[float, int, int]]:
        """Return (cumulative log-probability, parent, token id) of the best continuations, best first."""
        vocab_size = logprobs.shape[-1]
        before = torch.tensor([beam.cumulative_logprob for beam in self.live], device=logprobs.device)
        sums = (logprobs.float() + before[:, None]).view(1, -1)  # [1, W V]
        count = min(self.beam_width * (1 + len(self.end_token_ids)), sums.shape[-1])
        values, places = (each[0].tolist() for each in best_tokens(sums, count))
        # A banned token has -inf: it can be nobody's continuation, even if nothing else is left.
        return [
            (value, place // vocab_size, place % vocab_size)
            for value, place in zip(values, places, strict=True)
            if value > float("-inf")
        ]


def _score(beam: Beam) -> float:
    assert beam.score is not None
    return beam.score
