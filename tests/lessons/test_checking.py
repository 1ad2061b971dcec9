"""Lessons are run open and solved, and what goes wrong is found."""

import os
from pathlib import Path

import pytest

from minipaged.lessons import checking
from minipaged.lessons.checking import check, run_lesson
from tests.lessons.tiny_lessons import GOOD, write_lesson


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing look for a model: these lessons need none."""
    monkeypatch.setattr(checking, "lesson_model", lambda: "smollm2")


@pytest.mark.parametrize(
    ("old", "new", "of_open", "of_solved"),
    [
        ("", "", (), ()),
        ("return x + x", "return x", (), ('does not say "right: double"',)),
        ("return x + x", "raise NotYet", (), ('does not say "right: double"', 'still says "not yet: double"')),
        ('print("not yet: double")', "pass", ('does not say "not yet: double"',), ()),
        ("check_double(double)\n", "double(1)\n", ("ends with exit code 1",), ('does not say "right: double"',)),
        ("check_double(double)\n", "check_double(double)\n1 / 0\n", *[("ends with exit code 1",)] * 2),
        ("check_double(double)\n", 'check_double(double)\nprint("not yet: x")\n', (), ('still says "not yet: x"',)),
        ("check_double(double)\n", "while True: pass\n", *[("takes longer than 1 s",)] * 2),
    ],
    ids=["good", "wrong", "open", "silent", "unchecked", "error", "chat", "slow"],
)
def test_what_is_wrong_with_a_lesson_is_said(
    tmp_path: Path, old: str, new: str, of_open: tuple[str, ...], of_solved: tuple[str, ...]
):
    assert old in GOOD
    lesson = write_lesson(tmp_path, source=GOOD.replace(old, new) if old else GOOD)
    limit = 1 if "while" in new else 60
    found = [run_lesson(lesson, is_solved, dict(os.environ), limit).complaints for is_solved in (False, True)]
    assert found == [of_open, of_solved]


def test_a_lesson_whose_solution_cannot_be_read_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lessons = [
        write_lesson(tmp_path),
        write_lesson(tmp_path, "02_broken", GOOD.replace("```python", "```")),
        write_lesson(tmp_path, "03_error", GOOD + "print('so far', 1 / 0)\n"),
    ]
    assert not check(lessons)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:7]] == [
        ["lesson", "run"],
        *([lesson.name, state] for lesson in lessons for state in ("open", "solved")),
    ]
    assert [line.endswith("  ok") for line in lines[1:7]] == [True, True, True, False, False, False]
    assert "must hold one folded solution" in lines[4]
    assert lines.count("ZeroDivisionError: division by zero") == 2
    assert lines[-1].startswith("3 runs ok, 3 failed, ")


def test_lessons_run_in_new_processes_on_one_thread_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    look = "import os\nassert os.environ['OMP_NUM_THREADS'] == '1' and os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
    assert check([write_lesson(tmp_path, source=GOOD + look)])


def test_without_the_default_model_every_lesson_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(checking, "lesson_model", lambda: "random")
    look = "import os\nassert os.environ['MINIPAGED_LESSON_MODEL'] == 'random'\n"
    assert check([write_lesson(tmp_path, source=GOOD + look)])


def test_all_lessons_together_may_take_too_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert check([write_lesson(tmp_path)])
    assert not check([write_lesson(tmp_path)], total_limit=0)
    assert capsys.readouterr().out.endswith("\nall runs together take longer than 0 s\n")
