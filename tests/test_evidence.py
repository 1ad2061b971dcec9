"""The record of a test run says what happened to each test."""

import json
from pathlib import Path
from typing import Any

import pytest

from minipaged.bench import evidence, record
from minipaged.bench.__main__ import main

SAMPLE = """
import pytest

@pytest.fixture
def broken(): 1 / 0

def test_right(): pass
def test_wrong(): assert False
@pytest.mark.skip(reason="needs a GPU to be absent")
def test_left_out(): pass
def test_fixture(broken): pass
"""


def test_every_outcome_is_recorded_and_a_failure_fails_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    tests, out = tmp_path / "test_sample.py", tmp_path / "new" / "folder" / "record.json"
    tests.write_text(SAMPLE)
    code = main(["evidence", "--out", str(out), "--marker", "not gpu", str(tests)])
    written = json.loads(out.read_text())
    assert {name.rsplit("::", 1)[1]: outcome for name, outcome in written["tests"].items()} == {
        "test_right": "passed",
        "test_wrong": "failed",
        "test_left_out": "skipped",
        "test_fixture": "error",
    }
    assert written["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert code == 2 and "the tests did not all pass or skip themselves" in capfd.readouterr().err


def gather(folder: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], *arguments: str, code: int = 0):
    """Run the command with tests that end in the given ways; return its exit code and its record."""
    outcomes = {f"some::test_{i}": end for i, end in enumerate(ends)}
    monkeypatch.setattr(evidence, "run_tests", lambda *_: (code, outcomes))
    monkeypatch.setattr(record, "_git", lambda *arguments: "aaa" if "HEAD" in arguments else "")
    out = folder / "record.json"
    return main(["evidence", "--out", str(out), *arguments]), json.loads(out.read_text())


@pytest.mark.parametrize(
    ("ends", "pytest_code", "expected"),
    [
        (["passed", "skipped"], 0, 0),
        (["passed", "failed"], 1, 2),
        (["passed", "error"], 0, 2),
        (["passed"], 3, 2),  # pytest itself broke off
        (["skipped", "skipped"], 0, 2),
        ([], 5, 2),
    ],
)
def test_only_a_failure_or_a_run_in_which_nothing_passed_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str], pytest_code: int, expected: int
):
    code, written = gather(tmp_path, monkeypatch, ends, code=pytest_code)
    assert code == expected
    assert written["counts"] == {end: ends.count(end) for end in ends}


@pytest.mark.parametrize(
    ("arguments", "commit", "is_clean"),
    [([], "aaa", True), (["--commit", "aaa"], "aaa", True), (["--commit", "bbb"], "bbb", None)],
)
def test_the_commit_of_the_command_line_wins_and_nothing_is_said_of_files_git_did_not_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], commit: str, is_clean: bool | None
):
    _, written = gather(tmp_path, monkeypatch, ["passed"], *arguments)
    assert (written["commit"], written["is_clean"]) == (commit, is_clean)


@pytest.mark.parametrize(
    ("status", "is_clean"), [("", True), (" M README.md", False), ("?? new.py", False), (None, None)]
)
def test_a_record_says_whether_the_checkout_is_its_commit(
    monkeypatch: pytest.MonkeyPatch, status: str | None, is_clean: bool | None
):
    asked: list[tuple[str, ...]] = []

    def git(*arguments: str) -> str | None:
        asked.append(arguments)
        return None if status is None else "aaa" if "HEAD" in arguments else status

    monkeypatch.setattr(record, "_git", git)
    written: dict[str, Any] = record.new_record("some", {})
    assert (written["commit"], written["is_clean"]) == (None if status is None else "aaa", is_clean)
    assert ("status", "--porcelain") in asked, "a status that leaves out untracked files would miss new ones"


def test_a_result_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(evidence, "run_tests", lambda *_: pytest.fail("the tests ran first"))
    (tmp_path / "file").write_text("")
    for out, complaint in ((tmp_path / "file" / "record.json", "cannot make the folder"), (tmp_path, "is a folder")):
        assert main(["evidence", "--out", str(out)]) == 2
        assert complaint in capsys.readouterr().err
