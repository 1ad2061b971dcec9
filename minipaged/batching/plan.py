"""What a step does, what came of it, and what is told about it."""

from dataclasses import dataclass, field
from typing import Literal

from minipaged.batching.group import Group, Member

Act = Literal["wait", "admit", "chunk", "decode", "copy", "preempt", "swap", "resume", "finish"]


@dataclass(frozen=True, slots=True)
class Event:
    """One act of the scheduler, for a listener.

    Args:
        step: Counts calls of ``schedule`` from 1.
        act: What happened. "chunk" and "decode" compute tokens, "copy" and "swap" move blocks.
        request_id: Of which request.
        seq_id: Of which sequence, where it is about one.
        num_tokens: Tokens computed, where it is about tokens.
        reason: Why a request waits, was sent away or ended; which blocks move.
    """

    step: int
    act: Act
    request_id: int
    seq_id: int | None = None
    num_tokens: int = 0
    reason: str = ""


@dataclass(slots=True)
class Chunk:
    """Tokens ``start`` to ``stop - 1`` of one sequence, which the step runs through the model.

    ``slots`` says where their keys and values go. ``is_sampled`` is set if the last of them is the sequence's newest
    token: its logits choose the next one.
    """

    group: Group
    member: Member
    start: int
    stop: int
    slots: list[int]
    is_sampled: bool

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens."""
        return self.member.token_ids[self.start : self.stop]


@dataclass(frozen=True)
class Swap:
    """Blocks of one request that move between the pool and the swap space, in the order of ``pairs``.

    ``pairs`` are (place in the request's swap space, block id).
    """

    request_id: int
    pairs: list[tuple[int, int]]


@dataclass
class Plan:
    """One step: first ``swaps_out``, then ``swaps_in``, then ``copies``, then one forward pass over ``chunks``.

    The order matters: a block that is swapped out may be the target of any of the others. ``num_tokens`` are computed
    in all.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swaps_out: list[Swap] = field(default_factory=list)
    swaps_in: list[Swap] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        """Let the forward pass compute one chunk more."""
        self.chunks.append(chunk)
        self.num_tokens += chunk.stop - chunk.start


def chunk_size(num_missing: int, num_left: int) -> int:
    """Return how many of a sequence's missing tokens to compute when the step has ``num_left`` tokens left.

    As many as there are; but no single token stays behind for the next step if that can be helped. A row of one
    token is computed as a decode row, in another order, and its last bits may differ.

    Example:
        >>> [chunk_size(40, left) for left in (64, 39, 32, 0)]
        [40, 38, 32, 0]
    """
    size = min(num_missing, num_left)
    return size - 1 if size == num_missing - 1 and size > 2 else size


@dataclass(frozen=True, slots=True)
class NextToken:
    """The token that a step gave a sequence.

    Args:
        seq_id: The sequence. It may be new.
        token_id: Its token.
        parent_id: The sampled sequence that a new one forks from; None where the sequence was sampled itself.
        is_last: The sequence ends with it.
    """

    seq_id: int
    token_id: int
    parent_id: int | None = None
    is_last: bool = False
