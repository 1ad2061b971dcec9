"""Runs the tests that need a GPU and writes down which ran, on what, and how they ended.

python -m minipaged.bench evidence --out docs/benchmarks/gpu_tests.json --commit "$(git rev-parse HEAD)"
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

from minipaged.bench.record import new_record, progress, write_record
from minipaged.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/gpu_tests.json"), help="where to write")
    parser.add_argument("--commit", help="the commit of these files, where git cannot tell; wins over git's")
    parser.add_argument("--marker", default="gpu", help="pytest's -m expression (default: gpu)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest gets (default: tests)")


def run(options: argparse.Namespace) -> None:
    """Run the tests and write the record.

    A test that skips itself is counted as such and fails nothing: some need the GPU to be absent.

    Raises:
        UserError: The tests did not run, some failed, or none passed; the record of those that ran is written first.
    """
    make_room_for(options.out)
    code, outcomes = run_tests(options.marker, options.tests)
    record = new_record("evidence", {"marker": options.marker, "tests": options.tests})
    if options.commit not in (None, record["commit"]):
        # What git says of the files is about the commit that git knows.
        record |= {"commit": options.commit, "is_clean": None}
    record["gpu"] = record["machine"]["gpu"]
    record["counts"] = dict(Counter(outcomes.values()))
    record["tests"] = outcomes
    write_record(record, options.out)
    print(summary(record))
    if code != 0 or "passed" not in record["counts"] or {"failed", "error"} & record["counts"].keys():
        raise UserError(f"the tests did not all pass or skip themselves: {record['counts'] or 'none ran'}")


def run_tests(marker: str, tests: list[str]) -> tuple[int, dict[str, str]]:
    """Run pytest in a process of its own; return its exit code and how each test ended.

    Raises:
        UserError: There is no report, because pytest could not start or was stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", marker, "-q", f"--junitxml={report}", *tests]
        progress(" ".join(command[1:]))
        code = subprocess.run(command, check=False).returncode
        if not report.exists():
            raise UserError(f"pytest wrote no report; it ended with code {code}")
        return code, read_outcomes(report)


def make_room_for(path: Path) -> None:
    """Make the folders that a result goes into, before the run that it comes from.

    Raises:
        UserError: Something else stands in the way, or the folder may not be made.
    """
    if path.is_dir():
        raise UserError(f"{str(path)!r} is a folder; --out names the file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {str(path.parent)!r} for the result: {error.strerror}") from error


def read_outcomes(report: Path) -> dict[str, str]:
    """Return how each test of a JUnit report ended: passed, failed, error or skipped."""
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        ends = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = next(iter(ends), "passed").replace("failure", "failed")
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return outcomes


def summary(record: dict[str, Any]) -> str:
    """Return one line for people.

    Example:
        >>> counts = {"passed": 3, "skipped": 1}
        >>> summary({"counts": counts, "gpu": "a GPU", "date": "2026-01-01", "commit": "abc", "is_clean": False})
        '3 passed, 1 skipped on a GPU, 2026-01-01, commit abc with changes'
    """
    counts = ", ".join(f"{count} {outcome}" for outcome, count in record["counts"].items())
    changed = " with changes" if record["is_clean"] is False else ""
    return f"{counts} on {record['gpu']}, {record['date']}, commit {record['commit']}{changed}"
