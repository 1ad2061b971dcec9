"""The benches of the steps of ``fast``: which switches a row has, and what is made of a profile."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minipaged.bench import fast, profile, throughput_engines
from minipaged.bench.__main__ import main
from minipaged.bench.profile import Interval, busy_us, summarize
from minipaged.bench.throughput_worker import Event, Job, run_job


@pytest.fixture
def seen_switches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Do jobs in this process, which is quicker, and note the switches of each engine."""
    seen: list[dict[str, Any]] = []

    class Noted(throughput_engines.Minipaged):
        def __init__(self, model: str, **options: Any) -> None:
            seen.append({name: options[name] for name in fast.STEPS if name in options})
            super().__init__(model, **options)

    def run(job: Job) -> list[Event]:
        events: list[Event] = []
        run_job(job, events.append)
        return events

    monkeypatch.setattr(throughput_engines, "Minipaged", Noted)
    monkeypatch.setattr(profile, "Minipaged", Noted)
    monkeypatch.setattr(fast, "run_process", run)
    return seen


def run_bench(name: str, out: Path, *arguments: str) -> dict[str, Any]:
    command = [name, "--quick", "--model", "random", "--device", "cpu", "--dtype", "float32", "--out", str(out)]
    assert main([*command, *arguments]) == 0
    return json.loads(out.read_text())


def test_each_row_has_one_more_step_than_the_one_before(seen_switches, tmp_path: Path, capsys):
    record = run_bench("fast", tmp_path / "a.json", "--repeats", "2")
    assert [sum(switches.values()) for switches in seen_switches] == [0, 1, 2, 3, 4]
    assert fast.STEPS == ("fused", "graphs", "device_batch", "overlap")
    assert all(list(switches) == list(fast.STEPS) for switches in seen_switches), "what is off is switched off"
    for before, after in pairwise(seen_switches):
        assert all(after[step] for step in fast.STEPS if before[step])
    assert [row["steps"] for row in record["rows"]] == ["none", *(f"+ {step}" for step in fast.STEPS)]
    assert all(len(row["samples"]) == len(row["seconds"]) == 2 for row in record["rows"])
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert "+ overlap" in capsys.readouterr().out


def test_the_table_compares_each_step_with_the_one_before_and_with_none():
    rows = [
        {"steps": name, "samples": [rate], "median": rate, "memory_bytes": 2**30}
        for name, rate in (("none", 100.0), ("+ fused", 150.0), ("+ graphs", 600.0))
    ]
    record = {
        "machine": {"gpu": None, "processor": "a CPU", "driver": None},
        "versions": {"torch": "2", "triton": None},
        "commit": None,
        "is_clean": None,
        "date": "2026-12-01",
        "settings": {"model": "random", "repeats": 1},
        "rows": rows,
    }
    lines = [line.split() for line in fast.report(record).splitlines()[-3:]]
    assert [line[-3:-1] for line in lines] == [["1.00", "1.00"], ["1.50", "1.50"], ["4.00", "6.00"]]


def test_a_profile_of_a_tiny_model_sums_up_to_the_time_that_the_device_was_busy(seen_switches, tmp_path: Path, capsys):
    record = run_bench("profile", tmp_path / "a.json", "--steps", "3", "--without", "graphs", "overlap")
    assert seen_switches == [{"graphs": False, "overlap": False}]
    assert record["batch"] == 8 and len(record["step_ms"]) == 3
    assert sum(kernel["us_per_step"] for kernel in record["kernels"]) == pytest.approx(record["busy_us_per_step"])
    assert sum(record["kinds_us_per_step"].values()) == pytest.approx(record["busy_us_per_step"])
    assert 0 < record["idle_percent"]["in_trace"] < 100
    assert record["target"] is None, "a CPU has no target"
    assert "idle: " in capsys.readouterr().out


def test_what_overlaps_is_busy_once():
    kernels = [Interval("a", 0, 10), Interval("b", 2, 4), Interval("c", 8, 12), Interval("d", 20, 21)]
    assert busy_us(reversed(kernels)) == 13


def test_idle_by_the_clock_is_what_the_trace_does_not_fill():
    kernels = [Interval("gemm", 0, 40), Interval("decode_rows_kernel", 50, 100), Interval("gemm", 110, 140)]
    found = summarize(kernels, step_ms=[0.08, 0.08], has_target=True)  # 120 us busy of 160
    assert found["idle_percent"]["by_clock"] == pytest.approx(25)
    assert found["idle_percent"]["in_trace"] == pytest.approx(100 * 20 / 140)
    assert found["kernels"][0] == {"name": "gemm", "kind": "products", "calls_per_step": 1.0, "us_per_step": 35.0}
    assert found["kinds_us_per_step"] == {"products": 35.0, "attention": 25.0}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fast", "--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["profile", "--steps", "0"], "--steps must be at least 1, not 0"),
        (["profile", "--without", "luck"], "no step is called 'luck'; there is fused, graphs, device_batch, overlap"),
        (["profile", "--out", "no/such/folder/a.json"], "there is no folder 'no/such/folder'"),
        (["profile", "--out", "."], ". cannot be written (Is a directory)"),
        (["profile", "--trace", "a.txt"], "its name must end in .json or .json.gz, not 'a.txt'"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, complaint, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_every_kernel_of_the_package_has_a_kind():
    sources = Path(profile.__file__).parents[1].rglob("kernels.py")
    kernels = [
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    ]
    kinds = {name: profile.kind_of(name) for name in kernels}
    assert len(kinds) > 20 and "other" not in kinds.values(), kinds
    assert (kinds["fold_kernel"], kinds["fold_splits_kernel"]) == ("sampling", "attention")
