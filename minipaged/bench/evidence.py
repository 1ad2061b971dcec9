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

from minipaged.bench.record import current_commit, new_record, progress, write_record
from minipaged.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/gpu_tests.json"), help="where to write")
    parser.add_argument("--commit", help="the checkout's commit, where git is not there to ask")
    parser.add_argument("--marker", default="gpu", help="pytest's -m expression (default: gpu)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="what pytest gets (default: tests)")


def run(options: argparse.Namespace) -> None:
    """Run the tests and write the record.

    Raises:
        UserError: The tests did not run, or some failed; the record of those that ran is written first.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", options.marker, "-q", f"--junitxml={report}", *options.tests]
        progress(" ".join(command[1:]))
        code = subprocess.run(command, check=False).returncode
        if not report.exists():
            raise UserError(f"pytest wrote no report; it ended with code {code}")
        outcomes = read_outcomes(report)
    record = new_record("evidence", {"marker": options.marker, "tests": options.tests})
    record["commit"] = current_commit() or options.commit
    record["gpu"] = record["machine"]["gpu"]
    record["counts"] = dict(Counter(outcomes.values()))
    record["tests"] = outcomes
    write_record(record, options.out)
    print(summary(record))
    if code != 0 or set(outcomes.values()) != {"passed"}:
        raise UserError(f"not all tests passed: {record['counts']}")


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
        >>> summary({"counts": {"passed": 3}, "gpu": "a GPU", "date": "2026-01-01", "commit": "abc"})
        '3 passed on a GPU, 2026-01-01, commit abc'
    """
    counts = ", ".join(f"{count} {outcome}" for outcome, count in record["counts"].items())
    return f"{counts} on {record['gpu']}, {record['date']}, commit {record['commit']}"
