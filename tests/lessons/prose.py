"""The numbers in a lesson's text and in what its cells print."""

import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

_THOUSANDS = r"\d{1,3}(?:,\d{3})+"
_NUMBER = rf"(?:{_THOUSANDS}|\d+)(?:\.\d+)?"
_UNIT_OF_TIME = (
    r"(?:s|ms|us|µs|ns|min|h|seconds?|minutes?|hours?|milliseconds?|microseconds?|tokens?(?:/s| per second))"
)

_IS_TIMING = re.compile(rf"(?<![\w.,])({_NUMBER})[ -]?{_UNIT_OF_TIME}(?![\w/])")
_IN_PROSE = re.compile(rf"(?<![\w.])(?:{_NUMBER})(?=(?:x\b)?(?!\w))(?!\.\d)")
_IN_OUTPUT = re.compile(_NUMBER)

_NO_NUMBERS = [
    re.compile(r"^(`{3,}|~{3,}).*?^\1", re.DOTALL | re.MULTILINE),  # code
    re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+"),  # where a link leads
    re.compile(r"</?\w[^<>]*>|&#?\w+;"),  # HTML
    re.compile(r"^\s*(?:> *)?(?:#+ )?\d+\.(?= )", re.MULTILINE),  # the number of a list's item or of a heading
    re.compile(r"(?<=[\w\])])\[[\d:, -]*\]"),  # an index: block_ids[0]
    re.compile(r"(?<=[A-Za-z])-\d[\w.]*"),  # a name: gpt-2
    re.compile(r"(?<![\w.])\d+(?:\.\d+){2,}"),  # a version: 3.11.7
    re.compile(r"(?<![\w.,-])0\d(?![\w.,]\d|\w)"),  # the number of a lesson: 03
]


def without_code(text: str) -> str:
    """Return Markdown without what holds digits but tells no number."""
    for pattern in _NO_NUMBERS:
        text = pattern.sub(" ", text)
    return text


def numbers_in(text: str) -> list[str]:
    """Return the numbers of a Markdown cell, without separators of thousands, each once.

    Example:
        >>> numbers_in("2,048 slots, 3.5x, and `S = 4`; but `q[0]`, fp16, lesson 02a or 03, and [a link](a/7.md)")
        ['2048', '3.5', '4']
    """
    found = (plain(match[0]) for match in _IN_PROSE.finditer(without_code(text)))
    return list(dict.fromkeys(found))


def timings_in(text: str) -> list[str]:
    """Return the numbers of a Markdown cell that are durations or speeds.

    Example:
        >>> timings_in("12 ms for 5 steps, at 40.5 tokens/s")
        ['12', '40.5']
    """
    return [plain(match[1]) for match in _IS_TIMING.finditer(without_code(text))]


def plain(number: str) -> str:
    """Return a number without separators of thousands."""
    return number.replace(",", "")


def texts_of(outputs: Iterable[Any]) -> Iterator[str]:
    """Yield what the outputs of a notebook's cell say in words."""
    for output in outputs:
        yield output.get("text", "") or output.get("data", {}).get("text/plain", "")


def numbers_shown(text: str) -> set[str]:
    """Return the numbers of an output. A comma may separate thousands or the items of a list: both readings count."""
    found = [match[0] for match in _IN_OUTPUT.finditer(text)]
    return {plain(number) for number in found} | {part for number in found for part in number.split(",")}


def is_shown(number: str, shown: set[str]) -> bool:
    """Return whether a number of the text is among those shown; one with decimals may be rounded.

    Example:
        >>> is_shown("2.67", {"2.6667"}), is_shown("3", {"2.6667"})
        (True, False)
    """
    if number in shown:
        return True
    wanted = Decimal(number)
    places = Decimal(1).scaleb(int(wanted.as_tuple().exponent))
    candidates = (Decimal(each) for each in shown)
    return any(each == wanted or ("." in number and each.quantize(places) == wanted) for each in candidates)
