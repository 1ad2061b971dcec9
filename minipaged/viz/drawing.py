"""Coloured text: what the drawings for the terminal are made of."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class Span:
    """A piece of a line in one colour; ``is_filled`` puts the colour behind the text instead of into it."""

    text: str
    color: str | None = None
    is_filled: bool = False


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Drawing:
    """Lines of coloured spans. ``str`` gives the plain text, whose marks say all that the colours say."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join("".join(span.text for span in line).rstrip() for line in self.lines)

    def __add__(self, other: "Drawing") -> "Drawing":
        return Drawing(self.lines + other.lines)

    def rich(self) -> "Text":
        """Return the drawing as a rich ``Text`` with colours."""
        from rich.style import Style
        from rich.text import Text

        text = Text(no_wrap=True, overflow="crop")
        for number, line in enumerate(self.lines):
            text.append("\n" if number else "")
            for span in line:
                text.append(span.text, Style(color=span.color, reverse=span.is_filled))
        return text


def merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Join neighbours of one look: a terminal draws a few long spans faster than many short ones."""
    for (color, is_filled), run in groupby(spans, key=lambda span: (span.color, span.is_filled)):
        yield Span("".join(span.text for span in run), color, is_filled)
