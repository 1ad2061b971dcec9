"""The real chat in a cell: the same session and the same answer as in the terminal, and errors as they are."""

import argparse
import sys
from typing import Any

from minipaged.chat.__main__ import make_parser, show
from minipaged.chat.answers import Memory
from minipaged.chat.loading import begin_session, load_llm
from minipaged.chat.screen import PlainScreen
from minipaged.lessons import kit
from minipaged.llm import LLM
from minipaged.viz import ArenaView, draw_arena_svg, draw_pool_svg, draw_view


class CellScreen(PlainScreen):
    """Writes below a cell: what is said about an answer stands beside it, and drawings are pictures in a notebook."""

    def __init__(self) -> None:
        super().__init__(sys.stdout, sys.stdout)
        self._is_in_line = False

    def write(self, text: str) -> None:
        """Write a piece of an answer."""
        super().write(text)
        if text:
            self._is_in_line = not text.endswith("\n")

    def end_line(self) -> None:
        """End the line of an answer that broke off, so that what is said about it has its own."""
        if self._is_in_line:
            self.write("\n")

    def _draw_view(self, memory: Memory) -> None:
        view = memory.view
        kit.show(draw_view(view), draw_arena_svg(view) if isinstance(view, ArenaView) else draw_pool_svg(view))


def answer(arguments: list[str]) -> None:
    """Run the chat once with these arguments.

    The chat's own ``main`` turns an error into a sentence and an exit code. Here it comes through: it may be the
    reader's own.

    Raises:
        KeyboardInterrupt: The answer was stopped.
    """
    options = make_parser().parse_args(arguments)
    session = begin_session(options, _load)
    screen = CellScreen()
    try:
        code = show(session, screen, options.prompt, options)
    finally:
        screen.end_line()
    if code != 0:
        raise KeyboardInterrupt


def _load(options: argparse.Namespace, rung: str | None) -> LLM:
    llm: Any = load_llm(options, rung, needs_text=False)
    if llm.tokenizer is None:
        print("The model has no tokenizer: the bytes of the question are its token ids, and the answer is not shown.")
        llm.chat_prompt = lambda messages: list(messages[-1]["content"].encode())
    return llm
