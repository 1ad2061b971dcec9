"""The command line of the lessons."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minipaged.lessons import checking, kit
from minipaged.lessons.__main__ import main
from minipaged.lessons.reading import PROJECT
from tests.lessons.tiny_lessons import GOOD, write_lesson


def one_sentence(captured: Any) -> str:
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_without_arguments_lessons_are_listed_with_how_to_open_them(tmp_path: Path, capsys: Any):
    write_lesson(tmp_path)
    write_lesson(tmp_path, "02a_more", GOOD.replace("# 01  Doubling", "# 02a  More: of the same"))
    for arguments in ([], ["--help"]):
        assert main(arguments, tmp_path) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == ["01   Doubling", "02a  More: of the same", ""]
        assert lines[3].startswith("python -m minipaged.lessons 00")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["07"], "no lesson is called '07'; the lessons are 01"),
        (["open"], "no lesson is called 'open'"),
        (["--fast"], "no lesson is called '--fast'"),
        (["check", "1"], "no lesson is called '1'"),
        (["build", "x"], "no lesson is called 'x'"),
        (["01", "01"], "one lesson is opened at a time"),
    ],
)
def test_bad_arguments_get_one_sentence(tmp_path: Path, capsys: Any, arguments: list[str], words: str):
    write_lesson(tmp_path)
    assert main(arguments, tmp_path) == 2
    assert words in one_sentence(capsys.readouterr())


@pytest.mark.parametrize("arguments", [[], ["01"], ["check"], ["build", "01"]])
def test_outside_a_checkout_one_sentence_says_what_to_do(tmp_path: Path, capsys: Any, arguments: list[str]):
    assert main(arguments, tmp_path / "lessons") == 2
    assert "run this in a checkout" in one_sentence(capsys.readouterr())


def test_a_lesson_opens_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lesson = write_lesson(tmp_path)
    lesson.notebook.touch()
    started: list[Any] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    monkeypatch.setattr(subprocess, "call", started.append)  # on Windows
    main(["01"], tmp_path)
    root = f"--ServerApp.root_dir={tmp_path.parent}"
    assert started == [[sys.executable, "-m", "jupyterlab", root, str(lesson.notebook)]]


def test_what_is_missing_for_opening_is_said_in_one_sentence(tmp_path: Path, monkeypatch: Any, capsys: Any):
    write_lesson(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["01"], tmp_path) == 2
    assert 'pip install -e ".[lessons]"' in one_sentence(capsys.readouterr())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert main(["01"], tmp_path) == 2
    assert "python -m minipaged.lessons build 01" in one_sentence(capsys.readouterr())


def test_check_fails_when_a_lesson_does(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr(checking, "lesson_model", lambda: "smollm2")
    write_lesson(tmp_path)
    write_lesson(tmp_path, "02_error", GOOD + "1 / 0\n")
    assert main(["check", "01"], tmp_path) == 0
    assert main(["check"], tmp_path) == 1
    assert "ends with exit code 1" in capsys.readouterr().out


def test_build_writes_the_notebooks_of_the_default_model(tmp_path: Path, monkeypatch: Any, capsys: Any):
    lesson = write_lesson(tmp_path)
    monkeypatch.setattr(kit, "lesson_model", lambda: "random")
    assert main(["build"], tmp_path) == 2
    assert "built with the default model" in one_sentence(capsys.readouterr())
    monkeypatch.setattr(kit, "lesson_model", lambda: "smollm2")
    assert main(["build", "01"], tmp_path) == 0
    assert capsys.readouterr().out == f"written: {lesson.notebook}\n"
    assert "not yet: double" in lesson.notebook.read_text(encoding="utf-8")


def test_without_jupytext_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.setitem(sys.modules, "jupytext", None)
    monkeypatch.setattr(checking, "lesson_model", lambda: "smollm2")
    write_lesson(tmp_path)
    assert main(["check"], tmp_path) == 1
    assert 'pip install -e ".[lessons]"' in capsys.readouterr().out


def test_ci_runs_every_lesson():
    script = (PROJECT / ".ci" / "run").read_text(encoding="utf-8")
    assert "\npython -m minipaged.lessons check\n" in script
