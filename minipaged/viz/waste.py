"""Where a cache's slots are: one bar of the whole memory, split by what the cache's own books say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minipaged.viz.canvas import INK, TEXT_WIDTH, Canvas, Svg, legend
from minipaged.viz.drawing import Drawing, Line, Span
from minipaged.viz.views import CACHED_COLOR, FREE_GREY, WASTE_COLOR


@dataclass(frozen=True)
class WasteView:
    """A cache's slots by kind; see `Waste`. ``cached`` of the free ones hold content that can be found again."""

    num_slots: int
    token_states: int
    reserved: int
    internal: int
    external: int
    cached: int = 0

    @property
    def free(self) -> int:
        """Return the slots that nobody has."""
        return self.num_slots - self.token_states - self.reserved - self.internal - self.external

    @property
    def kinds(self) -> dict[str, int]:
        """Return the slots of each kind; the cached ones are not counted as free here."""
        return {
            "used": self.token_states,
            "reserved": self.reserved,
            "internal": self.internal,
            "external": self.external,
            "cached": self.cached,
            "free": self.free - self.cached,
        }


def view_waste(cache: Any, output_lengths: dict[int, int] | None = None) -> WasteView:
    """Copy what a cache says of its slots now.

    Args:
        cache: Any rung's bookkeeping: an arena, or block tables over a pool.
        output_lengths: Tokens that each sequence will have generated when it ends: only with them can it be told
            which of the reserved slots nobody will use.

    Example:
        >>> from minipaged.contiguous.arena import Arena
        >>> arena = Arena(num_slots=32, max_model_len=14)
        >>> arena.allocate(7, num_prompt_tokens=5, num_output_tokens=3)
        0
        >>> view_waste(arena, {7: 3}), view_waste(arena).free
        (WasteView(num_slots=32, token_states=5, reserved=3, internal=6, external=2, cached=0), 16)
    """
    waste = cache.waste(output_lengths)
    pool = getattr(cache, "pool", None)
    num_slots = cache.num_slots if pool is None else pool.num_blocks * pool.block_size
    cached = 0 if pool is None else getattr(pool, "num_idle", 0) * pool.block_size
    return WasteView(num_slots, waste.token_states, waste.reserved, waste.internal, waste.external, cached)


_PALE_WASTE = "#D9B8C6"

MARKS = {
    "used": ("T", INK, "holds a token"),
    "reserved": ("_", "#DDDDDD", "reserved, empty"),
    "internal": ("x", WASTE_COLOR, "internal: taken, never used"),
    "external": ("-", _PALE_WASTE, "external: lost to rounding"),
    "cached": ("=", CACHED_COLOR, "free, content cached"),
    "free": (".", FREE_GREY, "free"),
}
"""Mark, colour and note of each kind."""


def draw_waste(waste: WasteView | Mapping[str, WasteView], width: int = 80) -> Drawing:
    """Draw a bar of the memory for each cache, and the numbers below.

    Args:
        waste: One view, or several by name, each with a bar of the same length.
        width: Columns to use.

    Example:
        >>> print(draw_waste({"max": WasteView(32, 5, 3, 6, 2), "paged": WasteView(32, 5, 0, 3, 0)}, width=40))
        where the slots are
        max    TTTTT___xxxxxx--................
        paged  TTTTTxxx........................
        of the slots  max  paged
        T               5      5  holds a token
        _               3      0  reserved, empty
        x               6      3  internal: taken, never used
        -               2      0  external: lost to rounding
        .              16     24  free
        all            32     32
    """
    views = _named(waste)
    left = max(map(len, views)) + 2 if any(views) else 0
    lines: list[Line] = [(Span("where the slots are"),)]
    for name, view in views.items():
        most = max(6, width - left)
        shares = _shares(view, min(most, view.num_slots))
        bar = [Span(MARKS[kind][0] * count, MARKS[kind][1], is_filled=True) for kind, count in shares.items() if count]
        lines.append((Span(f"{name:<{left}}"), *bar))
    return Drawing((*lines, *_table(views)))


def draw_waste_svg(waste: WasteView | Mapping[str, WasteView], width: int = 720) -> Svg:
    """Draw a bar of the memory for each cache, with the number of slots in each part that has room for it.

    Example:
        >>> picture = draw_waste_svg(WasteView(32, 5, 3, 6, 2))
        >>> [f">{number}<" in picture for number in (5, 3, 6, 2, 16)]
        [True, True, True, True, True]
    """
    views = _named(waste)
    canvas = Canvas(width, "where the slots are")
    left = 8 + (TEXT_WIDTH * max(map(len, views)) + 8 if any(views) else 0)
    for row, (name, view) in enumerate(views.items()):
        x, y, scale = left, 26 + row * 30, (width - left - 8) / view.num_slots
        canvas.text(left - 8, y + 15, name, "end")
        for kind, count in view.kinds.items():
            canvas.rect(x, y, count * scale, 22, MARKS[kind][1])
            if count * scale > TEXT_WIDTH * len(str(count)) + 2:
                canvas.text(x + count * scale / 2, y + 15, str(count), "middle")
            x += count * scale
        canvas.frame(left, y, width - left - 8, 22)
    notes = [(MARKS[kind][1], MARKS[kind][2]) for kind in _present(views)]
    return canvas.finish(legend(canvas, 30 + len(views) * 30, [], notes))


def _named(waste: WasteView | Mapping[str, WasteView]) -> Mapping[str, WasteView]:
    return {"": waste} if isinstance(waste, WasteView) else waste


def _present(views: Mapping[str, WasteView]) -> list[str]:
    return [kind for kind in MARKS if any(view.kinds[kind] for view in views.values())]


def _shares(view: WasteView, length: int) -> dict[str, int]:
    """Return how many of ``length`` characters each kind gets: one at least if it has a slot at all."""
    counts = view.kinds
    shares = {kind: max(bool(count), count * length // view.num_slots) for kind, count in counts.items()}
    while sum(shares.values()) != length:  # what rounding has left or taken goes to whom it changes least
        sign = 1 if sum(shares.values()) < length else -1
        kind = max(
            (kind for kind in shares if counts[kind] and (sign > 0 or shares[kind] > 1)),
            key=lambda kind: sign * (counts[kind] * length / view.num_slots - shares[kind]),
        )
        shares[kind] += sign
    return shares


def _table(views: Mapping[str, WasteView]) -> list[Line]:
    """Return the numbers: a row for each kind that occurs, a column for each cache."""
    widths = [max(len(name), len(str(view.num_slots))) for name, view in views.items()]
    names = "".join(f"  {name:>{width}}" for name, width in zip(views, widths, strict=True))
    lines: list[Line] = [(Span("of the slots" + names),)] if any(views) else []
    first = 12 if any(views) else 3
    for kind in _present(views):
        mark, color, note = MARKS[kind]
        numbers = "".join(f"  {view.kinds[kind]:>{w}}" for view, w in zip(views.values(), widths, strict=True))
        lines.append((Span(mark, color, is_filled=True), Span(" " * (first - 1) + numbers + "  " + note)))
    sums = "".join(f"  {view.num_slots:>{width}}" for view, width in zip(views.values(), widths, strict=True))
    return [*lines, (Span(f"{'all':<{first}}" + sums),)]
