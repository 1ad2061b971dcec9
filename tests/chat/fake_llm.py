"""A model-free `LLM` with the paged rung's real bookkeeping, and a chat over it."""

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from minipaged import SamplingParams
from minipaged.chat.__main__ import make_parser
from minipaged.chat.repl import Repl
from minipaged.chat.screen import PlainScreen
from minipaged.chat.session import ChatSession
from minipaged.paged.cache import PagedCache

PIECES = ["Hello", " ", "", "日本", " 😀", "!"]


class FakeEngine:
    """Has the real bookkeeping of the paged rung, and no model."""

    def __init__(self, limit: int):
        self.limit = limit
        self.cache = PagedCache(num_blocks=8, block_size=4)
        self.before_release: Callable[[object], None] | None = None

    def max_output_tokens(self, num_prompt_tokens: int, params: object) -> int:
        return min(self.limit, 32) - num_prompt_tokens

    def give_back(self, seq_id: int) -> None:
        if self.before_release is not None:
            self.before_release(seq_id)
        self.cache.free(seq_id)


class FakeLLM:
    """Answers every prompt with the same pieces, a token each; a prompt has a token a word."""

    rung = "paged"
    device = dtype = "none"

    def __init__(self, pieces: list[str] | None = None, limit: int = 32):
        self.pieces = PIECES if pieces is None else pieces
        self.engine = FakeEngine(limit)
        self.max_model_len = limit
        self.prompts: list[list[dict[str, str]]] = []
        self.on_token: Callable[[int], None] = lambda number: None

    def chat_prompt(self, messages: list[dict[str, str]]) -> list[int]:
        self.prompts.append([dict(message) for message in messages])
        return [0] * sum(len(message["content"].split()) + 1 for message in messages)

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[Any]:
        assert params.max_tokens is not None
        seq_id = len(self.prompts)
        self.engine.cache.allocate(seq_id, len(prompt), len(prompt) + params.max_tokens - 1)
        try:
            for number, piece in enumerate(self.pieces[: params.max_tokens], start=1):
                if number > 1:
                    self.engine.cache.append(seq_id)
                self.on_token(number)
                reason = "stop" if number == len(self.pieces) else "length" if number == params.max_tokens else None
                yield SimpleNamespace(result=None, text=piece, token_ids=[number], finish_reason=reason, index=0)
        finally:
            self.engine.give_back(seq_id)

    def stats(self) -> dict[str, int]:
        return {"num_blocks": 8, "free_blocks": self.engine.cache.pool.num_free, "cached_blocks": 0}


def make_session(llm: FakeLLM | None = None, **params: Any) -> ChatSession:
    return ChatSession(llm or FakeLLM(), SamplingParams(**{"max_tokens": None, **params}))  # type: ignore[arg-type]


def make_repl(llm: FakeLLM | None = None, *options: str, **params: Any) -> tuple[Repl, io.StringIO]:
    out = io.StringIO()
    return Repl(make_parser().parse_args(options), make_session(llm, **params), PlainScreen(out, out)), out


def run(repl: Repl, out: io.StringIO, line: str) -> str:
    """Run one line and return what it shows."""
    out.seek(0)
    out.truncate()
    repl.run_line(line)
    return out.getvalue()
