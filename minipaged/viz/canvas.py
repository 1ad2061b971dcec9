"""What the drawings in SVG are made of: a canvas, a legend, a bar of slots.

A picture has a white ground of its own, so it can be read on a dark page too.
"""

from collections.abc import Iterable, Sequence
from html import escape

from minipaged.viz.views import hue, letter

TEXT_WIDTH = 6.7
"""What a character takes at most, in the fonts named here and at the size used."""

_FONT = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="11"'
INK = "#333333"
_INK_ON_HALO = f'fill="{INK}" stroke="#FFFFFF" stroke-width="3" paint-order="stroke" xml:space="preserve"'


class Svg(str):
    """A picture's source that Jupyter shows as the picture."""

    def _repr_svg_(self) -> str:
        return str(self)


class Canvas:
    """Collects shapes and the hatch patterns they need; the title stands at the top and is what a reader hears.

    Args:
        width: Width of the picture. Whoever draws stays within it.
        title: Cut where it does not fit.
    """

    def __init__(self, width: int, title: str) -> None:
        self.width, self.title = width, title
        self._shapes: list[str] = []
        self._patterns: dict[str, str] = {}
        self.text(8, 16, fit(title, width - 16))

    def rect(self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> None:
        """Fill a rectangle."""
        faded = "" if opacity == 1.0 else f' fill-opacity="{opacity:g}"'
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{faded}/>')

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw the edge of a rectangle."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{INK}"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dash: str = "") -> None:
        """Draw a line, in dashes such as "3 2"."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._shapes.append(f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{INK}" fill="none"{dashed}/>')

    def grid(self, xs: Iterable[float], y: float, height: float) -> None:
        """Draw upright lines as one shape: many cells stay a small file."""
        if points := " ".join(f"M{x:g} {y:g} L{x:g} {y + height:g}" for x in xs):
            self._shapes.append(f'<path d="{points}" stroke="{INK}" fill="none"/>')

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write a line of text, on a halo that keeps it readable on any colour."""
        shown = escape("".join(char if char.isprintable() else "?" for char in text))  # XML has no control characters
        self._shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {_INK_ON_HALO}>{shown}</text>')

    def hatch(self, first: str, second: str) -> str:
        """Return a fill of slanted stripes in two colours. Its name is made of them, so equal names look equal."""
        name = f"hatch-{first[1:]}-{second[1:]}"
        self._patterns[name] = (
            f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            f'<rect width="6" height="6" fill="{first}"/><rect width="3" height="6" fill="{second}"/></pattern>'
        )
        return f"url(#{name})"

    def finish(self, height: float) -> Svg:
        """Return the picture."""
        defs = "".join(self._patterns[name] for name in sorted(self._patterns))
        return Svg(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {height:g}" width="{self.width:g}" '
            f'height="{height:g}" role="img" {_FONT}><title>{escape(self.title)}</title><defs>{defs}</defs>'
            f'<rect width="100%" height="100%" fill="#FFFFFF"/>{"".join(self._shapes)}</svg>'
        )


def fit(text: str, width: float) -> str:
    """Return a text, cut if it is wider than ``width``.

    Example:
        >>> fit("a pool of 8 blocks", 60), fit("pool", 60)
        ('a poo...', 'pool')
    """
    most = int(width / TEXT_WIDTH)
    return text if len(text) <= most else text[: max(0, most - 3)] + "..."


def legend(canvas: Canvas, y: float, seq_ids: Sequence[int], others: Sequence[tuple[str, str]]) -> float:
    """Draw a swatch for each sequence and each of the others (fill, note), in lines; return the height reached."""
    named = [(hue(seq_id), f"{letter(seq_id)} = sequence {seq_id}") for seq_id in list(dict.fromkeys(seq_ids))[:8]]
    x = 8.0
    for fill, note in [*named, *others]:
        needed = 26 + 7 * len(note)
        if x > 8 and x + needed > canvas.width:
            x, y = 8.0, y + 18
        canvas.rect(x, y, 12, 12, fill)
        canvas.frame(x, y, 12, 12)
        canvas.text(x + 17, y + 10, fit(note, canvas.width - x - 19))
        x += needed
    return y + 20


def slot_bar(canvas: Canvas, box: tuple[float, float, float, float], fill: str, filled: int, block_size: int) -> None:
    """Draw one block: the part with tokens full, the empty part pale, lines between slots while they are few."""
    x, y, width, height = box
    used = width * filled / block_size
    if used:
        canvas.rect(x, y, used, height, fill)
    if used < width:
        canvas.rect(x + used, y, width - used, height, fill, opacity=0.25)
    for slot in range(1, block_size if block_size <= 16 else 0):
        canvas.rect(x + width * slot / block_size - 0.5, y, 1, height, "#FFFFFF")
    canvas.frame(x, y, width, height)
