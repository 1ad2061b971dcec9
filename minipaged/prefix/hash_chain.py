"""Cached blocks by the digest of everything up to their last token."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from minipaged.prefix.block_key import block_key, root_key
from minipaged.prefix.index import Match
from minipaged.tiers import replacement


@dataclass(eq=False, slots=True, weakref_slot=True)
class Entry:
    """A full block that can be found, or the root of a salt.

    ``parent`` is None for a root. ``token_ids`` are the tokens that the block's keys and values belong to.
    """

    key: bytes
    parent: "Entry | None" = None
    token_ids: tuple[int, ...] = ()
    block_id: int | None = None


class HashChain:
    """Find whole blocks by their keys, one look-up a block.

    A key names a block after all tokens up to its end. Even so an entry is accepted only if its tokens are the
    wanted ones and its parent is the entry that was accepted before it: with that, a digest that gave two blocks one
    key would cost hits and never a wrong answer.

    Args:
        namespace: See `root_key`.
        block_size: Tokens of a full block.

    Invariants:
        ``entries[key].key == key``, and one block has at most one entry.

    Cost:
        A digest and a look-up for each block of the prompt, whatever else is cached.

    Source:
        The chain of block hashes is that of vLLM's automatic prefix caching.

    Example:
        >>> chain = HashChain("model", block_size=2)
        >>> place, _ = chain.insert(chain.root(""), [1, 2], 7)
        >>> place, _ = chain.insert(place, [3, 4], 5)
        >>> chain.match([1, 2, 3, 4, 9], "", limit=4).block_ids, chain.match([1, 2, 3, 4, 9], "", limit=3).block_ids
        ([7, 5], [7])
        >>> chain.match([1, 2, 9], "other salt", limit=2).block_ids, chain.forget(7)
        ([], [7])
        >>> chain.match([1, 2, 3, 4, 9], "", limit=4).block_ids
        []
    """

    def __init__(self, namespace: str, block_size: int):
        self.namespace = namespace
        self.block_size = block_size
        self.entries: dict[bytes, Entry] = {}
        self._entry_of: dict[int, Entry] = {}  # by block
        self._roots: WeakValueDictionary[str, Entry] = WeakValueDictionary()  # gone with the last block behind it

    def root(self, salt: str) -> Entry:
        """Return the place before the first block, for requests of a salt."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Entry(root_key(self.namespace, salt))
        return root

    def match(self, token_ids: Sequence[int], salt: str, limit: int, memo: list | None = None) -> Match:
        """Return the cached whole blocks at the beginning of a sequence, as far as they end within ``limit``."""
        place = self.root(salt)
        block_ids: list[int] = []
        memo = [] if memo is None else memo
        for number in range(limit // self.block_size):
            if number == len(memo):
                own = tuple(token_ids[number * self.block_size : (number + 1) * self.block_size])
                memo.append((own, self._key(place.key, own)))
            own, key = memo[number]
            entry = self.entries.get(key)
            if entry is None or entry.parent is not place or entry.token_ids != own:
                break
            assert entry.block_id is not None
            block_ids.append(entry.block_id)
            place = entry
        return Match(place, block_ids)

    def insert(self, place: Entry, token_ids: Sequence[int], block_id: int) -> tuple[Entry, list[int]]:
        """Enter a full block; an entry of the same key that is not its equal makes room. Others have no key."""
        own = tuple(token_ids)
        if len(own) < self.block_size or self.is_gone(place):
            return place, []
        key = self._key(place.key, own)
        old = self.entries.get(key)
        if old is not None and old.parent is place and old.token_ids == own:
            return old, []
        gone = [] if old is None or old.block_id is None else self.forget(old.block_id)
        entry = self.entries[key] = self._entry_of[block_id] = Entry(key, place, own, block_id)
        return entry, gone

    def is_gone(self, place: Entry) -> bool:
        """Return whether the entry was forgotten; what stands behind it could not be reached."""
        return place.parent is not None and self.entries.get(place.key) is not place

    def forget(self, block_id: int) -> list[int]:
        """Forget a block. Those behind it cannot be reached any more and are evicted in their turn."""
        del self.entries[self._entry_of.pop(block_id).key]
        return [block_id]

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._entry_of

    def _key(self, parent: bytes, token_ids: tuple[int, ...]) -> bytes:
        return (replacement("block_key") or block_key)(parent, token_ids)

    def check(self) -> None:
        """Assert the invariants."""
        assert {id(entry) for entry in self.entries.values()} == {id(entry) for entry in self._entry_of.values()}
        for block_id, entry in self._entry_of.items():
            assert self.entries[entry.key] is entry and entry.block_id == block_id and entry.parent is not None
            assert len(entry.token_ids) == self.block_size
            assert entry.key == self._key(entry.parent.key, entry.token_ids), (
                f"block {block_id} is not what it is called"
            )
