"""An index of cached blocks beside a plain list of what was entered."""

from random import Random
from typing import Any

from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.radix_tree import RadixTree

SALTS = ("", "a")


class IndexWalk:
    """Compare an index with a dict of token lists by block and salt: look at every one, nothing clever."""

    rules: tuple[str, ...] = ("insert", "insert", "insert", "insert_tail", "match", "match", "forget")

    def __init__(self, rng: Random, index: Any, block_size: int = 2):
        self.index, self.size = index, block_size
        self.is_tree = isinstance(index, RadixTree)
        self.places: dict[tuple[str, tuple[int, ...]], Any] = {}  # where sequences stand
        self.blocks: dict[int, tuple[str, tuple[int, ...]]] = {}  # all tokens up to the end of each block
        self.next_block = 0

    def tokens(self, rng: Random, count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2) for _ in range(count))

    def insert(self, rng: Random) -> str:
        """Walk on from a block that is there, or from the root."""
        salt = rng.choice(SALTS)
        whole = [text for own_salt, text in self.blocks.values() if own_salt == salt and not len(text) % self.size]
        before = rng.choice([*whole, ()])
        return self.enter(salt, before, self.tokens(rng, self.size))

    def insert_tail(self, rng: Random) -> str | None:
        if self.size == 1:
            return None
        salt, before = "", rng.choice([t for s, t in self.blocks.values() if s == "" and not len(t) % self.size] + [()])
        return self.enter(salt, before, self.tokens(rng, rng.randrange(1, self.size)))

    def enter(self, salt: str, before: tuple[int, ...], own: tuple[int, ...]) -> str:
        block_id, text = self.next_block, before + own
        self.next_block += 1
        found = self.index.match([*before, 0], salt, len(before))
        assert len(found.block_ids) * self.size == len(before), "a block's beginning is lost"
        known = [t for s, t in self.blocks.values() if s == salt]
        place, gone = self.index.insert(found.place, list(own), block_id)
        if len(own) == self.size:
            assert self.index.match([*text, 0], salt, len(text)).place is place
        if any(each[: len(text)] == text for each in known) or (len(own) < self.size and not self.is_tree):
            assert gone == [] and block_id not in self.index
            return "known"
        shorter = [b for b, (s, t) in self.blocks.items() if s == salt and len(before) < len(t) and text[: len(t)] == t]
        assert sorted(gone) == sorted(shorter) and block_id in self.index
        for each in gone:
            del self.blocks[each]
        self.blocks[block_id] = salt, text
        return "longer" if gone else ("insert" if len(own) == self.size else "tail")

    def match(self, rng: Random) -> str:
        salt = rng.choice(SALTS)
        text = self.tokens(rng, rng.randint(1, 5 * self.size))
        limit = rng.randint(0, len(text))
        found = self.index.match(list(text), salt, limit)
        known = {t: b for b, (s, t) in self.blocks.items() if s == salt}
        count = 0
        while (count + 1) * self.size <= limit and text[: (count + 1) * self.size] in known:
            count += 1
        assert found.block_ids == [known[text[: (i + 1) * self.size]] for i in range(count)]
        start = count * self.size
        rest = text[start : min(limit, start + self.size)]
        best = max((common(t[start:], rest) for t in known if t[:start] == text[:start]), default=0)
        if not self.is_tree or best == 0:
            assert found.partial is None
            return "whole blocks" if count else "nothing"
        block_id, length = found.partial
        assert length == best == common(self.blocks[block_id][1][start:], rest) < self.size or limit < start + self.size
        assert self.blocks[block_id][0] == salt and start < len(self.blocks[block_id][1]) <= start + self.size
        return "part of a block"

    def forget(self, rng: Random) -> str | None:
        """Forget a block; in a chain one without any behind it, for those are only found again by luck."""
        texts = set(self.blocks.values())
        block_ids = [
            b
            for b, (salt, text) in self.blocks.items()
            if self.is_tree or not any(s == salt and len(t) > len(text) and t[: len(text)] == text for s, t in texts)
        ]
        if not block_ids:
            return None
        salt, text = self.blocks[block_id := rng.choice(block_ids)]
        behind = [b for b, (s, t) in self.blocks.items() if s == salt and t[: len(text)] == text]
        assert sorted(self.index.forget(block_id)) == sorted(behind)
        for each in behind:
            del self.blocks[each]
        return "forget several" if len(behind) > 1 else "forget"

    def check(self) -> None:
        self.index.check()
        assert all((b in self.index) == (b in self.blocks) for b in range(self.next_block))


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def chain_walk(rng: Random) -> IndexWalk:
    size = rng.choice([1, 2, 4])
    return IndexWalk(rng, HashChain("model", size), size)


def tree_walk(rng: Random) -> IndexWalk:
    size = rng.choice([1, 2, 4])
    return IndexWalk(rng, RadixTree(size), size)
