"""The table and the plot of the ladder bench, from its record alone."""

from pathlib import Path
from typing import Any

from minipaged.bench.record import import_pyplot

COLOURS = {
    "token_states": "#2f6f9f",
    "reserved": "#e0b04c",
    "internal": "#c8553d",
    "external": "#7d4f8a",
    "free": "#e4e4e4",
}
"""Of the kinds of slots, in the order of columns and bars."""

TITLES = {kind: kind for kind in COLOURS} | {"token_states": "tokens"}


def report(record: dict[str, Any]) -> str:
    """Return the table, with a line above on what ran and lines below on what blocks gain and waste."""
    settings, rows = record["settings"], record["rows"]
    prompts, outputs = (record["workload"][f"{name}_lengths"] for name in ("prompt", "output"))
    lines = [
        f"{settings['model']}, {settings['dtype']}, {_processor(record)}: {settings['num_slots']:,} slots, blocks of "
        f"{settings['block_size']}",
        f"{len(outputs)} requests queued at the start, {sum(prompts) / len(prompts):.0f} tokens in and "
        f"{sum(outputs) / len(outputs):.0f} out on average, at most {settings['max_model_len']:,} together",
        "",
        f"{'':31}{'':10}{'sequences':>14}{'% of all slots, mean over the steps':^45}",
        f"{'rung':<12}{'cache':<19}{'tokens/s':>10}{'mean':>8}{'peak':>6}"
        + "".join(f"{title:>9}" for title in TITLES.values())
        + f"{'preempted':>11}{'steps':>7}{'seconds':>9}",
    ]
    lines += [_line(row) for row in rows]
    return "\n".join([*lines, "", *notes(rows), *conclusions(rows)])


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return what a reader of the table has to know of its rows."""
    lines = ["counted while requests wait: static rows (all but batching) run one batch to its end"]
    lines += [
        f"foundation: the {row['num_requests']} shortest requests only; no cache, no slots"
        for row in rows
        if row["rung"] == "foundation"
    ]
    if any(row["rung"] in ("paged", "sharing") for row in rows):
        lines.append("paged, sharing: free slots are promised, as far as a sequence of full length may need them")
    return lines


def _processor(record: dict[str, Any]) -> str:
    return record["machine"]["gpu" if record["settings"]["device"] == "cuda" else "processor"]


def _line(row: dict[str, Any]) -> str:
    shares = [f"{100 * row['slots'][kind]:>9.1f}" if "slots" in row else f"{'-':>9}" for kind in TITLES]
    return (
        f"{row['rung']:<12}{row['cache']:<19}{row['tokens_per_second']:>10.1f}{row['held_mean']:>8.1f}"
        f"{row['held_peak']:>6}{''.join(shares)}{row['preemptions']:>11}{row['steps']:>7}{row['seconds']:>9.1f}"
    )


def conclusions(rows: list[dict[str, Any]]) -> list[str]:
    """Return what blocks hold beside each reservation under the same scheduler, and what they waste.

    Example:
        >>> paged = {"rung": "batching", "cache": "paged", "held_mean": 32.0}
        >>> paged |= {"wasted_slots_per_sequence": 7.5, "wasted_share_of_used_slots": 0.015}
        >>> for line in conclusions([{"rung": "batching", "cache": "contiguous max", "held_mean": 8.0}, paged]):
        ...     print(line)
        batching, paged: 4.0 times the sequences of contiguous max
        batching, paged: 7.5 slots wasted per sequence, 1.5 % of the slots in use
    """
    batching = {row["cache"]: row for row in rows if row["rung"] == "batching"}
    paged = batching.pop("paged", None)
    if paged is None:
        return []
    gains = [
        f"{paged['held_mean'] / row['held_mean']:.1f} times the sequences of {cache}" for cache, row in batching.items()
    ]
    waste = (
        f"{paged['wasted_slots_per_sequence']:.1f} slots wasted per sequence, "
        f"{100 * paged['wasted_share_of_used_slots']:.1f} % of the slots in use"
    )
    return [f"batching, paged: {finding}" for finding in (*gains, waste)]


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw a bar for each row with a cache: its slots by kind, and beside it the sequences held."""
    pyplot = import_pyplot()

    rows = [row for row in record["rows"] if "slots" in row]
    size = (9.0, 1.6 + 0.34 * len(rows))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained", width_ratios=(5, 4))
    _draw_slots(left, rows)
    _draw_held(right, rows)
    left.set_yticks(range(len(rows)), [_label(row) for row in rows])
    left.invert_yaxis()  # the table's order, from above
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    settings = record["settings"]
    figure.suptitle(f"{settings['num_slots']:,} slots, blocks of {settings['block_size']}", fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _label(row: dict[str, Any]) -> str:
    return row["cache"] if row["cache"].startswith(row["rung"]) else f"{row['rung']}, {row['cache']}"


def _draw_held(axis: Any, rows: list[dict[str, Any]]) -> None:
    axis.barh(range(len(rows)), [row["held_mean"] for row in rows], color=COLOURS["token_states"], height=0.7)
    for place, row in enumerate(rows):
        axis.plot(row["held_peak"], place, "|", color="black", markersize=10)
        where = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(f"{row['held_mean']:.1f}", (row["held_peak"], place), fontsize=8, **where)
    axis.margins(x=0.2)
    axis.set_xlabel("sequences held, mean (line: peak)")


def _draw_slots(axis: Any, rows: list[dict[str, Any]]) -> None:
    ends = [0.0] * len(rows)
    for kind, colour in COLOURS.items():
        widths = [100 * row["slots"][kind] for row in rows]
        axis.barh(range(len(rows)), widths, left=ends, color=colour, height=0.7, label=TITLES[kind])
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of all slots, mean over the steps")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(COLOURS), frameon=False, fontsize=8)
