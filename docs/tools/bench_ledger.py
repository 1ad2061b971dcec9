"""Tables from the recorded benches in docs/benchmarks: what ran where, what it found, and which targets were missed.

Records of later benches need no change here: what every record has makes its line of the ledger, and a table that
lacks its record says so.
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from statistics import median
from typing import Any

from repo_links import PROJECT

BENCHMARKS = PROJECT / "docs" / "benchmarks"
Record = dict[str, Any]


@cache
def read_record(file: str) -> Record:
    """Return what a file of docs/benchmarks holds."""
    return json.loads((BENCHMARKS / file).read_text(encoding="utf-8"))


def records() -> Iterator[tuple[str, Record]]:
    """Yield every record with its file's name, in the order of the names."""
    for path in sorted(BENCHMARKS.glob("*.json")):
        record = read_record(path.name)
        if isinstance(record, dict) and "bench" in record:
            yield path.name, record


def table(head: list[str], rows: list[list[str]], align: str = "") -> str:
    """Return a Markdown table; ``align`` has a letter for each column, "r" for right.

    Example:
        >>> print(table(["rung", "tokens/s"], [["paged", "2,611"]], "lr"))
        | rung | tokens/s |
        |---|--:|
        | paged | 2,611 |
    """
    rules = ["--:" if mark == "r" else "---" for mark in align.ljust(len(head), "l")]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(rules)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def number(value: float) -> str:
    """Return three to five digits.

    Example:
        >>> [number(value) for value in (22788.0, 103.2, 4.0, 2.051, 0.0123)]
        ['22,788', '103', '4', '2.05', '0.012']
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.1 else f"{value:.2g}"


def ledger() -> str:
    """Return a line for each record: what, when, where, with which versions, at which commit."""
    rows = []
    for file, record in records():
        machine, versions = record["machine"], record["versions"]
        place = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
        changed = " with changes" if record.get("is_clean") is False else ""
        with_it = f"torch {versions['torch']}, Triton {versions['triton']}"
        commit = f"`{str(record['commit'])[:10]}`{changed}"
        rows.append([f"[{file.removesuffix('.json')}]({file})", record["date"][:10], place, with_it, commit])
    return table(["record", "date", "machine", "with", "commit"], rows)


def ladder() -> str:
    """Return what the ladder's bench found: one queue of requests on every rung, in the same memory."""
    record = read_record("ladder.json")
    settings = record["settings"]
    rows = [
        [
            f"`{row['rung']}`",
            row["cache"],
            number(row["tokens_per_second"]),
            f"{row['held_mean']:.1f}",
            str(row["held_peak"]),
            number(row["wasted_slots_per_sequence"]) if "wasted_slots_per_sequence" in row else "",
            str(row["preemptions"]),
        ]
        for row in record["rows"]
    ]
    head = ["rung", "cache", "tokens/s", "sequences held, mean", "most", "slots wasted by each", "sent away"]
    return (
        f"{settings['num_requests']} requests, {settings['num_slots']:,} slots, a sequence of at most "
        f"{settings['max_model_len']:,} tokens, a small model with random weights, one thread of a CPU:\n\n"
        + table(head, rows, "llrrrrr")
    )


def prefix() -> str:
    """Return what the prefix cache costs and saves."""
    record = read_record("prefix.json")
    settings = record["settings"]
    rows = []
    for name, what in (("without_hits", "nothing in common"), ("system_prompt", "one system prompt")):
        off = median(record[name]["None"]["seconds"])
        for kind, found in record[name].items():
            seconds = median(found["seconds"])
            label = "off" if kind == "None" else kind
            rows.append([what, label, f"{seconds:.2f}", f"{off / seconds:.2f}", number(max(found["hit_tokens"]))])
    head = ["requests with", "prefix cache", "s", "speed-up", "tokens found"]
    return (
        f"{settings['requests']} requests of {settings['prompt_tokens']} prompt tokens, or "
        f"{settings['system_tokens']} in common and {settings['prompt_tokens']} of their own; medians of "
        f"{settings['repeats']} rounds:\n\n" + table(head, rows, "llrrr")
    )


def missed() -> str:
    """Return every target that a record says was missed, and how many there were."""
    rows, num_targets = [], 0
    for file, record in records():
        for case, target, measured, is_met in _targets_of(record):
            num_targets += 1
            if not is_met:
                rows.append([f"[{record['bench']}]({file})", case, target, measured])
    head = f"{num_targets - len(rows)} of {num_targets} targets are met. These are not:\n\n"
    return head + table(["record", "case", "target", "measured"], rows, "llrr")


def _targets_of(record: Record) -> Iterator[tuple[str, str, str, bool]]:
    """Yield the targets of a record: the case, what was aimed at, what was measured, and whether that is enough."""
    for result in record.get("results", []):
        if result.get("target") is not None:
            word = "from" if result["unit"] == "% rise" else "against"
            against = f", {word} {result['against']}" if result.get("against") else ""
            unit = result["unit"]
            yield (
                result["name"] + against,
                f"{number(result['target'])} {unit}",
                number(result["value"]),
                result["is_hit"],
            )
    for batch in record.get("batches", []):
        if batch.get("target_ms") is not None:
            measured = number(batch["median_ms"]["whole"])
            yield (
                f"a decode step, batch {batch['batch']}",
                f"{number(batch['target_ms'])} ms",
                measured,
                batch["is_hit"],
            )
    for row in record.get("rows", []):
        if row.get("target") is not None and "is_met" in row:
            case = f"{record['settings']['model']}, {row['workload']}"
            yield case, f"{number(row['target'])} {row['unit']}", number(row["median"]), row["is_met"]
    if record["bench"] == "profile" and record.get("target") is not None:
        idle = record["idle_percent"]["by_clock"]
        yield "GPU idle in steady decode", f"{number(record['target'])} %", number(idle), idle <= record["target"]


def throughput() -> str:
    """Return what the throughput benches found, or that there is no record yet."""
    rows = []
    for file, record in records():
        for row in record.get("rows", []) if record["bench"] == "throughput" else []:
            peers = [peer for peer in record["peers"] if peer["workload"] == row["workload"]]
            others = ", ".join(f"{peer['engine']} {number(median(peer['samples']))}" for peer in peers)
            model = f"[{record['settings']['model']}]({file})"
            rows.append([model, row["workload"], row["engine"], f"{number(row['median'])} {row['unit']}", others])
    if not rows:
        return "There is no record of whole workloads on a GPU yet."
    return table(["model", "workload", "engine", "median", "others, measured on their own"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "<!-- ledger -->": ledger,
    "<!-- ladder bench -->": ladder,
    "<!-- prefix bench -->": prefix,
    "<!-- missed targets -->": missed,
    "<!-- throughput bench -->": throughput,
}
"""What stands in a page for a table."""
