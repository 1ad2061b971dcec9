"""A conversation: its messages, one answer at a time, and what the memory looked like. No terminal in here."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.errors import UserError
from minipaged.viz.views import ArenaView, PoolView, view_cache

if TYPE_CHECKING:
    from minipaged import SamplingParams
    from minipaged.contiguous.arena import Waste
    from minipaged.llm import LLM

Message = dict[str, str]


@dataclass(frozen=True)
class Memory:
    """What the engine's cache held at one moment of an answer: the picture and the count of wasted slots."""

    view: PoolView | ArenaView
    waste: "Waste"

    def __str__(self) -> str:
        wasted = self.waste.reserved + self.waste.internal + self.waste.external
        if isinstance(self.view, ArenaView):
            reserved = sum(own.num_reserved for own in self.view.ranges)
            return f"{reserved} slots reserved · {wasted} wasted"
        used = self.view.num_blocks - len(self.view.free_ids)
        return f"{used}/{self.view.num_blocks} blocks · {wasted} slots wasted"


@dataclass(frozen=True)
class Answer:
    """What is known about an answer once it has ended.

    ``finish_reason`` is "stop", "length" or "abort"; ``is_context_full`` tells a "length" for want of room from one
    that ``max_tokens`` asked for. ``memory`` is the cache just before the answer's slots were given back, None on a
    rung without a cache. Times are in seconds.
    """

    text: str
    finish_reason: str
    is_context_full: bool
    num_prompt_tokens: int
    num_tokens: int
    time_to_first_token: float | None
    total_time: float
    memory: Memory | None

    def __str__(self) -> str:
        """Return the line that stands under an answer."""
        speed = self.num_tokens / self.total_time if self.total_time > 0 else 0.0
        parts = [f"{self.num_tokens} tokens", f"{speed:.1f} tokens/s"]
        if self.time_to_first_token is not None:
            parts.append(f"first token {self.time_to_first_token:.2f} s")
        parts.append(str(self.memory) if self.memory else "no cache")
        if self.finish_reason == "abort":
            parts.append("stopped")
        return " · ".join(parts)


