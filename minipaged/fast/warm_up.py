"""The kernels of a step, compiled side by side: that is what an engine's first start on a machine waits for.

Triton compiles a kernel when it is first launched, which takes up to a second, most of it in other programs. A forward
pass would compile one after the other. Here each call launches other kernels, over rows that are nobody's, on a thread
of its own. What is missing here is compiled when a graph is recorded, only later.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from minipaged.batching.plan import Plan
from minipaged.batching.rows import Rows
from minipaged.shapes import Tensor

if TYPE_CHECKING:
    from minipaged.fast.engine import FastEngine

Call = Callable[[], object]


def run_side_by_side(calls: list[Call]) -> None:
    """Run each call on a thread of its own, and wait for all.

    Example:
        >>> done = []
        >>> run_side_by_side([lambda: done.append(1), lambda: done.append(2)])
        >>> sorted(done)
        [1, 2]
    """
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def run(call: Call) -> None:
        if device is not None:  # a thread begins on GPU 0, and with gradients
            torch.cuda.set_device(device)
        with torch.inference_mode():
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(run, calls))


def kernel_calls(engine: "FastEngine") -> list[Call]:
    """Return calls that launch the kernels of prompts and of decode steps, hardly any of them in two calls.

    Those for a shared beginning are left out: they are compiled when the first step wants them.

    Invariants:
        While the batch is at rest no row is anybody's, and nothing is written to the cache.
    """
    model, sizes = engine.model, engine.graphs.sizes
    vocab_size, width = model.config.vocab_size, model.config.hidden_size

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=model.dtype, device=model.device)

    def norm() -> None:
        x, residual = model.norm(zeros(1, width), model.final_norm, None)
        model.norm(x, model.final_norm, residual)

    calls: list[Call] = [norm]
    batches = [engine.inputs.rows(sizes[0]), engine.inputs.rows(sizes[-1]), _prompt(engine)]
    calls += [_attention(engine, rows, layer) for layer in _layers(model.config.layer_windows) for rows in batches]
    if engine.steps.device_batch:
        calls.append(lambda: engine.batch.expand(engine.inputs, sizes[-1], model.tier))
        calls.append(lambda: engine.choose_rows("plain", zeros(sizes[-1], vocab_size)))
        calls.append(lambda: engine.choose_rows("filtered", zeros(sizes[-1], vocab_size)))
    if engine.fused is not None:
        calls += engine.fused.kernel_calls(engine.kv, engine.inputs.rows(1))
    return calls


def _prompt(engine: "FastEngine") -> Rows:
    """Return a prompt of two tokens that nobody has, read from block 0, for attention alone."""
    rows = engine.inputs.rows(1)

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=engine.model.device)

    tables = torch.zeros_like(rows.block_tables)
    return Rows(rows.token_ids, rows.positions, rows.slots, None, tables, numbers(0, 2), numbers(2))


def _layers(windows: tuple[int | None, ...]) -> list[int]:
    """Return one layer of each window.

    Example:
        >>> _layers((None, 64, None, 64))
        [0, 1]
    """
    return [windows.index(window) for window in dict.fromkeys(windows)]


def _attention(engine: "FastEngine", rows: Rows, layer: int) -> Call:
    config, device = engine.model.config, engine.model.device
    num_tokens = 2 if rows.max_query_len is None else len(rows.token_ids)  # None: the prompt

    def call() -> None:
        q = torch.zeros(num_tokens, config.num_heads, config.head_dim, dtype=engine.model.dtype, device=device)
        engine.read_rows(Plan(), rows)(layer, q)

    return call
