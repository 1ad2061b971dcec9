"""Decode steps of a few fixed sizes, each recorded once and replayed.

An eager step of a 0.6B model launches some 260 kernels, and Python takes longer to launch them than a small batch
takes to compute. A CUDA graph launches all of them at once. What it holds is fixed, addresses and grids too, so a
batch is filled up to the next recorded size, and everything that varies is read from `DecodeInputs`.

A graph has one of three endings: ``"plain"`` chooses tokens by temperature alone, ``"filtered"`` also by top_k, top_p
and min_p, and ``"logits"`` leaves the choice to the host. And it reads each row's blocks alone, or those that rows have
in common once for all of them.

Without CUDA the same work runs at once, padded all the same.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

import torch

from minipaged.garbage import collector_at_rest

Ending = Literal["plain", "filtered", "logits"]


class Kind(NamedTuple):
    """What a graph does: how it ends, and whether rows read together what they have in common."""

    ending: Ending
    is_shared: bool = False


Body = Callable[[Kind, int], None]
"""body(kind, size): one step. It reads and writes tensors that stay where they are, and waits for nothing."""


class DecodeGraphs:
    """The recorded steps.

    Args:
        body: What is recorded.
        sizes: Of the batches, rising.
        at_rest: Makes the rows nobody's for as long as a recording takes, which runs the body once.
        is_recorded: False runs the body at each step, which is all that a CPU can do.

    Cost:
        A recording takes as long as an eager step or two. Graphs share one pool of memory, since they never run at
        the same time.
    """

    def __init__(
        self, body: Body, sizes: list[int], at_rest: Callable[[], AbstractContextManager[None]], is_recorded: bool
    ) -> None:
        self.body, self.sizes, self.at_rest, self.is_recorded = body, sizes, at_rest, is_recorded
        self._graphs: dict[tuple[Kind, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if is_recorded else None
        self.num_runs = 0

    def size_for(self, num_rows: int) -> int:
        """Return the smallest size that has room."""
        return next(size for size in self.sizes if size >= num_rows)

    def record_all(self, kinds: tuple[Kind, ...], show_progress: Callable[[str], None]) -> None:
        """Record every size, the largest first: the others then find room in its memory."""
        if not self.is_recorded:
            return
        todo = [(kind, size) for kind in kinds for size in self.sizes[::-1]]
        for number, (kind, size) in enumerate(todo):
            show_progress(f"recording decode steps: {100 * number // len(todo)} %")
            self._record(kind, size)

    def run(self, kind: Kind, size: int) -> None:
        """Run one step."""
        self.num_runs += 1
        if not self.is_recorded:
            self.body(kind, size)
            return
        if (kind, size) not in self._graphs:
            self._record(kind, size)
        self._graphs[kind, size].replay()

    def _record(self, kind: Kind, size: int) -> None:
        """Run the body once, to compile what it needs, and then record it."""
        with self.at_rest(), collector_at_rest():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.body(kind, size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self.body(kind, size)
        self._graphs[kind, size] = graph
