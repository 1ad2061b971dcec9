"""The program as a user starts it: options, exit codes, pipes and terminals."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from minipaged import UserError
from minipaged.chat.__main__ import main, make_parser
from minipaged.chat.loading import Loading, load_llm
from tests.chat.fake_llm import run
from tests.chat.tiny_llm import load, make_session, plain_repl
from tests.tiny_models import make_tiny_model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "1.5"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--seed", "-3"], "seed"),
        (["--seed", "x"], "--seed"),
        (["--rung", "cellar"], "cellar"),
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--num-block", "4"], "--num-block"),
        (["--tier", "metal"], "metal"),
        (["--device", "abacus"], "abacus"),
        (["--prompt", " "], "empty"),
    ],
)
def test_wrong_options_get_one_sentence_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = arguments if "--prompt" in arguments else [*arguments, "--prompt", "Hi"]
    try:
        code = main(options)
    except SystemExit as exit:
        code = exit.code
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.count("\n") == 1


def test_a_model_without_a_tokenizer_is_refused_before_the_first_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path)
    capsys.readouterr()  # transformers' progress bar
    assert main(["--model", str(folder), "--prompt", "Hi"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "no tokenizer" in shown.err


def test_a_model_without_a_chat_template_is_refused_before_the_first_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny_model(tmp_path, with_tokenizer=True)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    capsys.readouterr()  # transformers' progress bar
    assert main(["--model", str(folder), "--prompt", "Hi"]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "template" in shown.err


def test_nothing_on_standard_input_is_an_error_not_a_wait(run_python: Any) -> None:
    done = run_python("-m", "minipaged.chat")
    assert done.returncode == 2
    assert done.stderr == "error: there is nothing to answer: the prompt is empty\n"


def test_the_first_prompt_needs_no_torch(run_python: Any) -> None:
    code = (
        "import sys, minipaged.chat.__main__, minipaged.chat.repl, minipaged.chat.loading\n"
        "assert not {'torch', 'transformers', 'prompt_toolkit', 'rich', 'numpy'} & sys.modules.keys()"
    )
    assert run_python("-c", code).returncode == 0


def test_a_piped_prompt_is_answered_once_in_plain_text(smollm2_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minipaged.chat", "--dtype", "float32", "--max-tokens", "8", "--show-blocks"],
        input=b"What is the capital of France? Tell me 3 facts about it.\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0
    assert done.stdout.decode() == "1. The capital of France is Paris\n"
    notes = done.stderr.decode()
    assert "8 tokens" in notes
    assert "pool: 512 blocks of 16 slots" in notes
    assert "\x1b" not in notes


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_end_of_a_piped_line_is_no_part_of_the_question(smollm2_folder: Path, end: bytes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minipaged.chat", "--dtype", "float32", "--max-tokens", "7", "--temperature", "0"],
        input=b"What is the capital of France?" + end,
        capture_output=True,
        timeout=120,
    )
    assert done.stdout.decode().strip() == "The capital of France is Paris."


needs_a_posix_shell = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX shell")


@needs_a_posix_shell
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_is_no_reason_not_to_answer(folder: Path, closed: str) -> None:
    command = '"$0" -m minipaged.chat --model "$1" --device cpu --max-tokens 4 --temperature 0 --prompt Hi '
    done = subprocess.run(
        ["sh", "-c", command + closed, sys.executable, str(folder)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert (done.stdout != "") == (closed == "2>&-")
    assert "Traceback" not in done.stderr
    assert ("tokens/s" in done.stderr) == (closed == ">&-")


@needs_a_posix_shell
def test_ctrl_c_during_the_imports_leaves_without_a_word(folder: Path) -> None:
    # The interrupt comes while torch is looked for, in a callback like those of the import machinery: one out of
    # which Python lets no exception, so that it prints that it ignores it.
    code = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a parent started with "&" ignores Ctrl-C
        "class Interrupt:\n"
        "    def __del__(self): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': Interrupt()\n"
        "sys.meta_path.insert(0, Finder())\n"
        "runpy.run_module('minipaged.chat', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", code, "--model", str(folder), "--device", "cpu", "--prompt", "Hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_is_python_s_own_when_the_answer_begins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def show_answer(*_: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr("minipaged.chat.screen.PlainScreen.show_answer", show_answer)
    assert main(["--model", str(folder), "--device", "cpu", "--prompt", "Hi"]) == 0
    assert [*seen, signal.getsignal(signal.SIGINT)] == [signal.default_int_handler] * 2


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that gives NaN to whoever writes a Z."""
    folder = make_tiny_model(tmp_path_factory.mktemp("broken"), with_tokenizer=True)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("Z")] = float("nan")
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_logits_that_are_nan_end_in_one_sentence(broken_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()  # transformers' progress bar
    assert main(["--model", str(broken_folder), "--device", "cpu", "--prompt", "Z"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: no token can be chosen")
    assert shown.err.count("\n") == 1


def test_logits_that_are_nan_do_not_end_the_conversation(broken_folder: Path) -> None:
    repl, out = plain_repl(make_session(broken_folder, load(broken_folder), max_tokens=2))
    run(repl, out, "Hi")
    before = list(repl.session.messages)
    text = run(repl, out, "Z")
    assert text.startswith("no token can be chosen")
    assert text.count("\n") == 1
    assert repl.session.messages == before
    assert repl.session.llm.stats()["free_blocks"] == 12
    assert "2 tokens" in run(repl, out, "Go on")


def test_the_rung_without_a_cache_takes_no_cache_options_and_the_next_gets_them_back(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(folder), "--device", "cpu", "--num-blocks", "12", "--block-size", "8"]
    repl, out = plain_repl(make_session(folder))
    repl.options = make_parser().parse_args(arguments)
    assert "* 0 foundation" in run(repl, out, "/rung foundation")
    assert "no cache" in run(repl, out, "Hi")
    assert "* 2 paged" in run(repl, out, "/rung paged")
    options = repl.session.llm.engine.options
    assert (options.num_blocks, options.block_size) == (12, 8)  # type: ignore[attr-defined]
    assert main([*arguments, "--rung", "foundation", "--prompt", "Hi"]) == 2
    assert "has no cache, so no num_blocks" in capsys.readouterr().err


STEPS = {"fused": None, "graphs": None, "device_batch": None, "overlap": None, "enforce_eager": False}


@pytest.mark.parametrize(
    ("arguments", "switched"),
    [
        ([], {}),
        (["--no-fused"], {"fused": False}),
        (["--no-graphs", "--no-device-batch"], {"graphs": False, "device_batch": False}),
        (["--no-overlap", "--enforce-eager"], {"overlap": False, "enforce_eager": True}),
    ],
)
def test_steps_of_speed_are_switched_off_by_name(
    folder: Path, arguments: list[str], switched: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[str, Any] = {}
    monkeypatch.setattr("minipaged.llm.LLM", lambda folder, **options: taken.update(options))
    options = ["--model", str(folder), "--device", "cpu", *arguments]
    load_llm(make_parser().parse_args(options), None)
    assert {name: taken[name] for name in STEPS} == STEPS | switched
    monkeypatch.undo()
    assert main([*options, "--prompt", "Hi", "--max-tokens", "2", "--num-blocks", "12"]) == 0


class Terminal:
    """A program under a pseudo-terminal: type to it, wait for what it shows."""

    # Ctrl-C reaches only a program whose controlling terminal it is typed on.
    START = (
        "import fcntl, runpy, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
        "runpy.run_module('minipaged.chat', run_name='__main__', alter_sys=True)"
    )

    def __init__(self, *arguments: str):
        import pty

        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", self.START, *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Read until ``text`` has been shown since the last wait; return what was shown before it."""
        deadline = time.monotonic() + timeout
        while text not in self.shown:
            assert time.monotonic() < deadline, f"no {text!r} in {self.shown[-2000:]!r}"
            self.read()
        before, self.shown = self.shown.split(text, 1)
        return before

    def wait_for_end(self, timeout: float = 60) -> int:
        """Return the program's exit code."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"does not end: {self.shown[-2000:]!r}"
            self.read()
        self.read()
        return self.process.returncode

    def read(self) -> None:
        if select.select([self.master], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # Linux: the other end is closed
                self.shown += os.read(self.master, 65536).decode(errors="replace")


needs_pseudo_terminals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")


@needs_pseudo_terminals
def test_in_a_terminal_an_answer_can_be_stopped_and_the_chat_left(smollm2_folder: Path) -> None:
    with Terminal("--dtype", "float32", "--show-blocks") as chat:
        chat.wait_for(">>>")
        chat.type("Tell me a long story about the sea.\r")
        chat.wait_for("pool: 512 blocks of 16 slots")
        chat.type("typed too early")
        time.sleep(0.5)
        chat.type("\x03")
        assert "typed" not in chat.wait_for("stopped")
        chat.wait_for(">>>")
        chat.type("/stats\r")
        chat.wait_for("1 turns")
        chat.wait_for(">>>")
        chat.type("\x04")
        assert chat.wait_for_end() == 0


@needs_pseudo_terminals
def test_in_a_terminal_a_fork_shows_what_is_shared_and_can_be_stopped(smollm2_folder: Path) -> None:
    with Terminal("--dtype", "float32", "--num-blocks", "24", "--seed", "7") as chat:
        chat.wait_for(">>>")
        chat.type("/fork 3 Tell me a long story about the sea.\r")
        live = chat.wait_for("saved")
        assert "3 block tables" in live
        assert "################" in live
        chat.type("\x03")
        chat.wait_for("-- 0, sequence A")
        chat.wait_for("-- 2, sequence C")
        chat.wait_for("without sharing")
        chat.wait_for("stopped")
        chat.wait_for(">>>")
        chat.type("/keep 2\r")
        chat.wait_for("Continuation 2 is in the conversation.")
        chat.wait_for(">>>")
        chat.type("\x04")
        assert chat.wait_for_end() == 0


@needs_pseudo_terminals
def test_in_a_terminal_the_option_fork_needs_a_prompt() -> None:
    with Terminal("--fork", "3") as chat:
        assert chat.wait_for_end() == 2
        assert "--fork answers once, so it needs --prompt" in chat.shown
        assert "Traceback" not in chat.shown


@needs_pseudo_terminals
def test_in_a_terminal_the_chat_can_be_left_before_the_model_is_there(smollm2_folder: Path) -> None:
    with Terminal() as chat:
        chat.wait_for(">>>")
        chat.type("\x04")
        assert chat.wait_for_end() == 0
        assert "Traceback" not in chat.shown


@needs_pseudo_terminals
def test_in_a_terminal_a_model_that_cannot_be_loaded_ends_the_chat_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bird"}')
    with Terminal("--model", str(tmp_path)) as chat:
        assert chat.wait_for_end() == 2
        assert "error: " in chat.shown
        assert "bird" in chat.shown
        assert "Traceback" not in chat.shown


def test_loading_hands_its_error_to_the_one_who_waits() -> None:
    loading = Loading(make_parser().parse_args(["--model", "/no/such/folder"]))
    loading.start()
    with pytest.raises(UserError, match="/no/such/folder"):
        loading.wait()
