"""What a request may ask for on this rung: its turn."""

from dataclasses import dataclass

from minipaged.errors import UserError
from minipaged.sharing.params import SamplingParams as SharingParams

MAX_PRIORITY = 2**31
"""Largest priority, and smallest when negated; any number would do, this one fits everywhere."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(SharingParams):
    """Rung 3's parameters, and who goes first.

    Args:
        priority: Requests with a lower number enter first and are sent away last; among equals the one that came
            first. None sends another away in order to enter.

    Raises:
        UserError: A value is out of range.
    """

    priority: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise UserError(
                f"priority must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {self.priority!r}"
            )