class ChatSession:
    """Hold a conversation and answer its messages. Every answer prefills the whole conversation.

    Args:
        llm: The loaded model; may be replaced between answers.
        params: How tokens are chosen. ``max_tokens=None`` lets an answer take what is left of the context.
        system: Text of the system message, or None for what the chat template does without one.

    Invariants:
        ``messages`` is always a conversation that can be continued: an optional system message, then user and
        assistant in turn. A message that is refused leaves no trace in it; an answer that is stopped leaves what
        was said so far.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None = None):
        self.llm = llm
        self.params = params
        self.messages: list[Message] = []
        self.memory: Memory | None = None
        self.answer: Answer | None = None
        self._is_stopping = False
        if system is not None:
            self.set_system(system)

    @property
    def system(self) -> str | None:
        """Return the system message, or None."""
        is_set = bool(self.messages) and self.messages[0]["role"] == "system"
        return self.messages[0]["content"] if is_set else None

    def set_system(self, text: str | None) -> None:
        """Set, replace or (None) remove the system message; it holds from the next answer on."""
        turns = self.messages[self.system is not None :]
        self.messages = turns if text is None else [{"role": "system", "content": _clean(text)}, *turns]

    def reset(self) -> None:
        """Forget the conversation; keep the system message."""
        self.messages = self.messages[: self.system is not None]
        self.memory = self.answer = None

    def stop(self) -> None:
        """End the answer after the token that is being computed."""
        self._is_stopping = True

    def respond(self, text: str) -> Iterator[str]:
        """Answer a message; yield one piece of text for every step of the engine, the empty ones too.

        Joined, the pieces are the answer that goes into ``messages``. Closing the iterator stops the answer, and so
        does `stop`.

        Raises:
            UserError: The conversation does not fit into the context any more, or the chat template refuses it. The
                message is then not part of the conversation.
        """
        message = {"role": "user", "content": _clean(text)}
        prompt = self.llm.chat_prompt([*self.messages, message])
        room = self._room(len(prompt))
        wanted = self.params.max_tokens
        params = replace(self.params, max_tokens=room if wanted is None else min(room, wanted))
        self._is_stopping = False
        progress = _Progress(len(prompt))
        try:
            yield from self._run(prompt, params, progress)
        except (GeneratorExit, KeyboardInterrupt):
            self._finish(message, progress, room)
            raise
        self._finish(message, progress, room)

    def look(self) -> Memory | None:
        """Return what the cache holds now; None on a rung without a cache."""
        cache = getattr(self.llm.engine, "cache", None)
        view = view_cache(cache)
        return None if cache is None or view is None else Memory(view, cache.waste())

    def save(self, path: Path, model: str) -> None:
        """Write the conversation: as JSON if the name ends in .json, else as Markdown."""
        if path.suffix.lower() == ".json":
            content: dict[str, Any] = {"model": model, "rung": self.llm.rung, "messages": self.messages}
            text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        else:
            parts = [f"# Conversation with {model}"]
            parts += [f"**{message['role']}**\n\n{message['content']}" for message in self.messages]
            text = "\n\n".join(parts) + "\n"
        try:
            path.expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"the conversation cannot be written to {path}: {error.strerror}") from error

    def _room(self, num_prompt_tokens: int) -> int:
        """Return how many tokens of answer fit behind the prompt, or refuse when there is none."""
        room = self.llm.engine.max_output_tokens(num_prompt_tokens, self.params)
        if room < 1:
            turns = len(self.messages) - (self.system is not None)
            way_out = "/reset begins a new conversation" if turns else "send a shorter message"
            raise UserError(
                f"the context is full: with this message the conversation has {num_prompt_tokens} tokens, and prompt "
                f"and answer together may have {num_prompt_tokens + room}; {way_out}"
            )
        return room

    def _run(self, prompt: list[int], params: "SamplingParams", progress: "_Progress") -> Iterator[str]:
        """Stream the answer and keep count; the engine has dropped the request when this ends, however it ends."""
        chunks = self.llm.stream(prompt, params)
        with self._watch_release():
            try:
                for chunk in chunks:
                    progress.add(chunk.text, len(chunk.token_ids), chunk.finish_reason)
                    yield chunk.text
                    if self._is_stopping:
                        return
            finally:
                chunks.close()  # type: ignore[attr-defined]  (a generator)

    @contextmanager
    def _watch_release(self) -> Iterator[None]:
        """Look at the cache at the last moment: just before the engine takes the answer's slots back."""
        engine = self.llm.engine
        release = engine.release

        def look_and_release(seq: Any) -> None:
            self.memory = self.look()
            release(seq)

        engine.release = look_and_release  # type: ignore[method-assign]
        try:
            yield
        finally:
            del engine.release  # the class's own method shows again

    def _finish(self, message: Message, progress: "_Progress", room: int) -> None:
        text = "".join(progress.pieces)
        self.messages += [message, {"role": "assistant", "content": text}]
        self.answer = Answer(
            text=text,
            finish_reason=progress.finish_reason or "abort",
            is_context_full=progress.finish_reason == "length" and progress.num_tokens >= room,
            num_prompt_tokens=progress.num_prompt_tokens,
            num_tokens=progress.num_tokens,
            time_to_first_token=progress.time_to_first_token,
            total_time=time.perf_counter() - progress.start,
            memory=self.memory,
        )


class _Progress:
    """Count an answer while it comes."""

    def __init__(self, num_prompt_tokens: int):
        self.num_prompt_tokens = num_prompt_tokens
        self.start = time.perf_counter()
        self.pieces: list[str] = []
        self.num_tokens = 0
        self.time_to_first_token: float | None = None
        self.finish_reason: str | None = None

    def add(self, text: str, num_tokens: int, finish_reason: str | None) -> None:
        if self.time_to_first_token is None:
            self.time_to_first_token = time.perf_counter() - self.start
        self.pieces.append(text)
        self.num_tokens += num_tokens
        self.finish_reason = finish_reason


def _clean(text: str) -> str:
    """Replace what is no Unicode text: a terminal or a command line can hand over half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")
