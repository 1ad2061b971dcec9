"""The timer of the GPU benches on a GPU that is not there, and the decode step on the CPU."""

import json
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from minipaged.bench import gpu_timing, step, step_model
from minipaged.bench.__main__ import main
from minipaged.bench.gpu_timing import MANY_SIDES, NUM_SAMPLES_QUICK, GraphTimer, new_gpu_record
from minipaged.bench.step_model import DecodeStep, StepModel
from tests.bench_cases import BENCH, TINY, FakeTimer, kernels_options, on_cpu

# -- the timer


class FakeGpu:
    """Stands for ``torch.cuda``: keeps a record of what is asked of it, and a clock that only calls move."""

    def __init__(self) -> None:
        self.now_us, self.log = 0.0, []

    def Stream(self) -> str:
        return "side"

    def synchronize(self) -> None:
        pass

    @contextmanager
    def stream(self, stream: str):
        self.log.append(f"warm up on {stream}")
        yield

    @contextmanager
    def graph(self, graph: "FakeGraph", stream: str):
        self.log.append(f"capture on {stream}")
        before = self.now_us
        yield
        graph.us, self.now_us = self.now_us - before, before  # while it is captured, nothing runs

    def CUDAGraph(self) -> "FakeGraph":
        return FakeGraph(self)

    def Event(self, enable_timing: bool) -> "FakeEvent":
        return FakeEvent(self)


class FakeGraph:
    """Takes as long as what was captured."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.us = gpu, 0.0

    def replay(self) -> None:
        self.gpu.now_us += self.us


class FakeEvent:
    """Remembers when it was recorded."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = self.gpu.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "FakeEvent") -> float:
        return (end.at - self.at) / 1000


def test_the_timer_fills_its_graphs_in_rounds_over_all_sets_and_divides_by_the_calls(monkeypatch):
    gpu = FakeGpu()
    zeros = torch.zeros
    monkeypatch.setattr(gpu_timing.torch, "cuda", gpu)
    monkeypatch.setattr(gpu_timing.torch, "zeros", lambda *_, **__: zeros(1))
    calls: dict[str, int] = {}

    def call(name: str, us: float) -> None:
        calls[name] = calls.get(name, 0) + 1
        gpu.now_us += us

    sides = {"ours": [partial(call, "a", 10.0), partial(call, "b", 30.0)], "slow": [partial(call, "c", 5000.0)]}
    samples = GraphTimer(num_samples=4, span_us=400.0)(sides)
    assert samples == {"ours": [20.0] * 4, "slow": [5000.0] * 4}
    assert calls == {"a": 1 + 1 + 10, "b": 1 + 1 + 10, "c": 1 + 1}  # warm, then a round, then as many as fit
    assert gpu.log == [*("warm up on side", "capture on side", "capture on side"), "warm up on side", "capture on side"]
    many = {str(side): [partial(call, "d", 300.0)] for side in range(MANY_SIDES + 1)}
    assert {len(found) for found in GraphTimer(num_samples=30, span_us=400.0)(many).values()} == {NUM_SAMPLES_QUICK}


# -- the step


def test_the_whole_step_and_its_parts_run_and_are_set_against_what_must_be_read(tmp_path: Path):
    measured = step.measure(BENCH, FakeTimer(), TINY, {1: [20], 3: [5, 20, 35]})
    record = new_gpu_record("step", kernels_options(), {"num_samples": 3}) | measured
    single, triple = record["batches"]
    assert list(single["us"]) == ["whole", *step.COLOURS, step.OPTIONAL, *step.WITHOUT]
    parts = [triple["median_ms"][part] for part in step.COLOURS]
    assert triple["median_ms"]["sum of parts"] == pytest.approx(sum(parts)) == pytest.approx((3 + 4 + 5 + 6) / 1000)
    copy_rate = measured["copy"]["bytes"] / 2.0
    assert triple["bound_ms"]["attention"] == pytest.approx(2 * 4 * 60 * 2 * 8 / copy_rate / 1000)
    text = step.report(record)
    assert "batch 1, mean 20" in text and "<= 1    yes" in text and "sum of these parts" in text
    step.draw(json.loads(json.dumps(record)), tmp_path / "step.svg")
    assert "<svg" in (tmp_path / "step.svg").read_text()


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_the_parts_do_together_what_the_whole_does(batch: int, monkeypatch):
    decode_step = DecodeStep(StepModel(BENCH, TINY, num_blocks=batch), [5] * batch)
    counted: Counter[tuple] = Counter()

    def count(name: str, op: Callable) -> Callable:
        def counting(*args: object, **options: object) -> object:
            sizes = [tuple(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            counted[name, *sizes, options.get("residual") is not None] += 1
            return op(*args, **options)

        return counting

    for name in ("ragged_paged_attention", "skinny_linear", "norm_rotate_write", "rms_norm", "silu_mul_packed"):
        monkeypatch.setattr(step_model, name, count(name, getattr(step_model, name)))
    monkeypatch.setattr(step_model.F, "linear", count("linear", torch.nn.functional.linear))
    decode_step.choose = count("choose", decode_step.choose)
    decode_step.whole()
    whole = counted.copy()
    counted.clear()
    for part in step.COLOURS:
        getattr(decode_step, part.replace(" ", "_"))()
    assert counted == whole
    assert {name for name, *_ in whole} >= {"norm_rotate_write", "skinny_linear" if batch <= 16 else "linear"}
    assert whole["choose", (batch, TINY.vocab_size), False] == 1


def test_the_profile_of_a_step_goes_into_the_record():
    calls = []
    found = step.measure(BENCH, FakeTimer(), TINY, {1: [20]}, lambda call: [{"calls": calls.append(call)}])
    assert found["batches"][0]["kernels"] == [{"calls": None}] and calls[0]().shape == (1,)


def test_the_whole_step_command_writes_samples_table_and_plot(tmp_path: Path, capsys, monkeypatch):
    on_cpu(monkeypatch)
    assert main(["step", "--batches", "1", "2", "--out", str(tmp_path / "s.json")]) == 0
    record = json.loads((tmp_path / "s.json").read_text())
    assert [entry["batch"] for entry in record["batches"]] == [1, 2]
    assert (tmp_path / "s.txt").read_text() in capsys.readouterr().out
    assert "<svg" in (tmp_path / "s.svg").read_text()


def test_a_step_reads_its_own_weights_in_every_layer_and_writes_the_newest_token_s_slot():
    model = StepModel(BENCH, TINY, num_blocks=9)
    pointers = {tensor.data_ptr() for layer in model.layers for tensor in vars(layer).values()}
    assert len(pointers) == 2 * len(vars(model.layers[0]))
    decode_step = DecodeStep(model, [5, 20, 35])
    before = [layer.k_pool.clone() for layer in model.layers]
    assert decode_step.whole().shape == (3,)
    for layer, old in zip(model.layers, before, strict=True):
        changed = (layer.k_pool != old).flatten(2).any(-1).flatten().nonzero().flatten()
        assert changed.tolist() == sorted(decode_step.slots.tolist())
    newest = [(length - 1) // 16 for length in (5, 20, 35)]
    blocks = decode_step.block_tables[torch.arange(3), torch.tensor(newest)]
    assert decode_step.slots.tolist() == [16 * block + place for block, place in zip(blocks, (4, 3, 2), strict=True)]


def test_lengths_spread_around_their_mean():
    lengths = step.spread_lengths(64, 825, 725)
    assert sum(lengths) == 64 * 825 and (min(lengths), max(lengths)) == (100, 1550)
    assert lengths != sorted(lengths)
