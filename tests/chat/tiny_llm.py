"""A tiny random model on the highest rung, and chats over it."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minipaged import LLM, SamplingParams
from minipaged.chat.__main__ import make_parser
from minipaged.chat.repl import Repl
from minipaged.chat.screen import PlainScreen
from minipaged.chat.session import ChatSession

TEXT_OF_21_BYTES = "abcdefghijklmnopqrstu"
"""With the template's 19 tokens it makes a prompt of 40."""


def load(folder: Path, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", **{"num_blocks": 12, **options})


def make_session(folder: Path, llm: LLM | None = None, **params: Any) -> ChatSession:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "seed": 42}
    return ChatSession(llm or load(folder), SamplingParams(**{**defaults, **params}))


def forked(folder: Path, n: int = 3, **params: Any) -> ChatSession:
    session = make_session(folder, **params)
    list(session.fork(n, TEXT_OF_21_BYTES))
    return session


def plain_repl(session: ChatSession) -> tuple[Repl, io.StringIO]:
    out = io.StringIO()
    return Repl(make_parser().parse_args([]), session, PlainScreen(out, out)), out


def at_step(llm: LLM, number: int, act: Callable[[], None]) -> None:
    """Have something happen just before a step of the engine."""
    step, count = llm.engine.step, iter(range(1, 1000))

    def counted() -> Any:
        if next(count) == number:
            act()
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
