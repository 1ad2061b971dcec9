"""One workload on every rung, at the same memory: speed, sequences held at once, and where the slots went.

python -m minipaged.bench ladder

Far more requests than fit arrive at once, decode greedily and end at their own length. Rows over dense ranges are the
baselines of the PagedAttention paper: static batches are FasterTransformer, the rung ``batching`` over them is Orca.

**When it is counted.** While requests wait: a cache without a queue is as empty as its clients are few. A static row
runs one batch to its end, one of the rung ``batching`` until nobody waits or ``--max-steps`` are over. Sequences and
slots are counted after each step, and time is that of the steps alone. Since all arrive at once, sequences are short
at first, and blocks hold more of them than later: the longer the run, the closer comes the mean to the steady state.
What is held does not depend on what is said, so ``--model random --max-steps 100000`` counts the whole queue in a
minute.

**Who knows how long an answer gets.** Only ``oracle``, and ``pow2`` up to the next power of two. To all other rows an
answer may go on to the limit. A static batch over blocks has to promise room for that, so the rungs ``paged`` and
``sharing`` hold no more sequences than ``max``: blocks pay off when a scheduler can take them back.
"""

import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minipaged.bench.ladder_report import draw, report
from minipaged.bench.ladder_rows import ROWS, Row, run_row
from minipaged.bench.random_model import save_random_model
from minipaged.bench.record import check_output, check_plot, new_record, progress, write_record
from minipaged.bench.workload import LONGEST, Request, draw_requests
from minipaged.errors import UserError
from minipaged.llm import LLM

NUM_FOUNDATION_REQUESTS = 4
"""Rung 0 computes every token anew at every step, so it gets the shortest requests only, which flatters it."""


@dataclass(frozen=True)
class Sizes:
    """How much is run. There must be more requests than the best row holds; None runs until nobody waits."""

    num_slots: int
    num_requests: int
    max_model_len: int
    max_steps: int | None


FULL = Sizes(num_slots=16_384, num_requests=256, max_model_len=LONGEST, max_steps=300)
QUICK = Sizes(num_slots=1024, num_requests=128, max_model_len=128, max_steps=100)
"""A sixteenth of all lengths. Blocks are large then, so that they hold fewer sequences than in a full run."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    parser.add_argument("--model", default="smollm2", help="a local folder, a hub id, smollm2 (the default) or random")
    parser.add_argument("--rungs", nargs="+", metavar="ROW", help=f"rows to run: {', '.join(row_names())}")
    parser.add_argument("--num-slots", type=int, help=f"memory of every row, in slots (default {FULL.num_slots})")
    parser.add_argument("--block-size", type=int, default=16, help="slots in a block (default 16)")
    parser.add_argument("--num-requests", type=int, help=f"requests in the queue (default {FULL.num_requests})")
    parser.add_argument("--max-model-len", type=int, help=f"longest sequence (default {FULL.max_model_len})")
    parser.add_argument("--max-steps", type=int, help=f"most steps of rung batching (default {FULL.max_steps})")
    parser.add_argument("--seed", type=int, default=0, help="makes the same workload again (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the engine chooses")
    parser.add_argument("--device", help="cpu or cuda; default: CUDA where there is one")
    parser.add_argument("--quick", action="store_true", help="few and short requests: shows that it works")
    parser.add_argument("--json", "--out", dest="out", type=Path, default=Path("ladder.json"), help="JSON to write")
    parser.add_argument("--plot", type=Path, help="plot to write, .svg or .png (default: .svg beside the JSON)")


def row_names() -> list[str]:
    """Return every word that chooses rows: rungs, and single rows."""
    return list(dict.fromkeys(name for row in ROWS for name in row.names))


def choose_rows(names: list[str] | None) -> list[Row]:
    """Return the rows that go by one of the names, all for None.

    Example:
        >>> [row.cache for row in choose_rows(["contiguous:max", "paged"])]
        ['contiguous max', 'paged']
    """
    for name in names or []:
        if name not in row_names():
            raise UserError(f"no row is called {name!r}; there is {', '.join(row_names())}")
    return [row for row in ROWS if names is None or set(names) & set(row.names)]


def choose_sizes(options: Namespace) -> Sizes:
    """Return the sizes that the command line gives, or refuse those that make no sense."""
    defaults = QUICK if options.quick else FULL
    given = {name: getattr(options, name) for name in vars(defaults) if getattr(options, name) is not None}
    for name, value in {**given, "block_size": options.block_size}.items():
        if value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    sizes = replace(defaults, **given)
    if sizes.num_slots < sizes.max_model_len or sizes.num_slots % options.block_size:
        raise UserError(
            f"--num-slots must be a multiple of the block size, {options.block_size}, and no less than the longest "
            f"sequence, {sizes.max_model_len}; {sizes.num_slots} is not"
        )
    return sizes


def run(options: Namespace) -> None:
    """Run the bench, print its table, and write the JSON and the plot."""
    plot = options.plot or options.out.with_suffix(".svg")
    check_output(options.out)
    check_plot(plot)
    rows, sizes = choose_rows(options.rungs), choose_sizes(options)
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "random":
            save_random_model(Path(folder), sizes.max_model_len)
        record = measure(options, folder if options.model == "random" else options.model, rows, sizes)
    write_record(record, options.out)
    draw(record, plot)
    print(report(record))
    print(f"written: {options.out} and {plot}")


def measure(options: Namespace, model: str, rows: list[Row], sizes: Sizes) -> dict[str, Any]:
    """Run the rows one after the other and return the record."""
    settings = {name: getattr(options, name) for name in ("model", "block_size", "seed", "quick")} | asdict(sizes)
    settings["threads"] = torch.get_num_threads()
    record = new_record("ladder", settings)
    record["rows"] = []
    for row in rows:
        llm = load(row, model, options, sizes)
        settings |= {"dtype": str(llm.dtype).removeprefix("torch."), "device": llm.device.type}
        requests = draw_requests(sizes.num_requests, llm.config.vocab_size, sizes.max_model_len, options.seed)
        record["workload"] = describe(requests)
        if row.rung == "foundation":
            requests = sorted(requests, key=lambda request: request.output_length)[:NUM_FOUNDATION_REQUESTS]
        progress(f"{row.rung}, {row.cache}: {len(requests)} requests")
        record["rows"].append(run_row(llm, row, requests, sizes.max_steps))
        del llm  # before the next one takes its memory
    return record


def load(row: Row, model: str, options: Namespace, sizes: Sizes) -> LLM:
    """Load the model on the row's rung, with the cache that all rows have."""
    cache = {"num_blocks": sizes.num_slots // options.block_size, "block_size": options.block_size}
    return LLM(
        model,
        rung=row.rung,
        dtype=options.dtype,
        device=options.device,
        max_model_len=sizes.max_model_len,
        **({} if row.rung == "foundation" else cache | row.options),
    )


def describe(requests: list[Request]) -> dict[str, list[int]]:
    """Return what the record says of the workload."""
    return {
        "prompt_lengths": [len(request.prompt) for request in requests],
        "output_lengths": [request.output_length for request in requests],
    }
