"""The bookkeeping of blocks that are found again by what they hold."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from minipaged.batching.cache import BatchingCache, PartialTable, Room, Swapped
from minipaged.errors import AccountingError
from minipaged.paged.block_table import num_blocks_for
from minipaged.prefix.caching_pool import CachingBlockPool
from minipaged.prefix.eviction import EvictionPolicy
from minipaged.prefix.index import Match, PrefixIndex
from minipaged.prefix.walk import Coming, PrefixSwapped, Walk
from minipaged.tiers import replacement


@dataclass(frozen=True)
class PrefixRoom(Room):
    """Rung 4's room, and what to look for in the cache.

    Args:
        token_ids: The tokens of each sequence, prompt and output. The lists grow as the sequences do.
        salt: Whose blocks may be found.
        limits: How many tokens of each may come out of the cache; what is behind them is computed in any case.
        memos: What the index keeps between two looks for the same sequences.
    """

    token_ids: list[list[int]]
    salt: str
    limits: list[int]
    memos: list[list] = field(default_factory=list, compare=False)


@dataclass(frozen=True)
class Finding:
    """What the cache has for each sequence of a room, and what is missing.

    ``num_shared`` blocks of the first sequence's table serve the others too. ``num_new`` blocks must be allocated.
    ``num_idle`` would be taken out of the free ones by being used again.
    """

    matches: list[Match]
    num_shared: int
    num_new: int
    num_idle: int


class PrefixCache(BatchingCache):
    """Rung 4's cache, in which a request takes over the blocks that hold the beginning of its prompt.

    Changes of rung 4: a block that a sequence has filled is entered into an index when its keys and values are
    written (`note_computed`), and stays there when its last user leaves, until the block is needed. `allocate` looks
    there first. Full blocks are shared. A block that only begins as the prompt goes on is copied.

    Two requests that arrive together and begin alike would both compute the beginning. So `can_admit` lets the second
    one wait as long as a running request is about to write its next block.

    Args:
        index: Finds the blocks.
        policy: Orders the cached blocks that nobody uses.

    Invariants:
        A block of the index is in use, or with the policy; nobody writes to its cached slots.

    Example:
        S = 4. The second request finds two whole blocks of the first.

        >>> from minipaged.prefix.eviction import LRU
        >>> from minipaged.prefix.hash_chain import HashChain
        >>> cache = PrefixCache(8, 4, None, HashChain("model", 4), LRU())
        >>> prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> room = PrefixRoom([7], [9], 0, 1, [prompt], "", [8])
        >>> cache.allocate(room)
        [0]
        >>> cache.note_computed(7, 9, prompt)
        >>> cache.free(7)
        >>> cache.pool.num_free, cache.pool.num_idle
        (8, 2)
        >>> cache.allocate(PrefixRoom([8], [9], 0, 1, [prompt], "", [8])), cache.tables[8].block_ids
        ([8], [0, 1, 3])
    """

    pool: CachingBlockPool

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        window: int | None,
        index: PrefixIndex,
        policy: EvictionPolicy,
    ):
        self.index = index
        self.policy = policy
        self.num_hit_tokens = 0
        self._walks: dict[int, Walk] = {}
        self._coming: Counter[Coming] = Counter()  # blocks that are about to be written
        self._pinned: list[int] = []  # sources of copies of this step
        super().__init__(num_blocks, block_size, window)

    def make_pool(self, num_blocks: int, block_size: int) -> CachingBlockPool:
        """Make a pool that remembers. A part that only counts references cannot take its place."""
        make = replacement("caching_block_pool") or CachingBlockPool
        return make(num_blocks, block_size, self.policy, self.index.forget)

    # -- who enters

    def find(self, room: PrefixRoom, headroom: int = 0) -> Finding:
        """Look for the sequences of a room. What fits only if no part-full block is copied, is not copied."""
        if not room.memos:
            room.memos.extend([] for _ in room.token_ids)
        each = zip(room.token_ids, room.limits, room.memos, strict=True)
        matches = [self.index.match(token_ids, room.salt, limit, memo) for token_ids, limit, memo in each]
        finding = self._weigh(room, matches)
        if finding.num_new + finding.num_idle + headroom > self.pool.num_free:
            finding = self._weigh(room, [replace(match, partial=None) for match in matches])
        return finding

    def _weigh(self, room: PrefixRoom, matches: list[Match]) -> Finding:
        size = self.pool.block_size
        num_shared = self._num_shared(room) // size
        num_new = 0
        for i, (match, length) in enumerate(zip(matches, room.lengths, strict=True)):
            num_new += num_blocks_for(length, size) - max(len(match.block_ids), num_shared if i else 0)
        used = {block_id for match in matches for block_id in match.block_ids}
        used |= {match.partial[0] for match in matches if match.partial}
        num_idle = sum(1 for block_id in used if self.pool.num_references(block_id) == 0)
        return Finding(matches, num_shared, num_new, num_idle)

    def can_admit(self, room: Room, headroom: int = 0) -> bool:
        """Return whether all blocks that are not there yet are free, and none of them is being written already."""
        return self._reason(room, headroom) is None

    def shortage(self, room: Room, headroom: int = 0) -> str:
        """Say what is missing."""
        return self._reason(room, headroom) or ""

    def _reason(self, room: Room, headroom: int) -> str | None:
        assert isinstance(room, PrefixRoom)
        finding = self.find(room, headroom)
        if self._is_coming(finding, room):
            return "waits for a block that another request is computing"
        num_free = self.pool.num_free - finding.num_idle
        if finding.num_new + headroom <= num_free:
            return None
        spare = f" and {headroom} to spare" if headroom else ""
        return f"needs {finding.num_new} blocks{spare}, {num_free} are free"

    def is_coming(self, room: Room) -> bool:
        """Return whether a running request is about to write the block that would be the next to be found."""
        assert isinstance(room, PrefixRoom)
        return self._is_coming(self.find(room), room)

    def _is_coming(self, finding: Finding, room: PrefixRoom) -> bool:
        match = finding.matches[0]
        start = len(match.block_ids) * self.pool.block_size
        stop = start + self.pool.block_size
        return stop <= room.limits[0] and (match.place, tuple(room.token_ids[0][start:stop])) in self._coming

    def allocate(self, room: Room) -> list[int]:
        """Make block tables that begin with what is cached; return how many tokens each has of that.

        Raises:
            AccountingError: The blocks are not free. Nothing is taken then.
        """
        assert isinstance(room, PrefixRoom)
        finding = self.find(room)
        if finding.num_new + finding.num_idle > self.pool.num_free:
            raise AccountingError(f"sequence {room.seq_ids[0]} {self.shortage(room)}")
        for match in finding.matches:  # before anything is allocated, which might evict them
            self._hold(match)
        starts = []
        for i, seq_id in enumerate(room.seq_ids):
            assert seq_id not in self.tables
            starts.append(self._start_table(room, finding, i))
            self._extend_to(self.tables[seq_id], room.lengths[i])
            match = finding.matches[i]
            num_held = len(match.block_ids)  # what is copied, or shared with the first, is still to be written
            root = self.index.root(room.salt)
            walk = Walk(room.token_ids[i], root, match.place, num_held, num_held * self.pool.block_size)
            self._walks[seq_id] = walk
            self._announce(walk)
        return starts

    def num_found(self, seq_id: int) -> int:
        """Return how many tokens of a sequence that has just entered lie in blocks of the cache."""
        return self._walks[seq_id].num_computed

    def _hold(self, match: Match) -> None:
        for block_id in match.block_ids:
            self.pool.share(block_id)
        if match.partial:
            self.pool.share(match.partial[0])
            self._pinned.append(match.partial[0])

    def _start_table(self, room: PrefixRoom, finding: Finding, i: int) -> int:
        """Make the table of one sequence with what it need not compute; return how many tokens that is."""
        match, size = finding.matches[i], self.pool.block_size
        if i and finding.num_shared > len(match.block_ids):
            for block_id in match.block_ids:
                self.pool.free(block_id)  # the same blocks, or their equals, come from the first sequence
            self._share(self.tables[room.seq_ids[0]], room.seq_ids[i], finding.num_shared * size)
            return finding.num_shared * size
        table = self.tables[room.seq_ids[i]] = PartialTable(size, list(match.block_ids))
        num_tokens = len(match.block_ids) * size
        if match.partial:
            source, num_more = match.partial
            table.block_ids.append(self.pool.allocate())
            self.pending_copies.append((source, table.block_ids[-1]))
            self.num_copies += 1
            num_tokens += num_more
        self.num_hit_tokens += num_tokens
        return num_tokens

    # -- growing and leaving

    def note_computed(self, seq_id: int, num_tokens: int, token_ids: list[int]) -> None:
        """Enter the blocks that are full now, then give back those that have left the window."""
        walk, table = self._walks[seq_id], self.tables[seq_id]
        walk.num_computed, walk.token_ids = num_tokens, token_ids
        if (walk.num_entered + 1) * table.block_size <= num_tokens:
            self._rejoin(walk, table)
        while (walk.num_entered + 1) * table.block_size <= num_tokens:
            start = walk.num_entered * table.block_size
            self._enter(walk, token_ids[start : start + table.block_size], table.block_ids[walk.num_entered])
            walk.num_entered += 1
            self._announce(walk)
        super().note_computed(seq_id, num_tokens, token_ids)

    def _enter(self, walk: Walk, token_ids: list[int], block_id: int) -> None:
        walk.place, gone = self.index.insert(walk.place, token_ids, block_id)
        for each in gone:
            self.pool.unmark_cached(each)
        if block_id in self.index and not self.pool.is_cached(block_id):
            self.pool.mark_cached(block_id)

    def _rejoin(self, walk: Walk, table: PartialTable) -> None:
        """Enter a sequence's blocks anew, from its first one, where an eviction has cut off its place.

        That happens to blocks that came back from the swap space, and to a sequence whose beginning was entered by
        another that has ended: its own blocks are not the ones that the index has.
        """
        if table.num_released or not self.index.is_gone(walk.place):
            return
        walk.place = walk.root
        for number in range(walk.num_entered):
            start = number * table.block_size
            self._enter(walk, walk.token_ids[start : start + table.block_size], table.block_ids[number])

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a new sequence share all blocks of another."""
        super().fork(parent_id, child_id)
        walk = self._walks[parent_id]
        self._walks[child_id] = replace(walk, coming=None)

    def free(self, seq_id: int) -> None:
        """Give a sequence's references back. Its last block, if it is part full, may be worth an entry too."""
        walk, table = self._walks.pop(seq_id, None), self.tables[seq_id]
        if walk is not None:
            self._retract(walk)
            self._enter_tail(walk, table)
        super().free(seq_id)
        for block_id in reversed(table.block_ids[: table.num_released]):
            self.pool.touch(block_id)  # given back first, but worth more than what is behind them

    def _enter_tail(self, walk: Walk, table: PartialTable) -> None:
        start = walk.num_entered * table.block_size
        if walk.num_computed > start and table.num_released <= walk.num_entered:
            self._rejoin(walk, table)
            block_id = table.block_ids[walk.num_entered]
            if self.pool.num_references(block_id) == 1 and block_id not in self.index:
                self._enter(walk, walk.token_ids[start : walk.num_computed], block_id)

    def swap_out(self, seq_ids: Sequence[int]) -> tuple[Swapped, list[int]]:
        """Free some sequences, but note how their blocks hang together and how far they are entered."""
        walks = {seq_id: self._walks.pop(seq_id) for seq_id in seq_ids}
        for walk in walks.values():
            self._retract(walk)
        swapped, block_ids = super().swap_out(seq_ids)
        return PrefixSwapped(swapped.num_blocks, swapped.tables, walks), block_ids

    def swap_in(self, swapped: Swapped) -> list[tuple[int, int]]:
        """Bring sequences back in new blocks."""
        assert isinstance(swapped, PrefixSwapped)
        pairs = super().swap_in(swapped)
        for seq_id in swapped.tables:
            self._walks[seq_id] = swapped.walks[seq_id]
            self._announce(self._walks[seq_id])
        return pairs

    def _announce(self, walk: Walk) -> None:
        """Note which block the walk's prefill writes next, if all its tokens are known."""
        self._retract(walk)
        start = walk.num_entered * self.pool.block_size
        token_ids = tuple(walk.token_ids[start : start + self.pool.block_size])
        if len(token_ids) == self.pool.block_size:
            walk.coming = walk.place, token_ids
            self._coming[walk.coming] += 1

    def _retract(self, walk: Walk) -> None:
        if walk.coming is not None:
            self._coming[walk.coming] -= 1
            if not self._coming[walk.coming]:
                del self._coming[walk.coming]
            walk.coming = None

    def release_pins(self) -> None:
        """Let go of the blocks that were copied in the last step."""
        while self._pinned:
            self.pool.free(self._pinned.pop())

    def distrust(self, block_ids: Iterable[int] = ()) -> None:
        """Hear that a step has failed: no part-full block is worth an entry, for it may not have been written.

        Args:
            block_ids: Blocks that may have been entered though what is in them is wrong.
        """
        for block_id in block_ids:
            for gone in self.index.forget(block_id) if block_id in self.index else ():
                self.pool.unmark_cached(gone)
        for walk in self._walks.values():
            walk.num_computed = walk.num_entered * self.pool.block_size
        self.release_pins()

    # -- checking

    def count_references(self) -> Counter[int]:
        """Return how many tables own each block; a block that is being copied counts once more."""
        return super().count_references() + Counter(self._pinned)

    def check(self) -> None:
        """Assert the invariants."""
        super().check()
        self.index.check()
        for block_id in range(self.pool.num_blocks):
            assert (block_id in self.index) == self.pool.is_cached(block_id), f"block {block_id} is mismarked"
        assert self._walks.keys() == self.tables.keys()
