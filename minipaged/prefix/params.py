"""What a request may ask for on this rung: whom it shares its cache with."""

from dataclasses import dataclass

from minipaged.batching.params import SamplingParams as BatchingParams
from minipaged.errors import UserError

MAX_SALT_LENGTH = 256
"""Longest salt, in characters: a name or a random number, not a text."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(BatchingParams):
    """Rung 4's parameters, and a salt.

    Args:
        cache_salt: Only requests with an equal salt find each other's blocks. Without one, a request that comes back
            sooner than it should tells its sender that somebody else has sent the same prefix before. "" and None are
            the salt of everybody who names none.

    Raises:
        UserError: A value is out of range.
    """

    cache_salt: str | None = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_salt is not None and (
            not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_LENGTH
        ):
            raise UserError(f"cache_salt must be text of at most {MAX_SALT_LENGTH} characters")
