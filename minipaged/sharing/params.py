"""What a request may ask for on this rung: several samples, the best of several, or beams."""

from dataclasses import dataclass
from typing import Literal

from minipaged.errors import UserError
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams

MAX_SAMPLES = 256
"""Most sequences of one request."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(FoundationParams):
    """Rung 0's parameters, and how many continuations of one prompt to make.

    Args:
        n: Continuations to return.
        best_of: Samples to make, of which the ``n`` with the best mean log-probability a token are returned; None
            makes ``n``.
        beam_width: Search with that many beams in the place of sampling and return the ``n`` best; None samples.
            Beams are chosen by log-probability after the penalties; temperature, filters and seed do not apply.
        length_penalty: A beam's score is its summed log-probability over ``tokens ** length_penalty``: above 0
            favours long answers.
        early_stopping: When beam search ends: True as soon as ``beam_width`` beams have ended; False when no living
            beam is likely to do better; "never" when none can do better at all.

    Raises:
        UserError: A value is out of range, or two exclude each other. Beams are compared by their tokens alone and
            known only at the end, so they go with neither stop strings nor logprobs.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n", "best_of", "beam_width"):
            value = getattr(self, name)
            if value is None and name != "n":
                continue
            if type(value) is not int or not 1 <= value <= MAX_SAMPLES:
                raise UserError(f"{name} must be a whole number from 1 to {MAX_SAMPLES}, not {value!r}")
        self._check_beams()
        most, name = (self.beam_width, "beam_width") if self.beam_width is not None else (self.best_of, "best_of")
        if most is not None and most < self.n:
            raise UserError(f"{name} must be at least n, which is {self.n}, not {most}")

    def _check_beams(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise UserError(f"early_stopping must be True, False or 'never', not {self.early_stopping!r}")
        # Within these bounds a power of any length stays a finite number.
        if type(self.length_penalty) not in (int, float) or not -20 <= self.length_penalty <= 20:
            raise UserError(f"length_penalty must be a number from -20 to 20, not {self.length_penalty!r}")
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise UserError(f"{name} belongs to beam search, so it needs a beam_width")
            return
        for name, is_set in (
            ("best_of", self.best_of is not None),
            ("stop", self.stop),
            ("logprobs", self.logprobs is not None),
        ):
            if is_set:
                raise UserError(f"{name} and beam_width exclude each other")

    @property
    def num_sequences(self) -> int:
        """Return how many sequences the request runs at once."""
        return self.beam_width or self.best_of or self.n
