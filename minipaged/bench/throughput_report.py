"""The peers and targets of the throughput bench, and its table and plot, from the record alone."""

from pathlib import Path
from typing import Any

from minipaged.bench.kernel_report import head
from minipaged.bench.record import import_pyplot
from minipaged.bench.throughput_workloads import HIGHER_IS_BETTER, TITLES, UNITS

QWEN, LLAMA = "qwen3-0.6b-random", "llama-3.1-8b-random"

PEERS_MEASURED = "2026-11-29, one H200, torch 2.11+cu130, Triton 3.6.0, driver 580, prefix caches off"
"""Where the numbers below come from. They were not measured in the same run as those of this engine."""

VLLM, NANO, TRANSFORMERS = "vLLM 0.26.0", "nano-vllm bb823b3", "transformers 5.17"


def _peer(engine: str, model: str, workload: str, *samples: float) -> dict[str, Any]:
    return {"engine": engine, "model": model, "workload": workload, "samples": samples, "measured": PEERS_MEASURED}


PEERS = [
    _peer(VLLM, QWEN, "batch", 22_864, 22_788, 22_054),
    _peer(NANO, QWEN, "batch", 17_235, 18_049, 18_700),
    _peer(TRANSFORMERS, QWEN, "batch", 558),
    _peer("roofline", QWEN, "batch", 36_203),
    _peer(VLLM, LLAMA, "batch", 9583, 9607),
    _peer("roofline", LLAMA, "batch", 13_292),
    _peer(VLLM, QWEN, "single", 2.05),
    _peer(NANO, QWEN, "single", 2.5),
    _peer("roofline", QWEN, "single", 0.278),
    _peer(VLLM, LLAMA, "single", 5.04),
    _peer("roofline", LLAMA, "single", 3.5),
    _peer(VLLM, QWEN, "start", 103),
    _peer(NANO, QWEN, "start", 23),
]
"""vLLM with FlashAttention 3, torch.compile, graphs and asynchronous scheduling; nano-vllm with FlashAttention 3;
transformers with its continuous batching over SDPA. The roofline is computed: weights and keys and values read at
4.3 TB/s, products at 790 TFLOP/s."""

TARGETS: dict[tuple[str, str | None], tuple[float, float]] = {
    ("batch", QWEN): (25_000, 28_000),
    ("batch", LLAMA): (9900, 10_400),
    ("single", QWEN): (1.2, 0.8),
    ("single", LLAMA): (4.8, 4.3),
    ("start", QWEN): (20, 10),
    ("shared", QWEN): (3, 5),
    ("shared", LLAMA): (3, 5),
    ("no-hits", QWEN): (1, 0.5),
    ("no-hits", LLAMA): (1, 0.5),
}
"""What is aimed at on one H200, and what would be better still, by workload and model."""

COLOURS = {"minipaged": "#2f6f9f", "roofline": "#e4e4e4"}
OTHER = "#b9b9b9"


def target_of(workload: str, model: str, engine: str, is_quick: bool, median: float) -> dict[str, Any]:
    """Return target, stretch target, and whether each is met; None where nothing is aimed at.

    Example:
        >>> target_of("single", "qwen3-0.6b-random", "minipaged", False, 1.0)
        {'target': 1.2, 'is_met': True, 'stretch': 0.8, 'is_stretch_met': False}
    """
    aims = None if is_quick or engine != "minipaged" else TARGETS.get((workload, model))
    if aims is None:
        return dict.fromkeys(("target", "is_met", "stretch", "is_stretch_met"))
    is_higher = HIGHER_IS_BETTER[UNITS[workload]]
    met = [median >= aim if is_higher else median <= aim for aim in aims]
    return {"target": aims[0], "is_met": met[0], "stretch": aims[1], "is_stretch_met": met[1]}


