"""A conversation: its messages, one answer at a time or several at once. No terminal in here."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minipaged.chat.answers import Answer, Memory, Progress
from minipaged.errors import UserError
from minipaged.viz.views import view_cache

if TYPE_CHECKING:
    from minipaged import SamplingParams
    from minipaged.llm import LLM, Chunk

Message = dict[str, str]

FORK_TEMPERATURE = 0.8
"""Temperature of a fork in a chat whose own is 0, where all continuations would be equal."""


class ChatSession:
    """Hold a conversation and answer its messages, once or several times. Every answer prefills the whole conversation.

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
        self.answer: Answer | None = None  # the one in ``messages``
        self.answers: list[Answer] = []  # and all of the last request, several after a fork
        self.last_params = params
        self._copies_before = 0
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
        self.answers = []

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
        for pieces in self._answer(self._with_message(text), self.params):
            yield pieces[0]

    def fork(self, n: int, text: str | None = None) -> Iterator[list[str]]:
        """Answer a message ``n`` times over one prompt; yield for every step a piece of each continuation.

        Without ``text`` the last message is answered anew. Continuation 0 goes into ``messages``; `keep` puts
        another in its place. All of them are in ``answers``, each with the seed that makes it again.

        Raises:
            UserError: As `respond`; the rung makes one answer at a time; there is nothing to answer anew; or the
                pool leaves so many continuations no room. The conversation is then as it was.
        """
        check_fork(n, self.llm.rung)
        if text is None and not any(message["role"] == "user" for message in self.messages):
            raise UserError(f"there is no message yet to answer anew; /fork {n} TEXT sends one")
        turns = self.messages[:-1] if text is None else self._with_message(text)  # the last one is an answer
        yield from self._answer(turns, self._fork_params(n))

    def keep(self, index: int) -> None:
        """Put another continuation of the last fork into the conversation; possible until the next answer."""
        if len(self.answers) < 2:
            raise UserError("there is nothing to choose from: the last answer was no /fork")
        if not 0 <= index < len(self.answers):
            raise UserError(f"/keep takes a continuation from 0 to {len(self.answers) - 1}, not {index}")
        self.answer = self.answers[index]
        self.messages[-1] = {"role": "assistant", "content": self.answer.text}

    @property
    def has_chat_temperature(self) -> bool:
        """Return whether the last request ran at the chat's own temperature."""
        return self._temperature == self.last_params.temperature

    @property
    def room_line(self) -> str:
        """Return why the last fork had room for no more tokens."""
        limit, num_tokens = self.llm.max_model_len, self.last_params.max_tokens
        if self.answers[0].num_prompt_tokens + (num_tokens or 0) == limit:
            return f"The context of {limit} tokens is full; /reset begins a new conversation."
        num_blocks = self.llm.num_blocks
        return f"The pool of {num_blocks} blocks has room for {num_tokens} tokens of each; --num-blocks can be more."

    def look(self) -> Memory | None:
        """Return what the cache holds now; None on a rung without a cache."""
        cache: Any = getattr(self.llm.engine, "cache", None)
        view = view_cache(cache)
        if view is None:
            return None
        if not hasattr(cache, "sharing"):
            return Memory(view, cache.waste())
        sharing = cache.sharing()
        copies = sharing.num_copies - self._copies_before
        return Memory(view, cache.waste(), replace(sharing, num_copies=copies))

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
        except (OSError, ValueError, RuntimeError) as error:  # a NUL in the name; ~ of a user that does not exist
            name = str(path) if str(path).isprintable() else repr(str(path))
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"the conversation cannot be written to {name}: {reason}") from error

    def _with_message(self, text: str) -> list[Message]:
        return [*self.messages, {"role": "user", "content": _clean(text)}]

    def _fork_params(self, n: int) -> "SamplingParams":
        """Return the chat's parameters for n continuations that differ and can be repeated."""
        from minipaged.foundation.philox import draw_seed

        seed = draw_seed() if self.params.seed is None else self.params.seed
        return replace(self.params, n=n, temperature=self._temperature or FORK_TEMPERATURE, seed=seed)

    @property
    def _temperature(self) -> float:
        """Return the chat's temperature, which may be the model's own."""
        return self.params.resolve(self.llm.engine.options.generation_config).temperature or 0.0

    def _answer(self, turns: list[Message], params: "SamplingParams") -> Iterator[list[str]]:
        """Answer a conversation that ends with a message; yield for every step a piece of each continuation."""
        prompt = self.llm.chat_prompt(turns)
        room = self._room(len(prompt), turns, params)
        wanted = params.max_tokens
        params = replace(params, max_tokens=room if wanted is None else min(room, wanted))
        self._is_stopping = False
        progresses = [Progress(len(prompt), seed) for seed in _seeds(params)]
        try:
            yield from self._run(prompt, params, progresses)
        except (GeneratorExit, KeyboardInterrupt):
            self._finish(turns, params, progresses, room)
            raise
        self._finish(turns, params, progresses, room)

    def _room(self, num_prompt_tokens: int, turns: list[Message], params: "SamplingParams") -> int:
        """Return how many tokens of answer fit behind the prompt, or refuse when there is none."""
        engine = self.llm.engine
        room = engine.max_output_tokens(num_prompt_tokens, params)
        if room < 1:
            raise UserError(
                f"the context is full: with this message the conversation has {num_prompt_tokens} tokens, and prompt "
                f"and answer together may have {num_prompt_tokens + room}; {self._way_out(turns, params)}"
            )
        alone = engine.max_output_tokens(num_prompt_tokens, replace(params, n=1))
        if room < 2 <= min(alone, params.max_tokens or alone):
            raise UserError(
                f"the pool is too small for {params.n} continuations: behind {num_prompt_tokens} tokens, its "
                f"{self.llm.num_blocks} blocks of {self.llm.block_size} slots have room for 1 token of "
                f"each and for {alone} of one alone; ask for fewer, or start with more --num-blocks"
            )
        return room

    def _way_out(self, turns: list[Message], params: "SamplingParams") -> str:
        """Return what helps when a conversation does not fit: /reset does not if the system message is too long."""

        def fits(messages: list[Message]) -> bool:
            return self.llm.engine.max_output_tokens(len(self.llm.chat_prompt(messages)), params) >= 1

        message = turns[-1]
        if self.system is not None and fits([message]) and not fits([turns[0], message]):
            return "the system message leaves no room, and /system none removes it"
        has_history = len(self.messages) > (self.system is not None)
        return "/reset begins a new conversation" if has_history else "send a shorter message"

    def _run(self, prompt: list[int], params: "SamplingParams", progresses: list[Progress]) -> Iterator[list[str]]:
        """Stream the answer and keep count; the engine has dropped the request when this ends, however it ends."""
        self.memory = None
        self._copies_before = getattr(getattr(self.llm.engine, "cache", None), "num_copies", 0)
        chunks = self.llm.stream(prompt, params)
        with self._watch_release():
            try:
                for step in _steps(chunks, len(progresses)):
                    pieces = [""] * len(progresses)
                    for chunk in step:
                        progresses[chunk.index].add(chunk.text, len(chunk.token_ids), chunk.finish_reason)
                        if chunk.result is not None:  # a rung without a prefix cache counts no hits
                            hits = getattr(chunk.result.metrics, "num_hit_tokens", 0)
                            progresses[chunk.index].num_hit_tokens = hits
                        pieces[chunk.index] += chunk.text
                    yield pieces
                    if self._is_stopping:
                        return
            finally:
                chunks.close()  # type: ignore[attr-defined]  (a generator)

    @contextmanager
    def _watch_release(self) -> Iterator[None]:
        """Look at the cache at the last moment when all is in it: just before the engine takes any slots back."""
        engine = self.llm.engine

        def look(seq: object) -> None:
            engine.before_release = None  # once: when the next continuation ends, this one is gone
            self.memory = self.look()

        engine.before_release = look
        try:
            yield
        finally:
            engine.before_release = None

    def _finish(self, turns: list[Message], params: "SamplingParams", progresses: list[Progress], room: int) -> None:
        self.answers = [progress.answer(room, self.memory) for progress in progresses]
        self.answer = self.answers[0]
        self.last_params = params
        self.messages = [*turns, {"role": "assistant", "content": self.answer.text}]


