"""The figures of docs/fast.md are those of the committed records."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "fast.md").read_text(encoding="utf-8")


def record(name: str) -> Any:
    return json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())


def cells(first: str) -> list[str]:
    """Return the cells of the one row of a table that begins so."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {first}")]
    assert len(rows) == 1, f"{len(rows)} rows begin with {first!r}"
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


def number(text: str) -> float:
    found = re.match(r"-?[\d,]*\.?\d+", text)
    assert found, f"{text!r} begins with no number"
    return float(found[0].replace(",", ""))


def test_each_steps_worth_is_that_of_the_record():
    rows = record("fast")["rows"]
    assert [row["steps"] for row in rows] == ["none", "+ fused", "+ graphs", "+ device_batch", "+ overlap"]
    for before, row in zip([None, *rows], rows, strict=False):
        _, speed, ratio = cells(f"{row['steps']} |")
        assert number(speed) == round(row["median"])
        assert ratio == (f"{row['median'] / before['median']:.2f}" if before else "")


@pytest.mark.parametrize(
    ("first", "name", "workload", "digits"),
    [
        ("many sequences, 0.6B", "throughput", "batch", 0),
        ("many sequences, 8B", "throughput_8b", "batch", 0),
        ("one sequence", "throughput", "single", 2),
        ("the same, 8B", "throughput_8b", "single", 2),
        ("process start", "throughput", "start", 1),
        ("64 requests", "throughput", "shared", 2),
        ("prefix cache on", "throughput", "no-hits", 1),
    ],
)
def test_each_workload_and_its_target_are_those_of_the_record(first: str, name: str, workload: str, digits: int):
    row = next(each for each in record(name)["rows"] if each["workload"] == workload and each["engine"] == "minipaged")
    _, own, _, _, target, stretch = cells(first)
    assert number(own) == round(row["median"], digits)
    assert (number(target), number(stretch)) == (row["target"], row["stretch"])
    verdicts = {True: "met", False: "missed"}
    assert (target.split()[-1], stretch.split()[-1]) == (verdicts[row["is_met"]], verdicts[row["is_stretch_met"]])


def test_the_peers_are_those_of_the_record():
    for peer in record("throughput")["peers"] + record("throughput_8b")["peers"]:
        column = {"vLLM": 2, "nano-vllm": 3}.get(peer["engine"].split()[0])
        first = {
            ("batch", "qwen3-0.6b-random"): "many sequences, 0.6B",
            ("batch", "llama-3.1-8b-random"): "many sequences, 8B",
            ("single", "qwen3-0.6b-random"): "one sequence",
            ("single", "llama-3.1-8b-random"): "the same, 8B",
            ("start", "qwen3-0.6b-random"): "process start",
        }.get((peer["workload"], peer["model"]))
        if column and first:
            median = statistics.median_low(peer["samples"])
            assert number(cells(first)[column]) == round(median, 2)


def test_the_idle_share_is_that_of_the_record():
    idle = record("profile")["idle_percent"]
    own = cells("GPU idle")[1]
    assert number(own) == round(idle["in_trace"], 1) and idle["by_clock"] <= 0 and "none by the clock" in own
