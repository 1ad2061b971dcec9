"""What is known about an answer: its text, how long it took, and what the memory looked like."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minipaged.viz.views import ArenaView, PoolView

if TYPE_CHECKING:
    from minipaged.contiguous.arena import Waste
    from minipaged.sharing.cache import Sharing


@dataclass(frozen=True)
class Memory:
    """What the engine's cache held at one moment of an answer: the picture and the count of wasted slots.

    ``sharing`` says what sharing saved at that moment, and how many blocks had been copied since the answer began;
    None on a rung that shares nothing.
    """

    view: PoolView | ArenaView
    waste: "Waste"
    sharing: "Sharing | None" = None

    def __str__(self) -> str:
        wasted = self.waste.reserved + self.waste.internal + self.waste.external
        if isinstance(self.view, ArenaView):
            reserved = sum(own.num_reserved for own in self.view.ranges)
            return f"{reserved} slots reserved · {wasted} wasted"
        used = self.view.num_blocks - len(self.view.free_ids)
        return f"{used}/{self.view.num_blocks} blocks · {wasted} slots wasted"

    @property
    def seq_ids(self) -> list[int]:
        """Return the sequences in the cache, of a fork in the order of its continuations."""
        return [table.seq_id for table in self.view.tables] if isinstance(self.view, PoolView) else []

    @property
    def sharing_line(self) -> str | None:
        """Return the line that stands under the picture of several sequences; None where there was only one."""
        if self.sharing is None or len(self.seq_ids) < 2:
            return None
        own = self.sharing
        return (
            f"{own.num_blocks_used} blocks in use · {own.num_blocks_without_sharing} without sharing · "
            f"{own.num_blocks_saved} saved · {own.num_copies} {'copy' if own.num_copies == 1 else 'copies'} made"
        )


@dataclass(frozen=True)
class Answer:
    """What is known about an answer once it has ended.

    ``finish_reason`` is "stop", "length" or "abort"; ``is_context_full`` tells a "length" for want of room from one
    that ``max_tokens`` asked for. ``memory`` is the cache just before the answer's slots were given back, None on a
    rung without a cache. ``seed`` makes the answer again, None where the engine drew one. ``num_hit_tokens`` of the
    prompt were found in the cache. Times are in seconds.
    """

    text: str
    finish_reason: str
    is_context_full: bool
    num_prompt_tokens: int
    num_tokens: int
    time_to_first_token: float | None
    total_time: float
    memory: Memory | None
    seed: int | None = None
    num_hit_tokens: int = 0

    def __str__(self) -> str:
        """Return the line that stands under an answer."""
        parts = [_speed(self.num_tokens, self.total_time)]
        if self.time_to_first_token is not None:
            parts.append(f"first token {self.time_to_first_token:.2f} s")
        if self.num_hit_tokens:
            parts.append(f"{self.num_hit_tokens} of {self.num_prompt_tokens} prompt tokens from the cache")
        parts.append(str(self.memory) if self.memory else "no cache")
        if self.finish_reason == "abort":
            parts.append("stopped")
        return " · ".join(parts)


def fork_line(answers: list[Answer], temperature: float, is_chat_temperature: bool) -> str:
    """Return the last line about a fork: tokens of all continuations, speed, and how they were sampled."""
    parts = [_speed(sum(answer.num_tokens for answer in answers), max(answer.total_time for answer in answers))]
    why = "" if is_chat_temperature else f" (at 0, all {len(answers)} would be equal)"
    parts.append(f"temperature {temperature:g}{why}")
    if any(answer.finish_reason == "abort" for answer in answers):
        parts.append("stopped")
    return " · ".join(parts)


def _speed(num_tokens: int, seconds: float) -> str:
    speed = num_tokens / seconds if seconds > 0 else 0.0
    return f"{num_tokens} tokens · {speed:.1f} tokens/s"


class Progress:
    """Counts one answer while it comes."""

    def __init__(self, num_prompt_tokens: int, seed: int | None = None):
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed
        self.start = time.perf_counter()
        self.end: float | None = None
        self.pieces: list[str] = []
        self.num_tokens = 0
        self.time_to_first_token: float | None = None
        self.finish_reason: str | None = None
        self.num_hit_tokens = 0

    def add(self, text: str, num_tokens: int, finish_reason: str | None) -> None:
        """Take a piece of the answer."""
        if self.time_to_first_token is None:
            self.time_to_first_token = time.perf_counter() - self.start
        if finish_reason is not None:
            self.end = time.perf_counter()
        self.pieces.append(text)
        self.num_tokens += num_tokens
        self.finish_reason = finish_reason

    def answer(self, room: int, memory: Memory | None) -> Answer:
        """Return the answer as it is now; one that has not ended has been stopped. ``room`` is in tokens."""
        return Answer(
            text="".join(self.pieces),
            finish_reason=self.finish_reason or "abort",
            is_context_full=self.finish_reason == "length" and self.num_tokens >= room,
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            time_to_first_token=self.time_to_first_token,
            total_time=(self.end or time.perf_counter()) - self.start,
            memory=memory,
            seed=self.seed,
            num_hit_tokens=self.num_hit_tokens,
        )
