"""How the GPU benches measure: replays of CUDA graphs, what is compared in turns, buffers that no cache can hold."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from minipaged.bench.record import new_record
from minipaged.errors import UserError
from minipaged.shapes import Tensor

Call = Callable[[], object]
"""One call of an operation. All its tensors are made before, but those that the operation returns."""

Sides = Mapping[str, Sequence[Call]]
"""What is compared, by name, ours first. A side has one call for each of its sets of buffers."""

Timer = Callable[[Sides], dict[str, list[float]]]
"""Returns the samples of each side: microseconds of one call."""

NUM_SAMPLES, NUM_SAMPLES_QUICK = 30, 8
MANY_SIDES = 16
"""More sides than this are a sweep, of which each gets no more than the quick number of samples."""
SPAN_US = 2000.0
"""A graph holds calls for so long, and one at least: starting a graph costs microseconds, shared by all its calls."""
FILLER_BYTES = 2**30
CACHES_TO_FILL = 3
"""The buffers of a side have so many times the size of the L2 cache, so that none is still there when it is read."""


class GraphTimer:
    """Times each side as replays of one CUDA graph of many calls, the sides in turns.

    Only the GPU is timed: a graph launches its kernels without Python. Taking turns lets a change of the clocks hit
    all sides, and sets of buffers follow each other, so that each is read from memory.
    """

    def __init__(self, num_samples: int, span_us: float = SPAN_US) -> None:
        """Make the stream on which everything is warmed up and captured: libraries keep room for each stream."""
        self.num_samples = num_samples
        self.span_us = span_us
        self._stream = torch.cuda.Stream()
        self._filler = torch.zeros(FILLER_BYTES // 2, dtype=torch.bfloat16, device="cuda")

    def __call__(self, sides: Sides) -> dict[str, list[float]]:
        """Return the microseconds of one call, a sample for each replay."""
        graphs = {side: self._capture_span(calls) for side, calls in sides.items()}
        samples: dict[str, list[float]] = {side: [] for side in sides}
        num_samples = self.num_samples if len(sides) <= MANY_SIDES else min(self.num_samples, NUM_SAMPLES_QUICK)
        for sample in range(num_samples):
            for side in list(graphs) if sample % 2 == 0 else list(reversed(graphs)):
                graph, num_calls = graphs[side]
                samples[side].append(round(self._replay_us(graph) / num_calls, 4))
        return samples

    def _capture_span(self, calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
        """Return a warm graph that takes about ``span_us``, and how many calls it holds."""
        torch.cuda.synchronize()  # the inputs were made on another stream
        with torch.cuda.stream(self._stream):
            for call in calls:  # compiles what has to be compiled, which cannot happen while a graph is captured
                call()
        graph = self._capture(calls)
        num_rounds = max(1, round(self.span_us / min(self._replay_us(graph) for _ in range(3))))
        num_calls = num_rounds * len(calls)
        if num_rounds > 1:
            graph = self._capture(list(islice(cycle(calls), num_calls)))
            self._replay_us(graph)
        return graph, num_calls

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for call in calls:
                call()
        return graph

    def _replay_us(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return how long a replay takes on the GPU alone.

        The GPU reads the filler while the CPU puts the replay and the events into the queue: between them the GPU
        never waits for the CPU. Reading leaves nothing in the cache that would have to be written back.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._filler.sum()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)


def kernel_times(call: Call) -> list[dict[str, Any]]:
    """Return what a call launches, by kernel: how often, and microseconds in all, the longest first.

    Kernels are timed as PyTorch's profiler sees them, one after the other, outside of a graph.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found = [event for event in profiler.key_averages() if event.device_time_total > 0]
    found.sort(key=lambda event: -event.device_time_total)
    return [{"kernel": event.key, "count": event.count, "us": round(event.device_time_total, 2)} for event in found]


@dataclass(frozen=True)
class Workbench:
    """Where the inputs of a bench are made.

    Args:
        device: Where all tensors lie.
        dtype: What the operations compute in.
        cache_bytes: Size of the L2 cache, which a side's sets of buffers must not fit into.
    """

    device: torch.device
    dtype: torch.dtype
    cache_bytes: int

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers: multiplying zeros draws less power, and runs faster than real data."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        """Return lengths, ids or slots as a tensor."""
        return torch.tensor(values, device=self.device, dtype=dtype)

    def shuffled(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Return the numbers below ``count`` in random order."""
        return torch.randperm(count, device=self.device).to(dtype)

    def num_sets(self, num_bytes: int) -> int:
        """Return how many sets of buffers a call needs that touches so many bytes.

        Example:
            >>> bench = Workbench(torch.device("cpu"), torch.float32, cache_bytes=60)
            >>> bench.num_sets(50), bench.num_sets(1000)
            (4, 1)
        """
        return max(1, -(-CACHES_TO_FILL * self.cache_bytes // num_bytes))


def gpu_workbench(bench: str) -> Workbench:
    """Return the workbench of this machine's GPU, seeded, so that every run draws the same tables.

    Raises:
        UserError: There is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise UserError(f"bench {bench} measures a GPU, and this machine has no CUDA device")
    torch.manual_seed(0)
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return Workbench(torch.device("cuda"), torch.bfloat16, cache_bytes)


def add_gpu_arguments(parser: ArgumentParser, name: str) -> None:
    """Declare the options that the GPU benches share."""
    add = parser.add_argument
    add("--quick", action="store_true", help=f"{NUM_SAMPLES_QUICK} samples of each side in place of {NUM_SAMPLES}")
    add("--json", "--out", dest="out", type=Path, default=Path(f"{name}.json"), help="JSON to write")
    add("--plot", type=Path, help="plot to write, .svg or .png (default: .svg beside the JSON)")
    add("--commit", help="the commit of these files, where git cannot tell; wins over git's")


def gpu_timer(options: Namespace) -> GraphTimer:
    """Return the timer that the command line asks for."""
    return GraphTimer(NUM_SAMPLES_QUICK if options.quick else NUM_SAMPLES)


def new_gpu_record(bench: str, options: Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a record that also names driver and command line, to which a bench adds its samples."""
    record = new_record(bench, settings)
    if options.commit not in (None, record["commit"]):
        # What git says of the files is about the commit that git knows.
        record |= {"commit": options.commit, "is_clean": None}
    record["machine"]["driver"] = driver_version()
    record["command"] = " ".join(["python -m minipaged.bench", *sys.argv[1:]])
    return record


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where ``nvidia-smi`` does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
