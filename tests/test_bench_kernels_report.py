"""What ``bench kernels`` makes of its samples: numbers, table, record, plot; and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from minipaged.bench import kernels
from minipaged.bench.__main__ import main
from minipaged.bench.gpu_timing import Sides, Workbench, new_gpu_record
from minipaged.bench.kernel_case import Case, Score, is_hit, measured, results
from minipaged.bench.kernel_cases_attention import (
    every_batch,
)
from minipaged.bench.kernel_cases_memory import copy, read
from minipaged.bench.kernel_report import draw, report, share_of_target
from tests.bench_cases import BENCH, COPY, HEADS, READ, SMALL, FakeTimer, kernels_options, on_cpu


@pytest.fixture(scope="module")
def record() -> dict:
    """Return a record of the small cases."""
    options = kernels_options()
    return new_gpu_record("kernels", options, {"num_samples": 3}) | kernels.measure(SMALL, BENCH, FakeTimer())


# -- numbers


def entry(name: str, row: str, score: Score, **sides: float) -> dict:
    case = Case(row, name, lambda bench: {}, (score,), num_bytes=4_000_000)
    return measured(case, {side: [us] for side, us in sides.items()})


def test_scores_compare_with_the_copy_and_with_other_sides():
    copied = measured(copy(2_000_000), {"negate": [2.0], "copy": [1.0]})  # 4 MB a microsecond
    ours = entry("write", "writes", Score("% of copy", 90.0), ours=1.25)
    slower = entry("decode", "decode", Score("% over", 2.0, "sdpa"), ours=1.05, sdpa=1.0)
    faster = entry("prefix", "prefix", Score("x", 8.0, "plain"), ours=1.0, plain=9.0)
    found = {result["name"]: result for result in results([copied, ours, slower, faster])}
    assert found["copy"]["value"] == pytest.approx(2.0) and found["copy"]["is_hit"] is None
    assert found["write"]["value"] == pytest.approx(80.0) and found["write"]["is_hit"] is False
    assert found["decode"]["value"] == pytest.approx(5.0) and found["decode"]["is_hit"] is False
    assert found["prefix"]["value"] == pytest.approx(9.0) and found["prefix"]["is_hit"] is True


def test_what_only_reads_is_compared_with_the_read_unless_the_copy_moves_more():
    copied = measured(copy(2_000_000), {"copy": [1.0]})  # 4 MB a microsecond
    ours = entry("product", "products", Score("% of read", 70.0), ours=1.0)
    for us, expected in ((0.5, 50.0), (2.0, 100.0)):
        summed = measured(read(4_000_000), {"sum": [us]})
        assert results([copied, summed, ours])[-1]["value"] == pytest.approx(expected)


@pytest.mark.parametrize(("third", "rise", "sizes"), [(24.0, 10.0, "1 to 2"), (33.0, 25.0, "2 to 3")])
def test_the_largest_rise_between_neighbouring_batch_sizes_is_found(third: float, rise: float, sizes: str):
    times = {"1": [8.0], "2": [17.6], "3": [third], "4": [8.0]}  # per sequence 8, 8.8, then 8 or 11, and 2
    found = results([measured(COPY, {"copy": [1.0]}), measured(every_batch(40, 4, HEADS), times)])[-1]
    assert found["value"] == pytest.approx(rise) and found["against"] == sizes
    assert found["is_hit"] is (rise < 15)


@pytest.mark.parametrize(
    ("unit", "value", "expected"), [("TB/s", 3.9, True), ("TB/s", 3.7, False), ("us", 3.7, True), ("us", 3.9, False)]
)
def test_a_target_is_a_floor_for_rates_and_a_ceiling_for_times(unit: str, value: float, expected: bool):
    assert is_hit(unit, value, 3.8) is expected
    result = {"unit": unit, "value": value, "target": 3.8, "is_hit": expected}
    assert (share_of_target(result) >= 100) is expected


# -- report, record, plot


def test_the_report_has_a_line_per_case_its_peers_targets_and_the_misses(record: dict):
    text = report(record)
    lines = text.splitlines()
    for case in SMALL:
        assert any(line.startswith(f"{case.row:<10}{case.name} ") for line in lines), case.name
    assert "    sdpa" in text and "    plain, own blocks" in text
    paging_line = next(line for line in lines if "paging, blocks of 8" in line)
    assert paging_line.split()[-8:] == ["-33.3", "%", "over", "in", "order", "<=", "10", "yes"]
    assert next(line for line in lines if "causal prefill 20" in line).endswith(" >= 400  NO")
    with_target = [result for result in record["results"] if result["target"] is not None]
    assert f"{sum(result['is_hit'] for result in with_target)} of {len(with_target)} targets met" in text
    assert "missed: causal prefill 20, " in text
    assert max(map(len, lines)) <= 120


def test_a_case_that_fails_is_named_and_the_others_are_measured():
    def fail(_: Workbench) -> Sides:
        raise RuntimeError("no such kernel")

    cases = [COPY, Case("rows", "broken", fail, (Score("us", 1.0),)), SMALL[-1]]
    record = new_gpu_record("kernels", kernels_options(), {"num_samples": 3}) | kernels.measure(
        cases, BENCH, FakeTimer()
    )
    assert [result["name"] for result in record["results"]] == ["copy", SMALL[-1].name, SMALL[-1].name]
    assert "failed: broken: RuntimeError: no such kernel" in report(record)
    with pytest.raises(RuntimeError):
        kernels.measure([Case("copy", "copy", fail, (Score("TB/s"),))], BENCH, FakeTimer())


def test_the_record_keeps_raw_samples_driver_command_and_commit(record: dict):
    again = json.loads(json.dumps(record))
    assert again["cases"][2]["us"] == {
        "ragged": [2.0, 1.0, 3.0],
        "paged": [3.0, 2.0, 4.0],
        "sdpa": [4.0, 3.0, 5.0],
        "sdpa flash": [5.0, 4.0, 6.0],
    }
    assert again["command"].startswith("python -m minipaged.bench")
    assert again["commit"] == "0123456789abcdef" and again["is_clean"] is None
    assert "driver" in again["machine"]


def test_the_plot_is_drawn_from_the_record_alone(record: dict, tmp_path: Path):
    draw(json.loads(json.dumps(record)), tmp_path / "kernels.svg")
    assert "<svg" in (tmp_path / "kernels.svg").read_text()


def test_the_whole_command_writes_samples_table_and_plot(tmp_path: Path, capsys, monkeypatch):
    on_cpu(monkeypatch)
    monkeypatch.setattr(kernels, "CASES", tuple(SMALL))
    assert main(["kernels", "--quick", "--only", "prefix", "--out", str(tmp_path / "k.json"), "--commit", "abc"]) == 0
    record = json.loads((tmp_path / "k.json").read_text())
    assert [case["row"] for case in record["cases"]] == ["copy", "copy", "prefix"]
    assert set(record["settings"]["sdpa_backends"].values()) <= {"FLASH_ATTENTION", "MATH"}
    assert record["commit"] == "abc" and record["seconds"] >= 0
    text = (tmp_path / "k.txt").read_text()
    out, progress = capsys.readouterr()
    assert text in out and "sdpa takes" in text
    assert progress.splitlines() == ["1 of 3: copy", "2 of 3: read", "3 of 3: prefix 32 + 16 x 3"]
    assert "<svg" in (tmp_path / "k.svg").read_text()


def test_the_command_fails_when_a_case_has_failed_but_writes_the_rest(tmp_path: Path, capsys, monkeypatch):
    on_cpu(monkeypatch)
    broken = Case("rows", "broken", lambda _: {"ours": [lambda: 1 / 0]}, (Score("us", 1.0),))
    monkeypatch.setattr(kernels, "CASES", (COPY, READ, broken))
    assert main(["kernels", "--out", str(tmp_path / "k.json")]) == 2
    assert "could not measure broken" in capsys.readouterr().err
    assert "ZeroDivisionError" in (tmp_path / "k.txt").read_text() and (tmp_path / "k.svg").exists()


# -- refusals


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a GPU to be absent")
@pytest.mark.parametrize("name", ["kernels", "step"])
def test_without_a_gpu_the_bench_says_so_in_one_sentence(name: str, tmp_path: Path, capsys):
    assert main([name, "--out", str(tmp_path / "x.json")]) == 2
    assert capsys.readouterr().err == f"bench {name} measures a GPU, and this machine has no CUDA device\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["kernels", "--only", "decoding"], "no operation is called 'decoding'; there is copy, decode"),
        (["kernels", "--out", "kernels.txt"], "must end in .json"),
        (["kernels", "--plot", "kernels.pdf"], "must end in .svg or .png"),
        (["step", "--batches", "0"], "a batch holds at least 1 sequence, not 0"),
        (["step", "--plot", "no/such/folder/step.svg"], "no folder 'no/such/folder'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(arguments: list[str], complaint: str, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1
