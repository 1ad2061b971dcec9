"""The throughput bench: its requests, its processes, what is refused, and what it makes of samples."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minipaged.bench import throughput, throughput_engines
from minipaged.bench.__main__ import main
from minipaged.bench.random_model import save_random_model
from minipaged.bench.throughput import samples_of
from minipaged.bench.throughput_report import PEERS, TARGETS, report, target_of
from minipaged.bench.throughput_worker import Event, Job, run_job, run_process
from minipaged.bench.throughput_workloads import (
    FULL,
    QUICK,
    TITLES,
    draw_batch,
    draw_requests,
    num_blocks_for,
    shortened,
    wrapped,
)
from minipaged.bench.workload import Request
from minipaged.errors import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of the smallest model."""
    folder = tmp_path_factory.mktemp("random")
    save_random_model(folder, 4096)
    return str(folder)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Do jobs in this process, which is quicker, and return the list that will hold them."""
    jobs: list[Job] = []

    def run(job: Job, environment: Any = None) -> list[Event]:
        events: list[Event] = []
        run_job(job, lambda event: events.append({**event, "at": float(len(events) + 1)}))
        jobs.append(job)
        return events

    monkeypatch.setattr(throughput, "run_process", run)
    return jobs


def run_bench(out: Path, *arguments: str) -> dict[str, Any]:
    command = ["throughput", "--quick", "--model", "random", "--device", "cpu", "--out", str(out), *arguments]
    assert main(command) == 0
    return json.loads(out.read_text())


# -- the requests


def test_the_batch_is_that_of_nano_vllm():
    requests = draw_requests("batch", FULL, 0)
    assert len(requests) == 256
    assert sum(len(each.prompt) for each in requests) == 142_827
    assert sum(each.output_length for each in requests) == 133_966
    assert {0 <= token <= 10_000 for each in requests for token in each.prompt} == {True}
    lengths = [len(each.prompt) for each in requests] + [each.output_length for each in requests]
    assert min(lengths) >= 100 and max(lengths) <= 1024


def test_one_sequence_has_127_tokens_in_and_146_out_and_a_start_ends_with_the_first():
    (single,), (start,) = draw_requests("single", FULL, 0), draw_requests("start", FULL, 0)
    assert (len(single.prompt), single.output_length) == (127, 146)
    assert (start.prompt, start.output_length) == (single.prompt, 1)


def test_64_requests_share_2048_tokens_and_have_128_of_their_own():
    requests = draw_requests("shared", FULL, 0)
    assert {(len(each.prompt), each.output_length) for each in requests} == {(2048 + 128, 128)}
    assert len({tuple(each.prompt[:2048]) for each in requests}) == 1
    assert len({tuple(each.prompt[2048:2064]) for each in requests}) == len(requests) == 64


@pytest.mark.parametrize("workload", TITLES)
def test_every_run_has_the_same_lengths_and_other_tokens(workload: str):
    runs = [draw_requests(workload, QUICK, run) for run in (-1, 0, 1)]
    for first, second in pairwise(runs):
        for a, b in zip(first, second, strict=True):
            assert (len(a.prompt), a.output_length) == (len(b.prompt), b.output_length)
            assert all(x != y for x, y in zip(a.prompt, b.prompt, strict=True))


def test_a_short_vocabulary_wraps_ids_around_and_a_long_one_changes_nothing():
    requests = [Request([1, 64, 130], 4)]
    assert wrapped(requests, 64) == [Request([1, 0, 2], 4)]
    assert wrapped(requests, 151_936) is requests


def test_a_short_warm_up_cuts_outputs_only():
    requests = [Request([1, 2], 4), Request([3], 20)]
    assert [each.output_length for each in shortened(requests, 8)] == [4, 8]
    assert shortened(requests, None) is requests


def test_the_pool_of_a_comparison_holds_all_requests_at_once():
    requests = draw_batch(20, (100, 1024))
    assert num_blocks_for(requests) * 16 >= sum(len(each.prompt) + each.output_length for each in requests)


# -- the processes


def test_a_fresh_process_reports_when_its_first_token_came(model: str, capfd):
    job = Job("minipaged", model, ["start"], is_quick=True, device="cpu", dtype="float32")
    events = run_process(job, {"TRITON_CACHE_DIR": "unused"})
    assert [event["event"] for event in events] == ["imported", "loaded", "sample", "memory"]
    times = [event["at"] for event in events]
    assert times == sorted(times)
    assert samples_of("start", [events[2]]) == [times[2]]
    assert times[2] > times[1] > times[0] > 0.1, "an import of torch takes longer"
    assert capfd.readouterr().out == ""


def test_what_a_process_refuses_is_refused_here_with_its_own_words(model: str):
    with pytest.raises(UserError, match="dtype float16 is not supported on the CPU"):
        run_process(Job("minipaged", model, ["single"], is_quick=True, device="cpu", dtype="float16"))


def test_a_process_that_dies_is_reported_by_its_code(monkeypatch: pytest.MonkeyPatch, model: str, capfd):
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(UserError, match="the process of engine minipaged ended with code 1"):
        run_process(Job("minipaged", model, ["single"]))


def test_start_is_measured_with_empty_caches_of_compiled_kernels(monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(throughput, "run_process", lambda job, environment: seen.append(dict(environment)) or [])
    for is_cold in (True, False):
        throughput.run_job_process(Job("minipaged", "random", ["start"]), is_cold)
    assert "TRITON_CACHE_DIR" in seen[0] and len(set(seen[0].values())) == len(seen[0])
    assert not any(Path(folder).exists() for folder in seen[0].values()), "they go with the process"
    assert seen[1] == {}


def test_both_sides_of_a_comparison_take_turns_and_each_goes_first(model: str):
    events: list[Event] = []
    variants = {name: {**side, "num_blocks": 64} for name, side in throughput.SIDES.items()}
    job = Job("minipaged", model, ["shared"], variants, is_alternating=True, runs=2, is_quick=True, device="cpu")
    run_job(job, events.append)
    order = [(event["run"], event["variant"]) for event in events if event["event"] == "sample"]
    assert order == [(-1, "on"), (-1, "off"), (0, "off"), (0, "on"), (1, "on"), (1, "off")]
    hits = {event["variant"]: event["hit_tokens"] for event in events if event["event"] == "sample"}
    assert hits == {"off": 0, "on": 3 * QUICK.num_shared}, "the first of four computes what the others find"


def test_an_engine_that_stops_early_is_refused():
    class Lazy:
        def generate(self, requests: list[Request]) -> list[int]:
            return [1 for _ in requests]

    with pytest.raises(UserError, match="returned 1 tokens in place of 5"):
        throughput_engines.time_run(Lazy(), [Request([1], 5)])  # type: ignore[arg-type]


# -- the whole


def test_a_quick_run_measures_every_workload_and_writes_raw_samples_and_a_plot(in_this_process, tmp_path: Path, capsys):
    record = run_bench(tmp_path / "a.json", "--repeats", "2", "--commit", "abc", "--dtype", "float32")
    assert [row["workload"] for row in record["rows"]] == list(TITLES)
    assert [len(row["samples"]) for row in record["rows"]] == [2, 2, 1, 2, 2]
    assert all(row["target"] is None for row in record["rows"]), "a quick run meets nothing and misses nothing"
    by_name = {row["workload"]: row for row in record["rows"]}
    assert by_name["batch"]["hit_tokens"] == by_name["no-hits"]["hit_tokens"] == 0
    assert by_name["shared"]["hit_tokens"] == 2 * 3 * QUICK.num_shared
    assert record["commit"] == "abc" and record["command"].startswith("python -m minipaged.bench")
    assert {"date", "machine", "versions", "settings", "processes"} <= record.keys()
    assert "<svg" in (tmp_path / "a.svg").read_text()
    table = capsys.readouterr().out
    assert all(title in table for title in TITLES.values())
    assert [job.workloads for job in in_this_process] == [["start"], ["batch", "single"], ["shared", "no-hits"]]


def test_workloads_can_be_chosen(in_this_process, tmp_path: Path):
    record = run_bench(tmp_path / "a.json", "--workload", "single")
    assert [row["workload"] for row in record["rows"]] == ["single"]
    assert [job.workloads for job in in_this_process] == [["single"]]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--engine", "vllm"], "--engine vllm needs the package vllm, which is not installed here"),
        (["--engine", "nano-vllm"], "--engine nano-vllm needs the package nanovllm, which is not installed here"),
        (["--engine", "sglang"], "no engine is called 'sglang'; there is minipaged, transformers, vllm, nano-vllm"),
        (["--engine", "transformers", "--workload", "shared"], "compares minipaged with itself"),
        (["--workload", "many"], "no workload is called 'many'; there is batch, single, start, shared, no-hits"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--model", "gpt-random"], "no model with random weights is called 'gpt-random'"),
        (["--out", "result.txt"], "must end in .json"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_runs(arguments, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(throughput_engines.importlib.util, "find_spec", lambda name: name in ("minipaged",) or None)
    monkeypatch.setattr(throughput, "run_process", lambda *_: pytest.fail("a process was started"))
    monkeypatch.chdir(tmp_path)
    assert main(["throughput", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_an_engine_is_refused_a_model_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(throughput_engines.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(throughput_engines.torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"runs Qwen3ForCausalLM only, and llama-3\.1-8b-random is a LlamaForCausalLM"):
        throughput_engines.check_engine("nano-vllm", "llama-3.1-8b-random")
    throughput_engines.check_engine("nano-vllm", "qwen3-0.6b-random")


def test_transformers_serves_the_same_requests(model: str):
    engine = throughput_engines.load_engine("transformers", model, "cpu", "float32")
    requests = [Request([1, 2, 3], 4), Request([5], 2)]
    assert engine.generate(requests) == [4, 2]
    engine._stack.close()  # type: ignore[attr-defined]


def test_a_checkpoint_for_engines_that_read_files_can_be_loaded_by_them(model: str, tmp_path: Path):
    import transformers

    throughput_engines.save_checkpoint(Path(model), tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.hidden_size == 16
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 0
    assert isinstance(tokenizer.decode([0, 5000]), str), "ids that it does not know are no error"


# -- the report


@pytest.mark.parametrize(
    ("workload", "median", "is_met", "is_stretch_met"),
    [
        ("batch", 26_000.0, True, False),
        ("batch", 24_999.0, False, False),
        ("single", 0.7, True, True),
        ("single", 1.3, False, False),
        ("shared", 3.2, True, False),
        ("no-hits", -0.2, True, True),
    ],
)
def test_a_target_is_met_from_the_right_side(workload: str, median: float, is_met: bool, is_stretch_met: bool):
    found = target_of(workload, "qwen3-0.6b-random", "minipaged", False, median)
    assert (found["is_met"], found["is_stretch_met"]) == (is_met, is_stretch_met)


def test_other_engines_and_quick_runs_have_no_targets():
    assert target_of("batch", "qwen3-0.6b-random", "vllm", False, 1.0)["target"] is None
    assert target_of("batch", "qwen3-0.6b-random", "minipaged", True, 1.0)["target"] is None
    assert {model for _, model in TARGETS} == {peer["model"] for peer in PEERS}


def make_row(**changes: Any) -> dict[str, Any]:
    row = {"workload": "batch", "engine": "minipaged", "unit": "tokens/s", "samples": [26_000.0], "median": 26_000.0}
    row |= {"memory_bytes": 100 * 2**30, "pool_bytes": 90 * 2**30, "hit_tokens": 0}
    return row | target_of("batch", "qwen3-0.6b-random", "minipaged", False, 26_000.0) | changes


def make_record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"gpu": "NVIDIA H200", "driver": "580"},
        "versions": {"torch": "2.11", "triton": "3.6"},
        "commit": "abc",
        "is_clean": None,
        "date": "2026-12-01",
        "settings": {"model": "qwen3-0.6b-random", "repeats": 3},
        "peers": [peer for peer in PEERS if peer["model"] == "qwen3-0.6b-random"],
        "rows": rows,
    }


def test_the_table_shows_memory_the_pools_share_targets_and_the_peers_with_version_and_date():
    lines = report(make_record([make_row()])).splitlines()
    own = next(line for line in lines if "minipaged" in line)
    assert "26,000 tokens/s" in own and "100.0" in own and "90 %" in own
    assert own.endswith("25,000 met, 28,000 MISSED")
    quoted = next(line for line in lines if line.strip().startswith("vLLM 0.26.0 *"))
    assert "22,788" in quoted and "22,054 to 22,864" in quoted
    assert any("* not of this run: 2026-11-29, one H200" in line for line in lines)
    assert not any("103" in line for line in lines), "a peer's start belongs to a workload that was not run"


def test_a_run_that_found_its_prompts_cached_says_so():
    assert "minipaged, batch: 96 prompt tokens were found cached" in report(make_record([make_row(hit_tokens=96)]))
    assert "found cached" not in report(make_record([make_row()]))