def check_fork(n: int, rung: str) -> None:
    """Refuse a number of continuations, or a rung that makes one answer at a time."""
    from minipaged.llm import RUNGS
    from minipaged.sharing.params import MAX_SAMPLES

    if not 2 <= n <= MAX_SAMPLES:
        raise UserError(f"a fork has 2 to {MAX_SAMPLES} continuations, not {n}")
    if RUNGS.index(rung) < RUNGS.index("sharing"):
        raise UserError(f"rung {rung!r} makes one answer at a time; rung 'sharing' can fork")


def _seeds(params: "SamplingParams") -> list[int | None]:
    """Return the seed of each continuation."""
    from minipaged.foundation.philox import child_seed

    return [None if params.seed is None else child_seed(params.seed, index) for index in range(params.n)]


def _steps(chunks: Iterable["Chunk"], n: int) -> Iterator[list["Chunk"]]:
    """Gather what the continuations get in one step: they come in order, so the last that runs completes it."""
    running = set(range(n))
    step: list[Chunk] = []
    for chunk in chunks:
        step.append(chunk)
        is_complete = chunk.index == max(running)
        if chunk.finish_reason is not None:
            running.remove(chunk.index)
        if is_complete or not running:
            yield step
            step = []


def _clean(text: str) -> str:
    """Replace what is no Unicode text: a terminal or a command line can hand over half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")
