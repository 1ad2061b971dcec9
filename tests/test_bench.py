"""The benches: what they draw, count and write, and a whole small run against transformers."""

import json
from pathlib import Path

import pytest

from minipaged.bench import cpu
from minipaged.bench.__main__ import BENCHES, main
from minipaged.bench.cpu import Workload, draw_workload, report, summarize
from minipaged.bench.record import new_record
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def quick_record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the whole CPU bench once on a tiny model and return the JSON it wrote."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    out = folder / "result.json"
    arguments = ["cpu", "--quick", "--threads", "1", "--dtype", "float32", "--model", str(folder)]
    assert main([*arguments, "--out", str(out)]) == 0
    return out


def test_without_arguments_the_benches_are_listed(capsys):
    assert main([]) == 0
    listing = capsys.readouterr().out
    assert all(f"  {name} " in listing for name in BENCHES)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["gpus"], "no bench is called 'gpus'"),
        (["cpu", "--threads", "0"], "--threads must be at least 1"),
        (["cpu", "--runs", "0"], "--runs must be at least 1"),
        (["cpu", "--out", "result.txt"], "must end in .json"),
        (["cpu", "--out", "no/such/folder/result.json"], "no folder 'no/such/folder'"),
        (["cpu", "--model", "no/such/model/here", "--quick"], "no/such/model/here"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_code_2(arguments, complaint, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_a_bad_option_is_refused_in_one_line_with_code_2(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["cpu", "--threads", "two"])
    assert exit_info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_workload_is_the_same_every_time_and_stays_within_its_ranges():
    work = draw_workload(200, (2, 5), (16, 256), vocab_size=50)
    assert work == draw_workload(200, (2, 5), (16, 256), vocab_size=50)
    assert {len(prompt) for prompt in work.prompts} == {2, 3, 4, 5}
    assert all(0 <= token_id < 50 for prompt in work.prompts for token_id in prompt)
    assert 16 <= min(work.output_lengths) < 24
    assert 248 < max(work.output_lengths) <= 256


def test_useful_tokens_leave_out_what_a_padded_batch_generates_behind_short_rows():
    work = Workload([[1], [2], [3]], [2, 4, 10])
    assert work.useful_tokens == 16
    assert work.padded_tokens == 30
    assert work.num_slots == 16  # three of the prompts, and all new tokens but the last of each row


def test_the_summary_is_of_medians_so_that_one_slow_run_does_not_count():
    seconds = {"minipaged": [1.0, 1.0, 60.0], "transformers": [2.0, 2.0, 0.1]}
    assert summarize(Workload([[1]], [8]), seconds) == {"minipaged": 8.0, "transformers": 4.0, "ratio": 2.0}


def test_the_record_says_where_with_what_and_when():
    record = new_record("cpu", {"threads": 2})
    assert record["machine"]["cores"] >= 1
    assert set(record["versions"]) >= {"python", "torch", "transformers", "minipaged"}
    assert record["date"].endswith("+00:00")


def test_a_quick_run_writes_raw_samples_and_a_plot(quick_record: Path):
    record = json.loads(quick_record.read_text())
    assert record["settings"] | {"model": ""} == {
        "model": "",
        "rung": record["settings"]["rung"],
        "dtype": "float32",
        "threads": 1,
        "quick": True,
    }
    for name in ("single", "batch"):
        assert all(len(record[name]["seconds"][side]) == 1 for side in cpu.SIDES)
        assert record[name]["useful_tokens"] == sum(record[name]["output_lengths"])
    assert "<svg" in quick_record.with_suffix(".svg").read_text()


def test_the_weights_are_counted_from_the_checkpoint(quick_record: Path):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(quick_record.parent)
    weights = json.loads(quick_record.read_text())["memory_bytes"]["weights"]
    assert weights == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_the_report_gives_both_ratios(quick_record: Path):
    record = json.loads(quick_record.read_text())
    lines = report(record).splitlines()
    for name in ("one stream", "batch of 4"):
        assert any(line.startswith(name) and line.endswith("x") for line in lines)


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_can_be_asked_for_help(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([name, "--help"])
    assert exit_info.value.code == 0
    assert "--out" in capsys.readouterr().out
