"""What a terminal is shown."""

import io

import pytest

from minipaged.chat.answers import Memory
from minipaged.chat.loading import Progress
from minipaged.chat.screen import TerminalScreen
from minipaged.paged.cache import PagedCache
from minipaged.viz import PoolView, TableView
from tests.chat.fake_llm import FakeLLM, make_session


def make_terminal(height: int = 24) -> tuple[TerminalScreen, io.StringIO]:
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=height, color_system="truecolor", soft_wrap=True)
    return TerminalScreen(console), out


def test_a_terminal_gets_dim_lines_and_no_control_characters_of_the_model() -> None:
    screen, out = make_terminal()
    screen.show_answer(make_session(FakeLLM(["a\x1b[2Jb", "\x07\r", "\tc\nd"])), "Hi")
    answer, about = out.getvalue().split("\x1b[2m", maxsplit=1)
    assert answer == "a[2Jb\tc\nd\n"
    assert "tokens/s" in about


def test_a_terminal_shows_the_pool_live_and_keeps_the_last_picture() -> None:
    screen, out = make_terminal()
    llm = FakeLLM(["first line\nsecond", " [bold]part[/bold]", "\n", "third"])
    screen.show_answer(make_session(llm), "Hi", has_picture=True)
    text = out.getvalue()
    for num_tokens in (2, 3, 4, 5):  # 2 of the prompt, and one more with each step
        assert f"block table of B: {num_tokens} tokens" in text
    for line in ("first line\n", "second [bold]part[/bold]\n", "third\n"):
        assert line in text
    after_live = text.split("\x1b[?25h")[1]  # the cursor comes back
    assert "\x1b[2Kthird\npool: 8 blocks of 4 slots" in after_live


@pytest.mark.parametrize("height", [5, 24, 60])
def test_the_live_picture_fits_the_terminal(height: int) -> None:
    screen, _ = make_terminal(height)
    session = make_session()
    session.memory = None
    table = TableView(0, tuple(range(0, 1000, 2)), 8000)
    memory = Memory(PoolView(1000, 16, (table,), frozenset(range(1, 1000, 2))), PagedCache(1, 1).waste())
    assert len(screen._drawing(memory).lines) <= max(12, height - 5)


def test_progress_is_one_changing_line_on_a_terminal_and_one_line_a_stage_in_a_log() -> None:
    terminal, log = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    for out in (terminal, log):
        with Progress(out) as progress:
            for line in ("downloading", "converting the weights: 10 %", "converting the weights: 60 %", "ready"):
                progress(line)
    assert log.getvalue() == "downloading\nconverting the weights\nready\n"
    assert terminal.getvalue().count("\r\x1b[K") == 5
    assert "\n" not in terminal.getvalue()
