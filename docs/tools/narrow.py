"""What a page needs on a narrow screen: tables whose rows can be stacked, whole options, a list of its parts."""

import re
from collections.abc import Sequence
from html import escape
from itertools import count

from mkdocs.structure.toc import AnchorLink

TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
CELL = re.compile(r"<td(?: style=\"[^\"]*\")?>.*?</td>", re.DOTALL)
NUMBER = re.compile(r"\s*[-+]?\d[\d.,]*\s*%?\s*")
OPTION = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")

FEWEST_COLUMNS = 3
"""Tables of two columns have room on a telephone."""

FEWEST_PARTS = 4
"""A page of fewer parts needs no list of them."""


def part_code(html: str) -> str:
    """Let long names in tables break at their underscores, and nowhere else; options do not break at their hyphens.

    Example:
        >>> part_code("<td><code>max_tokens</code></td>")
        '<td><code>max_<wbr>tokens</code></td>'
        >>> part_code("<td><code>--num-blocks 16</code></td>")
        '<td><code><span class="whole">--num-blocks</span> 16</code></td>'
    """

    def parted(code: re.Match[str]) -> str:
        whole = OPTION.sub(lambda option: f'<span class="whole">{option[0]}</span>', code[0])
        return whole.replace("_", "_<wbr>")

    return CELL.sub(lambda cell: re.sub(r"<code>[^<]*</code>", parted, cell[0]), html)


def stack_tables(html: str) -> str:
    """Give each cell of a table of words its column's name, so that rows can be shown one under the other.

    Tables of numbers are left alone: numbers are compared along a column.

    Example:
        >>> head, row = "<tr><th>a</th><th>b</th><th>c</th></tr>", "<tr><td>x</td><td>y</td><td>z</td></tr>"
        >>> print(stack_tables(f"<table>{head}{row}</table>").partition("</th></tr>")[2])
        <tr><td data-head="a">x</td><td data-head="b">y</td><td data-head="c">z</td></tr></table></div>
    """

    def stacked(table: re.Match[str]) -> str:
        heads = [escape(re.sub(r"<[^>]+>", "", head), quote=True) for head in HEAD.findall(table[0])]
        if len(heads) < FEWEST_COLUMNS or "text-align: right" in table[0] or _is_of_numbers(table[0]):
            return table[0]
        return f'<div class="stacked">{ROW.sub(lambda row: _named(row[0], heads), table[0])}</div>'

    return TABLE.sub(stacked, html)


def _is_of_numbers(table: str) -> bool:
    """Return whether most cells behind the first column are numbers."""
    rows = [CELL.findall(row)[1:] for row in ROW.findall(table)]
    texts = [re.sub(r"<[^>]+>", "", cell) for row in rows for cell in row]
    return sum(bool(NUMBER.fullmatch(text)) for text in texts) > len(texts) / 2


def _named(row: str, heads: Sequence[str]) -> str:
    column = count()
    return re.sub(r"<td(?=[ >])", lambda cell: f'<td data-head="{heads[next(column)]}"', row)


def list_parts(html: str, anchors: Sequence[AnchorLink], label: str) -> str:
    """Put links to a page's parts behind its title, for screens that have no room for them beside the text."""
    parts = anchors[0].children if len(anchors) == 1 else []
    if len(parts) < FEWEST_PARTS:
        return html
    links = "\n".join(f'<a href="{part.url}">{part.title}</a>' for part in parts)
    contents = f'<nav class="parts" aria-label="{label}" data-search-exclude>{links}</nav>'
    return html.replace("</h1>", f"</h1>\n{contents}", 1)