def report(record: dict[str, Any]) -> str:
    """Return the table: rows of this run, and under those of a workload the quoted ones, marked with a star."""
    settings = record["settings"]
    lines = [
        head(record),
        f"{settings['model']}; runs of each: {settings['repeats']}, but 1 of start; medians",
        "",
        f"{'':<36}{'engine':<20}{'':>9} {'unit':<14}{'of all runs':<18}{'GiB':>6}{'pool':>6}  targets",
    ]
    for workload in TITLES:
        rows = [row for row in record["rows"] if row["workload"] == workload]
        if rows:
            lines += [_line(row) for row in rows]
            lines += [_quoted(peer) for peer in record["peers"] if peer["workload"] == workload]
    if record["peers"]:
        lines += ["", f"* not of this run: {record['peers'][0]['measured']}; the roofline is computed"]
    lines += ["GiB: GPU memory in use after the runs, by all engines of the process (on a CPU: most RAM of it);"]
    lines += ["pool: share of it that holds keys and values"]
    return "\n".join([*lines, *_surprises(record["rows"]), *_conclusion(record["rows"])])


def _line(row: dict[str, Any]) -> str:
    samples, memory, pool = row["samples"], row["memory_bytes"], row["pool_bytes"]
    spread = f"{_number(min(samples))} to {_number(max(samples))}"
    gib = "-" if memory is None else f"{memory / 2**30:.1f}"
    share = "-" if not memory or not pool else f"{100 * pool / memory:.0f} %"
    return (
        f"{TITLES[row['workload']]:<36}{row['engine']:<20}{_number(row['median']):>9} {row['unit']:<14}"
        f"{spread:<18}{gib:>6}{share:>6}  {_targets(row)}"
    ).rstrip()


def _quoted(peer: dict[str, Any]) -> str:
    samples = sorted(peer["samples"])
    median = samples[(len(samples) - 1) // 2]
    spread = f"{_number(samples[0])} to {_number(samples[-1])}" if len(samples) > 1 else ""
    return f"{'':<36}{peer['engine'] + ' *':<20}{_number(median):>9} {UNITS[peer['workload']]:<14}{spread}".rstrip()


def _number(value: float) -> str:
    """Return three to five digits.

    Example:
        >>> [_number(value) for value in (22788.0, 103.2, 2.051, -0.34)]
        ['22,788', '103.2', '2.05', '-0.34']
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _targets(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    words = {True: "met", False: "MISSED"}
    return f"{row['target']:,g} {words[row['is_met']]}, {row['stretch']:,g} {words[row['is_stretch_met']]}"


def _surprises(rows: list[dict[str, Any]]) -> list[str]:
    """Say where a prefix cache has found something that it should not: the time is not that of the workload then."""
    found = [row for row in rows if row["hit_tokens"] and row["workload"] in ("batch", "single", "no-hits")]
    return [f"{row['engine']}, {row['workload']}: {row['hit_tokens']} prompt tokens were found cached" for row in found]


def _conclusion(rows: list[dict[str, Any]]) -> list[str]:
    aimed = [row for row in rows if row["target"] is not None]
    if not aimed:
        return []
    met, stretch = (sum(row[name] for row in aimed) for name in ("is_met", "is_stretch_met"))
    return [f"{met} of {len(aimed)} targets met, {stretch} of the stretch targets; both are for one H200"]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw the medians of each workload as bars, each run as a dot, and the target as a line."""
    pyplot = import_pyplot()

    names = [name for name in TITLES if any(row["workload"] == name for row in record["rows"])]
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(1.0 + 2.6 * len(names), 3.6), layout="constrained", squeeze=False
    )
    for axis, name in zip(axes[0], names, strict=True):
        rows = [row for row in record["rows"] if row["workload"] == name]
        _draw_workload(axis, name, rows, [peer for peer in record["peers"] if peer["workload"] == name])
    figure.suptitle(f"{record['settings']['model']}; {head(record)}; * quoted, not of this run", fontsize=7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _draw_workload(axis: Any, name: str, rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> None:
    bars = [(row["engine"], row["samples"]) for row in rows] + [(f"{p['engine']} *", p["samples"]) for p in peers]
    for place, (engine, samples) in enumerate(bars):
        height = sorted(samples)[(len(samples) - 1) // 2]
        axis.bar(place, height, color=COLOURS.get(engine.split()[0], OTHER), width=0.7)
        axis.plot([place] * len(samples), samples, "o", color="black", markersize=2.5)
    for row in rows:
        if row["target"] is not None:
            axis.axhline(row["target"], color="#c8553d", linewidth=1)
    axis.set_xticks(range(len(bars)), [engine for engine, _ in bars], rotation=35, ha="right", fontsize=7)
    axis.set_title(TITLES[name], fontsize=8)
    axis.set_ylabel(UNITS[name], fontsize=8)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
