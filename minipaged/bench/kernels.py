"""Each operation on the GPU beside PyTorch's own and beside a plain copy, in one process.

python -m minipaged.bench kernels

Heads are those of Llama-3.1-8B, 32 and 8 of 128, numbers random in bfloat16, blocks of 16 slots with shuffled ids.
Calls are replayed in CUDA graphs, so that Python is not timed, and sets of buffers follow each other, so that nothing
is read from the L2 cache that memory should deliver. What is compared takes turns. Beside the JSON with the samples
come the table as text and a plot.
"""

import math
import time
from argparse import ArgumentParser, Namespace
from typing import Any

import torch

from minipaged.bench.gpu_timing import (
    CACHES_TO_FILL,
    Timer,
    Workbench,
    add_gpu_arguments,
    gpu_timer,
    gpu_workbench,
    new_gpu_record,
)
from minipaged.bench.kernel_case import COPY, Case, Score, failed, measured, results
from minipaged.bench.kernel_cases_attention import (
    BLOCK_SIZE,
    LLAMA,
    chosen_backend,
    chunk,
    decode,
    every_batch,
    paging,
    prefill,
    shared_prefix,
)
from minipaged.bench.kernel_cases_memory import (
    add_and_norm,
    block_copy,
    cache_write,
    copy,
    gated,
    gather,
    read,
    swap,
)
from minipaged.bench.kernel_cases_step import (
    LLAMA_8B_PRODUCTS,
    QWEN3_06B_PRODUCTS,
    fused_write,
    products,
    sampler,
)
from minipaged.bench.kernel_report import draw, report
from minipaged.bench.record import check_output, check_plot, steps, write_record
from minipaged.errors import UserError

PAGING_TARGETS = {8: 10.0, 16: 2.0, 32: 2.0, 64: 2.0, 128: 2.0, 256: 2.0}
"""Percent that shuffled blocks may cost, by block size."""

SDPA_SHAPES = {"decode 64 x 4,096": (64, 4096, 1), "causal prefill 8,192": (1, 8192, 8192)}
"""Sequences, tokens and new tokens of the cases for which the record names PyTorch's choice."""

VOCAB_SIZE = 151_936
"""Of Qwen3."""

CASES: tuple[Case, ...] = (
    copy(2**30),
    read(2**30),
    decode(64, 4096, Score("TB/s"), Score("% over", 2.0, "sdpa")),
    decode(64, 1024, Score("TB/s", 3.8)),
    decode(1, 32768, Score("TB/s", 3.4)),
    decode(1, 1024, Score("us", 9.0)),
    decode(256, 1000, Score("TB/s")),
    *(every_batch(length) for length in (1024, 4096)),
    *(paging(block_size, 64, 4096, target) for block_size, target in PAGING_TARGETS.items()),
    prefill(2048, Score("TFLOP/s")),
    prefill(8192, Score("TFLOP/s", 400.0)),
    chunk(512, 8192),
    cache_write(131_072),
    block_copy(256, 28),
    gather(256, 28),
    swap(64, 28, is_gather=True),
    swap(64, 28, is_gather=False),
    add_and_norm(131_072, 1024),
    add_and_norm(32_768, 4096),
    gated(65_536, 3072),
    shared_prefix(128, 8192, 256, target=8.0),
    *products(QWEN3_06B_PRODUCTS, target=70.0),
    *products(LLAMA_8B_PRODUCTS),
    *(fused_write(num_tokens) for num_tokens in (1, 64, 256)),
    *(sampler(batch, VOCAB_SIZE) for batch in (1, 64, 256)),
    *(sampler(batch, VOCAB_SIZE, top_k=50, top_p=0.9) for batch in (1, 64, 256)),
)
"""Everything that is measured, in the order of the table, with the targets that the project has set itself."""


def row_names() -> list[str]:
    """Return the words that ``--only`` takes."""
    return list(dict.fromkeys(case.row for case in CASES))


def choose_cases(rows: list[str] | None) -> list[Case]:
    """Return the cases of these rows, all for None. Copy and read are always among them: they are ceilings of others.

    Example:
        >>> [case.name for case in choose_cases(["swap"])]
        ['copy', 'read', 'swap out, 64 x 28 layers, pinned', 'swap in, 64 x 28 layers, pinned']
    """
    for row in rows or []:
        if row not in row_names():
            raise UserError(f"no operation is called {row!r}; there is {', '.join(row_names())}")
    return [case for case in CASES if rows is None or case.row in (COPY, *rows)]


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    help_text = f"operations to measure: {', '.join(row_names())}"
    parser.add_argument("--only", "--rows", dest="rows", nargs="+", metavar="NAME", help=help_text)
    add_gpu_arguments(parser, "kernels")


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write JSON, table and plot.

    Raises:
        UserError: Nothing can be measured here or written there, or a case failed, which the record then names.
    """
    plot = options.plot or options.out.with_suffix(".svg")
    check_output(options.out)
    check_plot(plot)
    cases = choose_cases(options.rows)
    bench = gpu_workbench("kernels")
    timer = gpu_timer(options)
    settings = {
        "quick": options.quick,
        "rows": options.rows,
        "num_samples": timer.num_samples,
        "graph_us": timer.span_us,
        "dtype": str(bench.dtype).removeprefix("torch."),
        "cache_bytes": bench.cache_bytes,
        "caches_filled": CACHES_TO_FILL,
        "heads": vars(LLAMA),
        "block_size": BLOCK_SIZE,
        "sdpa_backends": {name: chosen_backend(bench, *shape) for name, shape in SDPA_SHAPES.items()},
    }
    record = new_gpu_record("kernels", options, settings)
    start = time.perf_counter()
    record |= measure(cases, bench, timer)
    record["seconds"] = round(time.perf_counter() - start, 1)
    write_record(record, options.out)
    text = report(record)
    options.out.with_suffix(".txt").write_text(text + "\n")
    print(text)
    draw(record, plot)
    print(f"written: {options.out}, {options.out.with_suffix('.txt')} and {plot}")
    errors = [case["name"] for case in record["cases"] if "error" in case]
    if errors:
        raise UserError(f"bench kernels could not measure {', '.join(errors)}; the table says why")


def measure(cases: list[Case], bench: Workbench, timer: Timer) -> dict[str, Any]:
    """Measure the cases one after the other; return their samples, and the scores that follow from them.

    A case that fails does not take the others with it, but for those that are the ceilings of others.
    """
    entries: list[dict[str, Any]] = []
    with steps(len(cases)) as begin:
        for case in cases:
            begin(case.name)
            try:
                entries.append(measure_case(case, bench, timer))
            except Exception as error:  # whatever an operation, a compiler or a driver may raise
                if case.row == COPY:
                    raise
                entries.append(failed(case, error))
    return {"cases": entries, "results": results(entries)}


def measure_case(case: Case, bench: Workbench, timer: Timer) -> dict[str, Any]:
    """Build a case, time its sides, and return what the record says of it."""
    samples = timer(case.build(bench))
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # what the graphs have held is given back
    assert all(math.isfinite(us) and us > 0 for side in samples.values() for us in side), case.name
    return measured(case, samples)
