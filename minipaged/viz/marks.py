"""The marks that every drawing for the terminal uses."""

from minipaged.viz.drawing import Span

FREE, CACHED, EMPTY, LOST, SHARED, MIXED, UNOWNED = ".", "=", "_", "-", "#", "+", "?"

NOTES = {
    FREE: "free",
    CACHED: "free, content cached",
    EMPTY: "taken, empty",
    LOST: "lost to rounding",
    SHARED: "shared",
    MIXED: "several sequences",
    UNOWNED: "in use, in no table",
}
"""What a legend says of each mark that is no letter."""

MAX_NAMED = 8
"""Most sequences that a legend names and most block tables that one picture shows."""


def slot_bar(mark: str, filled: int, block_size: int, color: str) -> list[Span]:
    """Return one block, a character a slot: the filled ones marked, the others empty."""
    return [Span(mark * filled, color, is_filled=True), Span(EMPTY * (block_size - filled), color)]
