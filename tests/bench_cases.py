"""Small cases for the GPU benches, and what stands for the GPU in their tests."""

from argparse import ArgumentParser, Namespace

import pytest
import torch

from minipaged.bench import kernels, step
from minipaged.bench.gpu_timing import Sides, Workbench
from minipaged.bench.kernel_case import Score
from minipaged.bench.kernel_cases_attention import (
    Heads,
    chunk,
    decode,
    every_batch,
    paging,
    prefill,
    shared_prefix,
)
from minipaged.bench.kernel_cases_memory import add_and_norm, block_copy, cache_write, copy, gated, gather, read, swap
from minipaged.bench.kernel_cases_step import fused_write, products, sampler
from minipaged.bench.step_model import Shape

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
BENCH = Workbench(torch.device("cpu"), torch.float32, cache_bytes=1000)
COPY, READ = copy(1024), read(1024)
SMALL = [
    COPY,
    READ,
    decode(2, 40, Score("TB/s"), Score("% over", 2.0, "sdpa"), heads=HEADS),
    every_batch(40, 3, HEADS),
    paging(8, 2, 40, 10.0, HEADS),
    prefill(20, Score("TFLOP/s", 400.0), heads=HEADS),
    chunk(5, 20, HEADS),
    cache_write(40, HEADS),
    block_copy(3, 2, HEADS),
    gather(3, 2, HEADS),
    swap(3, 2, is_gather=True, heads=HEADS),
    swap(3, 2, is_gather=False, heads=HEADS),
    add_and_norm(4, 8),
    gated(4, 8),
    shared_prefix(3, 32, 16, 8.0, HEADS),
    *products(((8, 12),), target=70.0),
    fused_write(3, HEADS),
    sampler(2, 50),
    sampler(2, 50, top_k=3, top_p=0.9),
]
"""One case of every family, as small as it gets."""

TINY = Shape(num_layers=2, width=16, heads=Heads(4, 2, 8), mlp_width=24, vocab_size=50)
"""A decoder as small as it gets."""


class FakeTimer:
    """Runs every call once and says that the first side takes 2 us, and every other side 1 us more."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[object]] = {}

    def __call__(self, sides: Sides) -> dict[str, list[float]]:
        self.outputs = {side: [call() for call in calls] for side, calls in sides.items()}
        return {side: [2.0 + i, 1.0 + i, 3.0 + i] for i, side in enumerate(sides)}


def kernels_options() -> Namespace:
    parser = ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(["--commit", "0123456789abcdef"])


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benches believe that this CPU is a GPU, and a small one."""

    class Timer(FakeTimer):
        num_samples, span_us = 3, 1.0

    for module in (kernels, step):
        monkeypatch.setattr(module, "gpu_workbench", lambda name: BENCH)
        monkeypatch.setattr(module, "gpu_timer", lambda options: Timer())
    monkeypatch.setattr(kernels, "SDPA_SHAPES", {"decode": (3, 40, 1), "prefill": (1, 20, 20)})
    monkeypatch.setattr(step, "QWEN3_06B", TINY)
