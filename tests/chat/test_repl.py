"""Lines that a user types: commands, messages, and Ctrl-C."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minipaged.chat import repl as repl_module
from minipaged.chat.__main__ import make_parser
from minipaged.chat.screen import stop_on_ctrl_c
from tests.chat.fake_llm import FakeLLM, make_repl, make_session, run


def test_an_answer_is_followed_by_one_line_about_it() -> None:
    repl, out = make_repl()
    answer, about = run(repl, out, "one two").splitlines()
    assert answer == "Hello 日本 😀!"
    parts = about.split(" · ")
    assert parts[0] == "6 tokens"
    assert parts[1].endswith(" tokens/s")
    assert parts[2].startswith("first token ")
    assert parts[3:] == ["2/8 blocks", "0 slots wasted"]


def test_a_full_context_is_said_and_reset_helps() -> None:
    repl, out = make_repl(FakeLLM(limit=8))
    assert "The context is full" in run(repl, out, "one two three four")
    assert "/reset" in out.getvalue()
    text = run(repl, out, "more")
    assert text.startswith("the context is full: ")
    assert "/reset begins a new conversation" in text
    run(repl, out, "/reset")
    assert "Hello" in run(repl, out, "more")


def test_max_tokens_is_named_where_it_cuts() -> None:
    repl, out = make_repl(max_tokens=2)
    assert "cut after 2 tokens, as --max-tokens says" in run(repl, out, "Hi")


@pytest.mark.parametrize("line", ["", "   ", "\t"])
def test_an_empty_line_is_no_message(line: str) -> None:
    repl, out = make_repl()
    assert run(repl, out, line) == ""
    assert repl.session.messages == []


def test_an_unknown_command_gets_one_sentence_and_a_space_makes_it_a_message() -> None:
    repl, out = make_repl()
    text = run(repl, out, "/usr/bin is what?")
    assert text.startswith("There is no command /usr/bin;")
    assert text.count("\n") == 1
    assert repl.session.messages == []
    run(repl, out, " /usr/bin is what?")
    assert repl.session.messages[0]["content"] == " /usr/bin is what?"


def test_help_lists_every_command() -> None:
    repl, out = make_repl()
    text = run(repl, out, "/help")
    for name in ("help", "reset", "system", "stats", "fork", "keep", "blocks", "rung", "save", "exit"):
        assert f"  /{name}" in text


def test_only_exit_ends_the_chat() -> None:
    repl, _ = make_repl()
    assert repl.run_line("/help")
    assert repl.run_line("Hi")
    assert not repl.run_line("/exit")


def test_system_shows_sets_and_removes() -> None:
    repl, out = make_repl()
    assert "no system message" in run(repl, out, "/system")
    assert run(repl, out, "/system Speak like a pirate") == "system: Speak like a pirate\n"
    assert "no system message" in run(repl, out, "/system none")


def test_blocks_draws_the_pool_and_the_table_of_the_last_answer() -> None:
    repl, out = make_repl()
    assert "nothing to draw" in run(repl, out, "/blocks")
    run(repl, out, "one two")
    text = run(repl, out, "/blocks")
    assert "just before its slots were given back" in text
    assert "0 BBBB  1 BBBB  2 ...." in text
    assert "block table of B: 8 tokens in 2 blocks, 0 slots empty" in text
    run(repl, out, "/reset")
    assert "nothing to draw" in run(repl, out, "/blocks")


def test_blocks_on_draws_with_every_answer() -> None:
    repl, out = make_repl()
    assert "pool:" not in run(repl, out, "Hi")
    run(repl, out, "/blocks on")
    assert "pool: 8 blocks of 4 slots" in run(repl, out, "/reset") + run(repl, out, "Hi")
    run(repl, out, "/blocks off")
    assert "pool:" not in run(repl, out, "/reset") + run(repl, out, "Hi")
    assert "takes on, off or nothing" in run(repl, out, "/blocks maybe")


def test_stats_shows_the_counters_of_the_engine() -> None:
    repl, out = make_repl()
    run(repl, out, "one two")
    text = run(repl, out, "/stats")
    assert "num_blocks 8, free_blocks 8" in text
    assert "1 turns, 9 of 32 tokens" in text


def test_save_writes_json_and_markdown(tmp_path: Path) -> None:
    repl, out = make_repl()
    run(repl, out, "Grüße")
    run(repl, out, f"/save {tmp_path}/with space.json")
    text = (tmp_path / "with space.json").read_text(encoding="utf-8")
    assert "Grüße" in text
    assert json.loads(text) == {"model": "smollm2", "rung": "paged", "messages": repl.session.messages}
    run(repl, out, f"/save {tmp_path}/talk.md")
    text = (tmp_path / "talk.md").read_text(encoding="utf-8")
    assert "**user**\n\nGrüße\n\n**assistant**\n\nHello 日本 😀!\n" in text


@pytest.mark.parametrize("argument", ["", " /no/such/folder/talk.md"])
def test_save_says_what_it_cannot_do(argument: str) -> None:
    repl, out = make_repl()
    assert run(repl, out, "/save" + argument).count("\n") == 1
    assert repl.run_line("/save" + argument)


@pytest.mark.parametrize(("argument", "named"), [("a\0b.md", "'a\\x00b.md'"), ("~nouser/x", "~nouser/x")])
def test_save_names_a_path_that_cannot_be_one(argument: str, named: str) -> None:
    repl, out = make_repl()
    text = run(repl, out, f"/save {argument}")
    assert f"cannot be written to {named}: " in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("earlier", [[], ["Hi"]])
def test_a_system_message_too_long_for_the_context_is_said_with_what_removes_it(earlier: list[str]) -> None:
    repl, out = make_repl(FakeLLM(["Yes"], limit=13))
    for line in earlier:
        run(repl, out, line)
    run(repl, out, "/system" + " x" * 20)
    text = run(repl, out, "Hi")
    assert "/system none" in text
    assert "/reset" not in text
    assert text.count("\n") == 1
    run(repl, out, "/system none")
    assert "Yes" in run(repl, out, "Hi")


def test_a_failing_engine_does_not_end_the_chat() -> None:
    llm = FakeLLM()
    repl, out = make_repl(llm)

    def fail(number: int) -> None:
        raise RuntimeError("out of memory")

    llm.on_token = fail
    assert "out of memory" in run(repl, out, "Hi")
    llm.on_token = lambda number: None
    assert "Hello" in run(repl, out, "Hi")


def test_rung_lists_the_rungs_and_keeps_the_one_that_works() -> None:
    repl, out = make_repl()
    text = run(repl, out, "/rung")
    assert "* 2 paged       fixed-size blocks from one pool" in text
    assert "  0 foundation  a decoder without a cache\n" in text
    assert "no rung is called 'cellar'" in run(repl, out, "/rung cellar")
    assert isinstance(repl.session.llm, FakeLLM)


def test_ctrl_c_ends_the_answer_and_keeps_the_conversation() -> None:
    llm = FakeLLM()
    llm.on_token = lambda number: os.kill(os.getpid(), signal.SIGINT) if number == 3 else None
    repl, out = make_repl(llm)
    before = signal.getsignal(signal.SIGINT)
    text = run(repl, out, "Hi")
    assert signal.getsignal(signal.SIGINT) is before
    assert text.splitlines()[0] == "Hello "
    assert "stopped" in text.splitlines()[1]
    assert [m["content"] for m in repl.session.messages] == ["Hi", "Hello "]


def test_a_second_ctrl_c_does_not_wait_for_the_token() -> None:
    llm = FakeLLM()

    def interrupt_twice(number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
            interrupt_and_wait()
            pytest.fail("the second Ctrl-C had no effect")

    llm.on_token = interrupt_twice
    repl, out = make_repl(llm)
    assert repl.run_line("Hi")
    assert "stopped" in out.getvalue()
    assert [m["content"] for m in repl.session.messages] == ["Hi", "Hello"]
    assert llm.engine.cache.pool.num_free == 8


def test_ctrl_c_between_answers_is_python_s_own() -> None:
    session = make_session()
    with stop_on_ctrl_c(session):
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupt_and_wait()


def interrupt_and_wait() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


def test_ctrl_c_just_after_an_answer_does_not_end_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Iterator[Any] = iter(["Hi", KeyboardInterrupt(), "/stats", EOFError()])

    def read_line(prompt: str = "") -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    llm = FakeLLM()
    loading: Any = SimpleNamespace(wait=lambda: make_session(llm))
    monkeypatch.setattr(repl_module, "_terminal_reader", lambda loading: None)
    monkeypatch.setattr("builtins.input", read_line)
    repl_module.run(make_parser().parse_args([]), loading, is_at_hand=True)
    shown = capsys.readouterr()
    assert "Ctrl-D leaves." in shown.out.split("Hello 日本 😀!")[1]
    assert "1 turns" in shown.err
