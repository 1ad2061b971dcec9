"""The ladder bench: its workload, what it counts, what each row may know, and that blocks hold what they promise."""

import json
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, use
from minipaged.bench.__main__ import main
from minipaged.bench.ladder_rows import KINDS, ROWS, Row, run_row
from minipaged.bench.random_model import save_random_model
from minipaged.bench.workload import MEAN_OUTPUT, MEAN_PROMPT, Request, draw_lengths, draw_requests
from minipaged.errors import UserError
from minipaged.llm import RUNGS

STATIC_ROWS = [row for row in ROWS if row.is_static and row.rung != "foundation"]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the random model, for sequences of up to 2,048 tokens."""
    folder = tmp_path_factory.mktemp("random")
    save_random_model(folder, 2048)
    return folder


@pytest.fixture(scope="module")
def quick_record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all rows once, quickly, and return the JSON that was written."""
    out = tmp_path_factory.mktemp("ladder") / "result.json"
    assert (
        main(["ladder", "--quick", "--model", "random", "--json", str(out), "--plot", str(out.parent / "a.png")]) == 0
    )
    return out


def run_one(folder: Path, row: Row, requests: list[Request], num_slots: int, limit: int, **options: Any):
    """Run one row on the CPU in blocks of 16 slots."""
    cache = {"num_blocks": num_slots // 16, "block_size": 16}
    llm = LLM(folder, rung=row.rung, device="cpu", dtype="float32", max_model_len=limit, **cache, **row.options)
    return run_row(llm, row, requests, **options)


def row_named(name: str) -> Row:
    return next(row for row in ROWS if name in row.names[1:])


# -- the workload


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("num_requests", [64, 256])
def test_lengths_have_the_means_of_sharegpt_and_stay_within_the_limit(num_requests: int, seed: int):
    lengths = draw_lengths(num_requests, seed=seed)
    prompts, outputs = zip(*lengths, strict=True)
    assert sum(prompts) / num_requests == pytest.approx(MEAN_PROMPT, rel=0.02)
    assert sum(outputs) / num_requests == pytest.approx(MEAN_OUTPUT, rel=0.02)
    assert max(map(sum, lengths)) <= 2048
    assert min(prompts) >= 1 and min(outputs) >= 1


def test_lengths_are_spread_like_a_lognormal_not_like_a_bell():
    outputs = sorted(output for _, output in draw_lengths(1000))
    assert outputs[500] < 0.8 * MEAN_OUTPUT, "half of all answers are shorter than the mean by far"
    assert outputs[-1] > 5 * MEAN_OUTPUT


def test_a_seed_makes_the_same_requests_again():
    assert draw_requests(20, 64, seed=3) == draw_requests(20, 64, seed=3)
    assert draw_requests(20, 64, seed=3) != draw_requests(20, 64, seed=4)
    assert all(0 <= token_id < 64 for request in draw_requests(20, 64) for token_id in request.prompt)


def test_a_lower_limit_scales_all_lengths_down():
    prompts, outputs = zip(*draw_lengths(256, longest=256), strict=True)
    assert sum(prompts) / 256 == pytest.approx(MEAN_PROMPT / 8, rel=0.05)
    assert sum(outputs) / 256 == pytest.approx(MEAN_OUTPUT / 8, rel=0.05)


# -- what is counted


def test_the_counts_of_a_small_batch_are_those_of_a_count_by_hand(random_model: Path):
    requests = [Request([1] * 4, 2), Request([1] * 4, 3), Request([1] * 4, 5)]
    result = run_one(random_model, row_named("contiguous:max"), requests, num_slots=32, limit=16)
    # Two ranges of 16; the third request waits. Step 1 leaves 4 + 4 tokens, step 2 ends the first sequence and leaves
    # 5 tokens of the second, step 3 ends that.
    assert (result["steps"], result["requests_ended"], result["generated_tokens"]) == (3, 2, 5)
    assert (result["held_mean"], result["held_peak"]) == (1.0, 2)
    in_slots = {kind: round(share * 32 * 3) for kind, share in result["slots"].items()}
    assert in_slots == {"token_states": 13, "reserved": 2 + 3 + 2, "internal": 10 + 9 + 9, "external": 0, "free": 48}
    assert result["wasted_slots_per_sequence"] == pytest.approx(35 / 3)
    assert result["wasted_share_of_used_slots"] == pytest.approx(35 / 48)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[1])
def test_only_a_policy_that_may_know_lengths_is_told_them(row: Row, random_model: Path, monkeypatch):
    limits: list[int | None] = []
    engine_class = type(
        LLM(random_model, rung=row.rung, device="cpu", **({} if row.rung == "foundation" else {"num_blocks": 4})).engine
    )
    add_request = engine_class.add_request

    def spy(self: Any, prompt: list[int], params: Any) -> int:
        limits.append(params.max_tokens)
        return add_request(self, prompt, params)

    monkeypatch.setattr(engine_class, "add_request", spy)
    requests = [Request([1] * 3, 4 + i % 3) for i in range(12)]
    if row.rung == "foundation":
        run_row(LLM(random_model, rung="foundation", device="cpu"), row, requests)
    else:
        run_one(random_model, row, requests, num_slots=64, limit=16)
    known = [request.output_length for request in requests]
    assert limits[1:] == (known if row.knows_lengths else [None] * 12)
    assert row.knows_lengths == ("pow2" in row.cache or "oracle" in row.cache)


