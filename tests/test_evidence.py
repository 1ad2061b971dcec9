"""The record of a test run says what happened to each test."""

import json
from pathlib import Path

import pytest

from minipaged.bench.__main__ import main


def test_every_outcome_is_recorded_and_a_failure_fails_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    tests = tmp_path / "test_sample.py"
    tests.write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "@pytest.mark.skip\n"
        "def test_left_out(): pass\n"
    )
    out = tmp_path / "record.json"
    code = main(["evidence", "--out", str(out), "--marker", "not gpu", "--commit", "abc", str(tests)])
    record = json.loads(out.read_text())
    outcomes = {name.rsplit("::", 1)[1]: outcome for name, outcome in record["tests"].items()}
    assert outcomes["test_right"] == "passed" and outcomes["test_wrong"] == "failed"
    assert outcomes["test_left_out"] in ("skipped", "failed")  # in CI a skip is a failure
    assert sum(record["counts"].values()) == 3 and record["commit"]
    assert code == 2
    assert "not all tests passed" in capfd.readouterr().err
