"""The engine against ``transformers.generate`` on the CPU: one stream, a batch of uneven lengths, and memory.

Both sides get the same token ids, weights, dtype and threads, decode greedily and never stop at an end token.
transformers runs with its cache and SDPA; its batch is padded on the left and runs until the longest row is
done. **Useful tokens** are those within each row's own output length; nobody asked for what comes behind.
"""

import random
import statistics
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minipaged.bench.memory import peak_resident_bytes, resident_bytes, stored_weight_bytes
from minipaged.bench.record import check_output, import_pyplot, new_record, progress, write_record
from minipaged.errors import UserError

if TYPE_CHECKING:
    from minipaged.llm import LLM

SIDES = ("minipaged", "transformers")
COLOURS = {"minipaged": "#2f6f9f", "transformers": "#b9b9b9"}

MEMORY_TITLES = {
    "weights": "one copy of the weights",
    "resident_after_load": "resident after loading",
    "peak_while_loading": "peak while loading",
    "resident_after_one_stream": "resident after one stream",
    "resident_after_batch": "resident after the batch",
    "keys_and_values_of_batch": "keys and values of the batch",
}


@dataclass(frozen=True)
class Sizes:
    """How much the bench generates. Ranges hold both ends."""

    single_output: int
    batch_size: int
    prompt_range: tuple[int, int]
    output_range: tuple[int, int]


FULL = Sizes(single_output=128, batch_size=32, prompt_range=(8, 64), output_range=(16, 256))
QUICK = Sizes(single_output=16, batch_size=4, prompt_range=(2, 8), output_range=(4, 16))


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each row of the batch must produce."""

    prompts: list[list[int]]
    output_lengths: list[int]

    @property
    def useful_tokens(self) -> int:
        """Return how many tokens were asked for."""
        return sum(self.output_lengths)

    @property
    def num_slots(self) -> int:
        """Return how many tokens end in the cache: all but the last of each row."""
        return sum(map(len, self.prompts)) + self.useful_tokens - len(self.prompts)

    @property
    def padded_tokens(self) -> int:
        """Return how many a batch generates that runs until its longest row is done."""
        return len(self.prompts) * max(self.output_lengths)


def draw_workload(
    batch_size: int,
    prompt_range: tuple[int, int],
    output_range: tuple[int, int],
    vocab_size: int,
    seed: int = 0,
) -> Workload:
    """Draw prompts of random ids and output lengths, each uniform over its range, both ends included.

    Example:
        >>> work = draw_workload(3, (2, 4), (16, 256), vocab_size=100)
        >>> len(work.prompts), all(16 <= length <= 256 for length in work.output_lengths)
        (3, True)
    """
    draw = random.Random(seed)
    output_lengths = [draw.randint(*output_range) for _ in range(batch_size)]
    prompts = [[draw.randrange(vocab_size) for _ in range(draw.randint(*prompt_range))] for _ in range(batch_size)]
    return Workload(prompts, output_lengths)


def run_ours(llm: "LLM", work: Workload) -> float:
    """Generate the workload with minipaged and return the seconds it took."""
    from minipaged import SamplingParams

    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.0, ignore_eos=True, max_tokens=length)
        for length in work.output_lengths
    ]
    start = time.perf_counter()
    results = llm.generate(work.prompts, params, progress=False)
    seconds = time.perf_counter() - start
    if [len(result.token_ids) for result in results] != work.output_lengths:
        raise UserError("the model's limit is too short for this workload; choose a model with a longer one")
    return seconds


def run_transformers(model: Any, work: Workload) -> float:
    """Generate the workload with ``transformers.generate`` and return the seconds it took."""
    width = max(map(len, work.prompts))
    ids = torch.zeros(len(work.prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(work.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    length = max(work.output_lengths)
    start = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=length)
    seconds = time.perf_counter() - start
    assert tokens.shape == (len(work.prompts), width + length), "an end token stopped transformers early"
    return seconds


def load_transformers(folder: Path, dtype: torch.dtype) -> Any:
    """Load the same folder with transformers, set to greedy decoding with cache and SDPA and no end token."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    # Built anew, so that no default of the model's own (an end token, a penalty) makes work or stops a row.
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
    )
    return model.eval()


def compare(llm: "LLM", model: Any, work: Workload, num_runs: int, name: str) -> dict[str, list[float]]:
    """Time both sides in turns, each first in every other run, and return the seconds of each run."""
    runners = {
        "minipaged": lambda: run_ours(llm, work),
        "transformers": lambda: run_transformers(model, work),
    }
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for run in range(num_runs):
        for side in SIDES if run % 2 == 0 else reversed(SIDES):
            seconds[side].append(runners[side]())
        latest = ", ".join(f"{side} {work.useful_tokens / seconds[side][-1]:.1f}" for side in SIDES)
        progress(f"{name}, run {run + 1} of {num_runs}: {latest} useful tokens/s")
    return seconds


