"""The prefix index as it is: which blocks can be found, behind which."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from minipaged.viz.canvas import Canvas, Svg, fit, legend, slot_bar
from minipaged.viz.drawing import Drawing, Line, Span
from minipaged.viz.marks import CACHED, SHARED
from minipaged.viz.views import CACHED_COLOR, FREE_GREY, hue, letter


@dataclass(frozen=True)
class NodeView:
    """A block that can be found.

    Args:
        depth: How many blocks stand before it.
        block_id: The block.
        token_ids: What it holds.
        key: The first digits of its key, in a hash chain.
        seq_ids: Who uses it now; None if the view was taken of an index alone.
    """

    depth: int
    block_id: int
    token_ids: tuple[int, ...]
    key: str | None = None
    seq_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class IndexView:
    """The blocks behind each salt, every block before those that follow it."""

    kind: str
    block_size: int
    roots: tuple[tuple[str, tuple[NodeView, ...]], ...]

    @property
    def num_blocks(self) -> int:
        """Return how many blocks can be found."""
        return sum(len(nodes) for _, nodes in self.roots)


def view_index(index: Any) -> IndexView:
    """Copy what a prefix index says now.

    Args:
        index: A `HashChain`, a `RadixTree`, or a `PrefixCache`, which also says who uses the blocks.

    Example:
        >>> from minipaged.prefix.radix_tree import RadixTree
        >>> tree = RadixTree(block_size=2)
        >>> place, _ = tree.insert(tree.root(""), [1, 2], 7)
        >>> _ = tree.insert(place, [3, 4], 5)
        >>> [(node.depth, node.block_id) for _, nodes in view_index(tree).roots for node in nodes]
        [(0, 7), (1, 5)]
    """
    tables = getattr(index, "tables", None)
    users: dict[int, list[int]] | None = None
    if tables is not None:
        users = {}
        for seq_id, table in tables.items():
            for block_id in table.owned_block_ids:
                users.setdefault(block_id, []).append(seq_id)
        index = index.index
    is_chain = hasattr(index, "entries")
    children = _chain_children(index) if is_chain else lambda node: node.by_tokens.values()

    def nodes(place: Any, depth: int) -> Iterator[NodeView]:
        waiting = [(child, depth) for child in reversed(list(children(place)))]
        while waiting:
            node, depth = waiting.pop()
            seq_ids = None if users is None else tuple(users.get(node.block_id, ()))
            key = node.key.hex()[:8] if is_chain else None
            yield NodeView(depth, node.block_id, node.token_ids, key, seq_ids)
            waiting += [(child, depth + 1) for child in reversed(list(children(node)))]

    roots = tuple((salt, tuple(nodes(root, 0))) for salt, root in sorted(index._roots.items()))
    roots = tuple(root for root in roots if root[1])  # a sequence in its first block keeps a root without one
    return IndexView("hash chain" if is_chain else "radix tree", index.block_size, roots)


def _chain_children(chain: Any) -> Callable[[Any], Sequence[Any]]:
    """Return who stands behind an entry. The chain itself never asks that: entries know their parents alone."""
    behind: dict[int, list[Any]] = {}
    for entry in chain.entries.values():
        behind.setdefault(id(entry.parent), []).append(entry)
    return lambda entry: behind.get(id(entry), ())


TextOf = Callable[[tuple[int, ...]], str]
"""Turns the tokens of a block into text."""


def draw_index(view: IndexView, width: int = 80, max_rows: int = 24, text_of: TextOf | None = None) -> Drawing:
    """Draw an index: a row for each block, further right than the block it follows.

    Args:
        view: The index at one moment.
        width: Columns to use.
        max_rows: What is beyond is left out, and the drawing says so.
        text_of: Shows text instead of token ids.

    Example:
        >>> from minipaged.prefix.radix_tree import RadixTree
        >>> tree = RadixTree(block_size=2)
        >>> place, _ = tree.insert(tree.root(""), [1, 2], 7)
        >>> _ = tree.insert(place, [3, 4], 5), tree.insert(place, [3], 6), tree.insert(place, [8], 6)
        >>> print(draw_index(view_index(tree)))
        radix tree: 3 blocks can be found, of 2 slots
        no salt
          7 [1 2]
            5 [3 4]
            6 [8]
    """
    lines: list[Line] = [(Span(heading(view)),)]
    marks: set[str] = set()
    for salt, node in rows_of(view)[:max_rows]:
        if node is None:
            lines.append((Span(salt),))
            continue
        mark, color, _ = use_of(node)
        marks.add(mark)
        before = f"{' ' * min(2 * node.depth + 2, width // 2)}{node.block_id}{' ' * bool(mark)}"
        content = " " + content_of(node, text_of)
        lines.append((Span(before), Span(mark, color), Span(content[: max(0, width - len(before + mark))])))
    if (num_left := len(rows_of(view)) - max_rows) > 0:
        lines.append((Span(f"... {num_left} more rows"),))
    notes = {SHARED: "several sequences use it", CACHED: "nobody uses it"}
    known = [f"{mark} {note}" for mark, note in notes.items() if mark in marks]
    if any(map(str.isalpha, marks)):
        known.insert(0, "a letter: the sequence that uses it")
    return Drawing((*lines, *([(Span("   ".join(known), FREE_GREY),)] if known else [])))


def draw_index_svg(view: IndexView, width: int = 720, max_rows: int = 48, text_of: TextOf | None = None) -> Svg:
    """Draw an index: a bar of slots for each block, below and right of the block it follows, and what it holds.

    Colours are those of the pool: a sequence's hue, hatched where several use the block, pale green where nobody does.

    Example:
        >>> from minipaged.prefix.hash_chain import HashChain
        >>> chain = HashChain("model", block_size=2)
        >>> place, _ = chain.insert(chain.root(""), [1, 2], 7)
        >>> place, _ = chain.insert(place, [3, 4], 5)
        >>> picture = draw_index_svg(view_index(chain))
        >>> "no salt" in picture, "[3 4]" in picture, picture.count(f'fill="{CACHED_COLOR}"')  # 2 blocks
        (True, True, 2)
    """
    canvas = Canvas(width, heading(view))
    rows = rows_of(view)
    parents: dict[int, tuple[float, float]] = {}  # by depth, where the last block's lower end is
    uses: dict[str, str] = {}
    y = 26.0
    for salt, node in rows[:max_rows]:
        if node is None:
            canvas.text(8, y + 13, fit(salt, width - 16))
            parents = {-1: (14, y + 18)}
        else:
            x = 8 + min(20 * (node.depth + 1), width / 3)
            left, top = parents[node.depth - 1]
            canvas.line(left, top, left, y + 9)
            canvas.line(left, y + 9, max(left, x), y + 9)
            uses |= _draw_node(canvas, view, node, (x, y), text_of)
            parents[node.depth] = (x + 6, y + 18)
        y += 24
    if len(rows) > max_rows:
        canvas.text(8, y + 13, f"... {len(rows) - max_rows} more rows")
        y += 20
    return canvas.finish(legend(canvas, y + 4, [], [(fill, note) for note, fill in sorted(uses.items())]))


def _draw_node(
    canvas: Canvas, view: IndexView, node: NodeView, place: tuple[float, float], text_of: TextOf | None
) -> dict[str, str]:
    """Draw one block, and return its note and fill for the legend."""
    x, y = place
    mark, color, note = use_of(node)
    fill = canvas.hatch(color, hue(node.seq_ids[1])) if mark == SHARED and node.seq_ids else color
    slot_bar(canvas, (x, y, 64, 18), fill, len(node.token_ids), view.block_size)
    canvas.text(x + 32, y + 13, str(node.block_id), "middle")
    canvas.text(x + 72, y + 13, fit(content_of(node, text_of), canvas.width - x - 80))
    if mark == SHARED:
        fill, note = canvas.hatch("#777777", "#FFFFFF"), "hatched = shared"
    return {note: fill} if note else {}


def heading(view: IndexView) -> str:
    """Return what can be found, in one line."""
    return f"{view.kind}: {view.num_blocks} blocks can be found, of {view.block_size} slots"


def rows_of(view: IndexView) -> list[tuple[str, NodeView | None]]:
    """Return a row for each salt, and behind it one for each of its blocks."""
    rows: list[tuple[str, NodeView | None]] = []
    for salt, nodes in view.roots:
        name = f"salt {salt!r}" if salt else "no salt"
        rows += [(name, None), *((name, node) for node in nodes)]
    return rows


def use_of(node: NodeView) -> tuple[str, str, str]:
    """Return mark, colour and note for who uses a block."""
    if node.seq_ids is None:
        return "", CACHED_COLOR, ""
    if not node.seq_ids:
        return CACHED, CACHED_COLOR, "free, content cached"
    first = node.seq_ids[0]
    mark = SHARED if len(node.seq_ids) > 1 else letter(first)
    return mark, hue(first), f"{letter(first)} = sequence {first}"


def content_of(node: NodeView, text_of: TextOf | None) -> str:
    """Return what a block holds, and its key."""
    held = repr(text_of(node.token_ids)) if text_of else f"[{' '.join(map(str, node.token_ids))}]"
    return held if node.key is None else f"{node.key} {held}"
