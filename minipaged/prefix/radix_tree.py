"""Cached blocks in a tree of their tokens."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from minipaged.prefix.index import Match


@dataclass(eq=False, slots=True, weakref_slot=True)
class Node:
    """A block behind a given beginning; the root of a salt has no block.

    Only a leaf may hold fewer tokens than a block has slots. ``by_tokens`` has the children by what they hold, and
    ``in_order`` the same tokens sorted. ``is_gone`` marks one that a sequence may still hold as its place.
    """

    token_ids: tuple[int, ...] = ()
    block_id: int | None = None
    parent: "Node | None" = None
    by_tokens: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    in_order: list[tuple[int, ...]] = field(default_factory=list)
    is_gone: bool = False


class RadixTree:
    """Find the longest cached beginning of a prompt, to the token.

    Each edge is a block's worth of tokens. The walk goes down while a child holds just the next ones. At the end of
    it one child may still begin as the prompt goes on: its block is worth copying. In the sorted list of children
    that one stands next to where the prompt's own tokens would stand, so nobody else has to be looked at.

    Args:
        block_size: Tokens of a full block.

    Invariants:
        A node's block is behind its parent's, token for token. One block has at most one node.

    Cost:
        A look-up for each block of the prompt, and a binary search among the children of the last. To enter or forget
        a block moves the pointers to its siblings, 8 bytes each: 40 us among 100,000 of them.

    Source:
        RadixAttention of SGLang (Zheng et al., 2024), whose edges are runs of tokens of any length, split on demand.
        Here every edge is a block, as everywhere on this ladder, so strictly this is a trie of blocks.

    Example:
        >>> tree = RadixTree(block_size=4)
        >>> place, _ = tree.insert(tree.root(""), [1, 2, 3, 4], 7)
        >>> place, _ = tree.insert(place, [5, 6, 7, 8], 2)
        >>> found = tree.match([1, 2, 3, 4, 5, 6, 9, 9], "", limit=7)
        >>> found.block_ids, found.partial
        ([7], (2, 2))
        >>> tree.forget(7)
        [7, 2]
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._node_of: dict[int, Node] = {}  # by block
        self._roots: WeakValueDictionary[str, Node] = WeakValueDictionary()  # gone with the last block behind it

    def root(self, salt: str) -> Node:
        """Return the place before the first block, for requests of a salt."""
        return self._roots.setdefault(salt, Node())

    def match(self, token_ids: Sequence[int], salt: str, limit: int, memo: list | None = None) -> Match:
        """Return the whole blocks at the beginning of a sequence, and one that goes on with it for some tokens."""
        node = self.root(salt)
        block_ids: list[int] = []
        start = 0
        memo = [] if memo is None else memo
        while start + self.block_size <= limit:
            if len(block_ids) == len(memo):
                memo.append(tuple(token_ids[start : start + self.block_size]))
            child = node.by_tokens.get(memo[len(block_ids)])
            if child is None:
                break
            assert child.block_id is not None
            block_ids.append(child.block_id)
            node, start = child, start + self.block_size
        return Match(
            node, block_ids, self._partial(node, tuple(token_ids[start : min(limit, start + self.block_size)]))
        )

    def _partial(self, node: Node, wanted: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the child that has the most first tokens in common with the wanted ones, and how many."""
        place = bisect_left(node.in_order, wanted)
        best: tuple[int, int] | None = None
        for tokens in node.in_order[max(0, place - 1) : place + 1]:
            length = num_common(tokens, wanted)
            block_id = node.by_tokens[tokens].block_id
            if block_id is not None and length > (best[1] if best else 0):
                best = block_id, length
        return best

    def is_gone(self, place: Node) -> bool:
        """Return whether the node was forgotten, with all before it or alone."""
        return place.is_gone

    def insert(self, place: Node, token_ids: Sequence[int], block_id: int) -> tuple[Node, list[int]]:
        """Enter a block, unless a child begins with its tokens. A leaf that is only its beginning makes room."""
        own = tuple(token_ids)
        if own in place.by_tokens:
            return place.by_tokens[own], []
        found = self._partial(place, own)
        if not own or place.is_gone or (found is not None and found[1] == len(own)):
            return place, []
        gone: list[int] = []
        before = bisect_left(place.in_order, own) - 1
        if before >= 0 and own[: len(place.in_order[before])] == place.in_order[before]:
            gone = self._remove(place.by_tokens[place.in_order[before]])
        node = place.by_tokens[own] = self._node_of[block_id] = Node(own, block_id, place)
        insort(place.in_order, own)
        return node, gone

    def forget(self, block_id: int) -> list[int]:
        """Forget a block and all behind it, which cannot be reached without it."""
        return self._remove(self._node_of[block_id])

    def _remove(self, node: Node) -> list[int]:
        assert node.parent is not None
        del node.parent.by_tokens[node.token_ids]
        del node.parent.in_order[bisect_left(node.parent.in_order, node.token_ids)]
        gone, waiting = [], [node]
        while waiting:
            node = waiting.pop()
            waiting += node.by_tokens.values()
            node.by_tokens, node.in_order = {}, []  # or parent and child would keep each other
            node.is_gone = True
            assert node.block_id is not None
            gone.append(node.block_id)
            del self._node_of[node.block_id]
        return gone

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._node_of

    def check(self) -> None:
        """Assert the invariants."""
        seen = {}
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            assert node.in_order == sorted(node.by_tokens)
            for tokens, child in node.by_tokens.items():
                assert child.token_ids == tokens and child.parent is node and 0 < len(tokens) <= self.block_size
                assert len(tokens) == self.block_size or not child.by_tokens, "a part-full block is not the last"
                seen[child.block_id] = child
            waiting += node.by_tokens.values()
        assert seen == self._node_of


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens two pieces have in common.

    Example:
        >>> num_common((1, 2, 3), (1, 2, 4, 5))
        2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