def summarize(work: Workload, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the median useful tokens per second of each side, and how many times ours is faster.

    Example:
        >>> summarize(Workload([[1]], [10]), {"minipaged": [1.0, 2.0, 9.0], "transformers": [4.0, 4.0, 5.0]})
        {'minipaged': 5.0, 'transformers': 2.5, 'ratio': 2.0}
    """
    rates = {side: work.useful_tokens / statistics.median(seconds[side]) for side in SIDES}
    return {**rates, "ratio": rates["minipaged"] / rates["transformers"]}


def load_ours(folder: Path, dtype: str | None) -> tuple["LLM", dict[str, Any]]:
    """Load the engine and measure the memory that this made resident: weights, tokenizer, touched cache."""
    from minipaged.llm import LLM  # imported before the first measurement, so that its modules do not count

    before = resident_bytes()
    llm = LLM(str(folder), dtype=dtype, device="cpu")
    after, peak = resident_bytes(), peak_resident_bytes()
    memory = {
        "weights": stored_weight_bytes(folder, llm.dtype),
        "resident_after_load": after - before,
        "peak_while_loading": None if peak is None else peak - before,
        "resident_before": before,
    }
    return llm, memory


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of this bench."""
    parser.add_argument("--model", default="smollm2", help="a local folder, a hub id, or the default model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what the engine chooses")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides (default 2)")
    parser.add_argument("--runs", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--quick", action="store_true", help="one small run: shows that it works, not how fast")
    parser.add_argument("--out", type=Path, default=Path("cpu.json"), help="JSON to write; the plot goes beside it")


def run(options: Namespace) -> None:
    """Run the bench, print its report, and write the JSON and the plot."""
    check_output(options.out)
    for name in ("threads", "runs"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        record = measure(options)
    finally:
        torch.set_num_threads(before)
    write_record(record, options.out)
    draw(record, options.out.with_suffix(".svg"))
    print(report(record))
    print(f"written: {options.out} and {options.out.with_suffix('.svg')}")


def measure(options: Namespace) -> dict[str, Any]:
    """Do all runs and return the record."""
    from minipaged.foundation.random_weights import is_random
    from minipaged.foundation.weights import resolve_model

    folder = resolve_model(options.model)
    if is_random(folder):
        raise UserError(f"bench cpu needs a folder with weights, and {options.model} has none; see bench throughput")
    llm, memory = load_ours(folder, options.dtype)
    sizes = QUICK if options.quick else FULL
    vocab_size = llm.config.vocab_size
    single = draw_workload(1, (32, 32), (sizes.single_output, sizes.single_output), vocab_size)
    batch = draw_workload(sizes.batch_size, sizes.prompt_range, sizes.output_range, vocab_size)
    num_runs = 1 if options.quick else options.runs

    progress("warming up")
    for name, work in (("one_stream", single), ("batch", batch)):
        run_ours(llm, work)
        memory[f"resident_after_{name}"] = resident_bytes() - memory["resident_before"]
    memory["keys_and_values_of_batch"] = batch.num_slots * llm.config.kv_bytes_per_token(llm.dtype)
    model = load_transformers(folder, llm.dtype)
    run_transformers(model, Workload(batch.prompts, [4] * len(batch.prompts)))

    settings = {
        "model": options.model,
        "rung": llm.rung,
        "dtype": str(llm.dtype).removeprefix("torch."),
        "threads": options.threads,
        "quick": options.quick,
    }
    record = new_record("cpu", settings)
    record["memory_bytes"] = memory
    for name, work in (("single", single), ("batch", batch)):
        seconds = compare(llm, model, work, num_runs, name)
        record[name] = describe(work) | {
            "seconds": seconds,
            "useful_tokens_per_second": summarize(work, seconds),
        }
    return record


def describe(work: Workload) -> dict[str, Any]:
    """Return what the record says of a workload."""
    return {
        "prompt_lengths": [len(prompt) for prompt in work.prompts],
        "output_lengths": work.output_lengths,
        "useful_tokens": work.useful_tokens,
        "tokens_transformers_generates": work.padded_tokens,
    }


def report(record: dict[str, Any]) -> str:
    """Return the lines that say what came out."""
    settings, memory = record["settings"], record["memory_bytes"]
    lines = [
        f"{settings['model']}, {settings['dtype']}, {settings['threads']} threads, rung {settings['rung']}; "
        f"{record['machine']['processor']}",
        f"{'useful tokens/s, median':<28}{'minipaged':>12}{'transformers':>14}{'ratio':>8}",
    ]
    for name, title in (
        ("single", "one stream"),
        ("batch", f"batch of {len(record['batch']['output_lengths'])}"),
    ):
        rates = record[name]["useful_tokens_per_second"]
        lines.append(f"{title:<28}{rates['minipaged']:>12.1f}{rates['transformers']:>14.1f}{rates['ratio']:>7.2f}x")
    for key, title in MEMORY_TITLES.items():
        if memory[key] is not None:
            share = memory[key] / memory["weights"]
            lines.append(f"{title:<28}{memory[key] / 2**20:>8.0f} MiB  {share:.2f} x the weights")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the medians as bars and every run as a dot, from the record alone."""
    pyplot = import_pyplot()

    figure, axes = pyplot.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
    for axis, name, title in zip(axes, ("single", "batch"), ("one stream", "batch"), strict=True):
        part = record[name]
        rates = part["useful_tokens_per_second"]
        if name == "batch":
            title = f"batch of {len(part['output_lengths'])}, outputs of {min(part['output_lengths'])} to "
            title += f"{max(part['output_lengths'])}"
        axis.bar(SIDES, [rates[side] for side in SIDES], color=[COLOURS[side] for side in SIDES], width=0.6)
        for position, side in enumerate(SIDES):
            runs = [part["useful_tokens"] / seconds for seconds in part["seconds"][side]]
            axis.plot([position] * len(runs), runs, "o", color="black", markersize=3)
        axis.set_title(f"{title}: {rates['ratio']:.2f}x", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("useful tokens per second")
    figure.suptitle(f"{record['settings']['model']}, {record['settings']['dtype']}, CPU", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
