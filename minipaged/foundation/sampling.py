"""How the next tokens of a batch are chosen from the logits.

Choosing is Gumbel-max: with noise g drawn independently for every token, ``argmax(logits / temperature + g)``
is a sample from ``softmax(logits / temperature)``. No probabilities are needed, no generator has a state (see
`minipaged.foundation.philox`), and temperature 0 is the same rule without the noise. A row goes through::

    logits -> penalties -> ban end tokens (min_tokens) -> - maximum, / temperature -> top_k -> top_p -> min_p
           -> + noise -> argmax

Ties go to the lower token id everywhere, and a row's result never depends on the other rows of the batch:
each step is exact, or works on each number alone, or adds integers.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from minipaged.foundation.filters import best_tokens
from minipaged.foundation.philox import seed_tensor
from minipaged.foundation.sampler.ops import sample_tokens
from minipaged.foundation.sampling_params import SamplingParams
from minipaged.shapes import Float, Tensor
from minipaged.tiers import Tier
from minipaged.transfer import send

__all__ = [
    "InvalidLogitsError",
    "SampledToken",
    "SamplingParams",
    "SequenceState",
    "TokenLogprobs",
    "penalized_logprobs",
    "sample",
]

LOWEST_LOGPROB = -9999.0
"""Reported for an impossible token instead of -inf, which JSON cannot carry."""


class InvalidLogitsError(RuntimeError):
    """Some rows of the logits have no best token: NaN, +inf, or nothing but -inf.

    ``rows`` are their indices in the batch. No engine catches it: it ends the whole step, for the other sequences
    too. Such logits come from a broken model or cache, and then no row of the batch is to be trusted.
    """

    def __init__(self, rows: list[int], values: list[float]) -> None:
        found = ", ".join(f"sequence {row} of the batch ({value})" for row, value in zip(rows, values, strict=True))
        super().__init__(f"no token can be chosen, the largest logit is not finite: {found}")
        self.rows = rows


class SequenceState(Protocol):
    """What `sample` reads of a sequence."""

    @property
    def params(self) -> SamplingParams:
        """How to choose; resolved, so that no field of `SamplingParams.resolve` is None."""
        ...

    @property
    def seed(self) -> int:
        """The key of the noise."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt, for the repetition penalty."""
        ...

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The tokens chosen so far; their number is the output index of the next one."""
        ...

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end the sequence: they cannot be chosen before ``min_tokens``."""
        ...


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities in the raw distribution, before penalties, temperature and filters.

    Args:
        token_id: The chosen token.
        logprob: Its own value, always present.
        top: The best tokens and their values, best first; the chosen token may be among them or not.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class SampledToken:
    """The next token of one sequence, with log-probabilities where its params ask for them."""

    token_id: int
    logprob: TokenLogprobs | None


def sample(
    logits: Float[Tensor, "B V"], sequences: Sequence[SequenceState], *, tier: Tier = None
) -> list[SampledToken]:
    """Choose the next token of every sequence.

    Args:
        logits: One row per sequence, in any floating type; computed with in fp32 and never changed.
        sequences: Their parameters, seeds and tokens so far; see `SequenceState`.
        tier: Who chooses; penalties and log-probabilities are PyTorch's in any case.

    Returns:
        One token per sequence, in order.

    Raises:
        InvalidLogitsError: A row has no finite largest logit.

    Invariants:
        A sequence gets the same token alone and in any batch.

    Cost:
        One pass over [B, V] where all rows are greedy: no noise, no sort. A random row without top_k and
        top_p draws V numbers; with them it sorts a few hundred tokens and draws their numbers only.
    """
    if not sequences:
        return []
    raw = logits.to(torch.float32)
    scores = _penalize(raw, sequences)
    chosen = sample_tokens(
        scores.contiguous(), *sampling_settings(sequences, scores.shape[-1], raw.device), tier=tier
    ).tolist()
    if min(chosen) < 0:
        _check_finite(scores.max(dim=-1).values)
    logprobs = _logprobs(raw, sequences, chosen)
    return [SampledToken(token_id, logprobs.get(row)) for row, token_id in enumerate(chosen)]


def penalized_logprobs(logits: Float[Tensor, "B V"], sequences: Sequence[SequenceState]) -> Float[Tensor, "B V"]:
    """Return the log-probabilities that a search ranks tokens by: the raw distribution's, then the penalties.

    A banned end token gets -inf; the others keep their value, so a row need not sum to 1 any more.

    Raises:
        InvalidLogitsError: A row has no finite largest logit.
    """
    raw = logits.to(torch.float32)
    _check_finite(raw.max(dim=-1).values)
    logprobs = _penalize(raw.log_softmax(dim=-1), sequences)
    _check_finite(logprobs.max(dim=-1).values)  # a ban may leave nothing
    return logprobs


def _setting(params: SamplingParams, name: str) -> float:
    """Return one of the fields that may be None until `SamplingParams.resolve` has filled them."""
    value = getattr(params, name)
    if value is None:
        raise TypeError(f"sample needs resolved SamplingParams, but {name} is None")
    return value