@pytest.mark.parametrize("row", STATIC_ROWS, ids=lambda row: row.names[1])
def test_a_static_row_runs_one_batch_which_is_as_large_as_its_promises_allow(row: Row, random_model: Path):
    requests = [Request([1] * 8, 8) for _ in range(50)]  # 16 tokens each
    result = run_one(random_model, row, requests, num_slots=512, limit=64)
    expected = 512 // 16 if row.knows_lengths else 512 // 64
    assert result["held_peak"] == result["requests_ended"] == expected
    assert result["steps"] == 8
    assert result["generated_tokens"] == 8 * expected


def test_a_cache_that_ends_a_request_early_is_refused(random_model: Path):
    # The largest power of two in 48 slots is 32.
    requests = [Request([1] * 20, 16)] * 3
    with pytest.raises(UserError, match="ended a request before its length"):
        run_one(random_model, row_named("contiguous:max"), requests, num_slots=48, limit=40)


# -- the command


def test_a_quick_run_covers_every_row_and_accounts_for_every_slot(quick_record: Path):
    record = json.loads(quick_record.read_text())
    assert [(row["rung"], row["cache"]) for row in record["rows"]] == [(row.rung, row.cache) for row in ROWS]
    assert {row["rung"] for row in record["rows"]} == set(RUNGS)
    for row in record["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["generated_tokens"] / row["seconds"])
        assert 0 < row["held_mean"] <= row["held_peak"]
        if row["rung"] == "foundation":
            assert "slots" not in row and row["num_requests"] == row["requests_ended"] == 4
            continue
        assert tuple(row["slots"]) == KINDS and sum(row["slots"].values()) == pytest.approx(1)
        if "paged" in row["cache"]:
            assert row["slots"]["reserved"] == row["slots"]["external"] == 0
        if row["cache"] == "contiguous oracle":
            assert row["slots"]["internal"] == 0
        if row["cache"] == "contiguous max":
            assert row["held_peak"] == 1024 // 128 and row["slots"]["internal"] > 0
    assert len(record["workload"]["output_lengths"]) == record["settings"]["num_requests"]
    assert record["commit"] and record["machine"]["cores"]
    assert (quick_record.parent / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_a_line_for_each_chosen_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [
        "--quick",
        "--model",
        "random",
        "--rungs",
        "contiguous:oracle",
        "paged",
        "--out",
        str(tmp_path / "a.json"),
    ]
    assert main(["ladder", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split()[:2] for line in lines[lines.index("") + 3 :]]
    assert table[: table.index([])] == [["contiguous", "contiguous"], ["paged", "paged"]]
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_the_same_record_gives_the_same_plot(quick_record: Path, tmp_path: Path):
    from minipaged.bench.ladder_report import draw

    plots = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for plot in plots:
        draw(json.loads(quick_record.read_text()), plot)
    assert plots[0].read_bytes() == plots[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--rungs", "orca"], "no row is called 'orca'"),
        (["--num-slots", "1000"], "--num-slots must be a multiple of the block size, 16"),
        (["--num-slots", "1024"], "no less than the longest sequence, 2048"),
        (["--num-requests", "0"], "--num-requests must be at least 1"),
        (["--block-size", "-1"], "--block-size must be at least 1"),
        (["--plot", "ladder.pdf"], "must end in .svg or .png"),
        (["--plot", "no/such/folder/a.svg"], "no folder 'no/such/folder'"),
        (["--json", "ladder.txt"], "must end in .json"),
    ],
)
def test_bad_input_is_refused_before_anything_is_loaded(arguments: list[str], complaint: str, capsys):
    assert main(["ladder", "--model", "no/such/model", *arguments]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


# -- what the ladder is for


def test_blocks_hold_four_times_the_sequences_of_max_and_twice_those_of_oracle(random_model: Path):
    requests = draw_requests(192, 64)
    results = []
    with use(ragged_paged_attention=lambda q, *_, **__: q):  # what is counted does not depend on what is said
        for name in ("batching:max", "batching:oracle", "batching:paged"):
            results.append(run_one(random_model, row_named(name), requests, 16_384, 2048, max_steps=1500))
    most, oracle, paged = results
    assert paged["steps"] > 1000, "all enter at once; only later is there a mix of short and long sequences"
    assert most["held_mean"] == pytest.approx(8, abs=0.1), "16,384 slots are eight times 2,048"
    assert paged["held_mean"] >= 4 * most["held_mean"]
    assert paged["held_mean"] >= 2 * oracle["held_mean"]
    assert 7 < paged["wasted_slots_per_sequence"] < 8, "on average half a block of 16 is empty"
    assert paged["wasted_share_of_used_slots"] < 0.04
    assert paged["slots"]["token_states"] > 0.9
    assert paged["preemptions"] > 0 and most["preemptions"] == 0


@pytest.mark.parametrize("name", ["batching:max", "batching:paged"])
def test_a_row_ends_when_nobody_waits_or_its_steps_are_over(name: str, random_model: Path):
    requests = [Request([1] * 8, 8) for _ in range(100)]
    whole = run_one(random_model, row_named(name), requests, num_slots=512, limit=64)
    assert 0 < 100 - whole["requests_ended"] <= whole["held_peak"], "the last ones run, nobody waits"
    short = run_one(random_model, row_named(name), requests, num_slots=512, limit=64, max_steps=5)
    assert short["steps"] == 5 < whole["steps"] and short["requests_ended"] == 0


@pytest.mark.parametrize("name", ["batching:max", "batching:paged"])
def test_requests_that_do_not_fill_the_cache_are_refused(name: str, random_model: Path):
    with pytest.raises(UserError, match="2 requests are too few for batching"):
        run_one(random_model, row_named(name), [Request([1] * 8, 8)] * 2, num_slots=512, limit=64)