def _check_finite(best: Float[Tensor, " B"]) -> None:
    values = best.tolist()
    rows = [row for row, value in enumerate(values) if not math.isfinite(value)]
    if rows:
        raise InvalidLogitsError(rows, [values[row] for row in rows])


# A token of a row, with a number that says what to do to its logit.
_Edits = list[tuple[int, int, float]]


def _penalize(raw: Float[Tensor, "B V"], sequences: Sequence[SequenceState]) -> Float[Tensor, "B V"]:
    """Return ``raw`` itself where no row has anything to change, else a changed copy."""
    repetition, output, banned = _list_edits(sequences, raw.shape[-1])
    if not (repetition or output or banned):
        return raw
    scores = raw.clone()
    if repetition:
        where, factor = _as_tensors(repetition, raw.device)
        logit = scores[where]
        penalized = torch.where(logit > 0, logit / factor, logit * factor)
        scores[where] = penalized.clamp(max=torch.finfo(torch.float32).max)
    if output:
        where, amount = _as_tensors(output, raw.device)
        scores[where] = scores[where] - amount
    if banned:
        where, _ = _as_tensors(banned, raw.device)
        scores[where] = -math.inf
    return scores


def _list_edits(sequences: Sequence[SequenceState], vocab_size: int) -> tuple[_Edits, _Edits, _Edits]:
    repetition: _Edits = []
    output: _Edits = []
    banned: _Edits = []
    for row, sequence in enumerate(sequences):
        params, output_ids = sequence.params, sequence.output_token_ids
        repetition_penalty = _setting(params, "repetition_penalty")
        if repetition_penalty != 1:
            seen = {*sequence.prompt_token_ids, *output_ids}
            repetition += [(row, token_id, repetition_penalty) for token_id in seen]
        presence, frequency = params.presence_penalty, params.frequency_penalty
        if presence or frequency:
            counts = Counter(output_ids).items()
            output += [(row, token_id, presence + frequency * count) for token_id, count in counts]
        if len(output_ids) < params.min_tokens:
            # A request may name a stop token that the vocabulary does not have.
            banned += [(row, token_id, 0.0) for token_id in sequence.end_token_ids if token_id < vocab_size]
    return repetition, output, banned


def _as_tensors(edits: _Edits, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, token_ids, values = zip(*edits, strict=True)
    return (torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)), _as_fp32(values, device)


def _as_fp32(values: Iterable[float], device: torch.device) -> Float[Tensor, " B"]:
    """Round to fp32, but never to infinity: 0 times infinity would be NaN."""
    largest = torch.finfo(torch.float32).max
    return send([max(-largest, min(value, largest)) for value in values], torch.float32, device)


def sampling_settings(
    sequences: Sequence[SequenceState], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return what `sample_tokens` takes beside the logits. Where no row has a filter, all three are left out.

    One that is left out alone would save nothing, and kernels are compiled anew for whatever is missing.
    """
    params = [sequence.params for sequence in sequences]
    # Rounding a tiny temperature to 0 would mean no noise.
    smallest = torch.finfo(torch.float32).tiny
    temperatures = [_setting(p, "temperature") for p in params]
    top_k = [int(_setting(p, "top_k")) if p.temperature else 0 for p in params]
    top_k = [limit if 0 < limit < vocab_size else 0 for limit in top_k]
    top_p = [_setting(p, "top_p") if p.temperature else 1.0 for p in params]
    min_p = [_setting(p, "min_p") if p.temperature else 0.0 for p in params]
    has_limits = any(top_k) or any(limit != 1 for limit in top_p) or any(min_p)

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor | None:
        return send(values, dtype, device) if has_limits else None

    return (
        _as_fp32([max(value, smallest) if value else 0.0 for value in temperatures], device),
        column(top_k, torch.int32),
        column(top_p, torch.float64),
        column(min_p, torch.float64),
        seed_tensor([sequence.seed for sequence in sequences], device),
        send([len(sequence.output_token_ids) for sequence in sequences], torch.int64, device),
    )


def _logprobs(
    raw: Float[Tensor, "B V"], sequences: Sequence[SequenceState], chosen: list[int]
) -> dict[int, TokenLogprobs]:
    """Return the log-probabilities of the rows whose params ask for them, by row."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
    if not rows:
        return {}
    counts = [min(sequences[row].params.logprobs or 0, raw.shape[-1]) for row in rows]
    values = raw[rows].log_softmax(dim=-1).nan_to_num(nan=LOWEST_LOGPROB, neginf=LOWEST_LOGPROB)
    own_ids = torch.tensor([chosen[row] for row in rows], device=raw.device)
    own = values.gather(-1, own_ids[:, None])[:, 0].tolist()
    best_values, best_ids = (tensor.tolist() for tensor in best_tokens(values, max(counts)))
    return {
        row: TokenLogprobs(chosen[row], own[i], tuple(zip(best_ids[i], best_values[i], strict=True))[:count])
        for i, (row, count) in enumerate(zip(rows, counts, strict=True))
    }
