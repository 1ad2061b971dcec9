"""The bookkeeping of sequences that share blocks: fork, and copy-on-write."""

from collections import Counter
from dataclasses import dataclass

from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from minipaged.paged.block_table import BlockTable, num_blocks_for
from minipaged.paged.cache import PagedCache
from minipaged.sharing.ref_pool import RefCountedBlockPool
from minipaged.tiers import declare_part, replacement

declare_part("prepare_write", "(cache, seq_id) -> None; makes the sequence's last block its own before a write")


@dataclass(frozen=True)
class Sharing:
    """What sharing saves right now, in blocks, and the copies made since the start."""

    num_blocks_without_sharing: int
    num_blocks_used: int
    num_copies: int

    @property
    def num_blocks_saved(self) -> int:
        """Return the blocks that would be needed beside those in use if nobody shared."""
        return self.num_blocks_without_sharing - self.num_blocks_used


@dataclass
class Promise:
    """What a family may have at most, blocks and sequences at a time, and how many sequences it has."""

    max_blocks: int
    max_sequences: int
    num_blocks_per_fork: int
    num_sequences: int = 1


class SharingCache(PagedCache):
    """Rung 2's cache, and `fork`.

    Changes of rung 2: a block may stand in several tables, and `append` copies a shared last block before it is
    written. The copies are only noted here, in ``pending_copies``; the engine makes them all in one launch before
    the next write. Sequences that were forked from one prompt are a family, and a promise is made to all of it.

    Invariants:
        A block's count is the number of tables that hold it. A block that will be written has count 1, so no
        target of a pending copy is another's source or target.

    Example:
        S = 4, 6 prompt tokens, two sequences. The fork shares both blocks; the first write copies the part-full one.

        >>> cache = SharingCache(num_blocks=8, block_size=4)
        >>> cache.allocate(7, num_prompt_tokens=6, max_slots=8, num_sequences=2)
        >>> cache.fork(7, 9)
        >>> cache.tables[9].block_ids, cache.sharing().num_blocks_saved
        ([0, 1], 2)
        >>> cache.append(9), cache.take_copies(), cache.tables[9].block_ids
        (10, [(1, 2)], [0, 2])
        >>> cache.append(7), cache.take_copies(), cache.tables[7].block_ids
        (6, [], [0, 1])
    """

    pool: RefCountedBlockPool

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.num_copies = 0
        self.pending_copies: list[tuple[int, int]] = []  # (from, to) block ids, not yet made
        self._family: dict[int, int] = {}  # each sequence's family, which is named by its first sequence
        self._promises: dict[int, Promise] = {}  # by family

    def make_pool(self, num_blocks: int, block_size: int) -> RefCountedBlockPool:
        """Count references."""
        return (replacement("ref_counted_block_pool") or RefCountedBlockPool)(num_blocks, block_size)

    @property
    def num_promised(self) -> int:
        """Return how many blocks the running families may have at most, together."""
        return sum(promise.max_blocks for promise in self._promises.values())

    def can_admit(self, num_prompt_tokens: int, max_slots: int, num_sequences: int = 1) -> bool:
        """Return whether a family can enter: sequences with a common prompt, whose full blocks count once."""
        need = self._blocks_needed(num_prompt_tokens, max_slots, num_sequences)
        return self.num_promised + need <= self.pool.num_blocks

    def allocate(self, seq_id: int, num_prompt_tokens: int, max_slots: int, num_sequences: int = 1) -> None:
        """Make a block table for a prompt, and promise room for a family of up to ``num_sequences`` at a time."""
        assert seq_id not in self.tables and num_prompt_tokens <= max_slots
        need = self._blocks_needed(num_prompt_tokens, max_slots, num_sequences)
        if self.num_promised + need > self.pool.num_blocks:
            raise AccountingError(
                f"{num_sequences} sequences of {max_slots} slots need {need} blocks; "
                f"{self.num_promised} of {self.pool.num_blocks} are promised to others"
            )
        per_fork = self._blocks_needed(num_prompt_tokens, max_slots, num_sequences + 1) - need
        self._family[seq_id] = seq_id
        self._promises[seq_id] = Promise(need, num_sequences, per_fork)
        self._start(seq_id, num_prompt_tokens, max_slots)

    def fork(self, parent_id: int, child_id: int) -> None:
        """Let a new sequence of the family share all blocks of another.

        Raises:
            AccountingError: The family has as many sequences as it was promised, and the pool has no room for another.

        Cost:
            One count per block of the parent; no keys or values move.
        """
        promise = self._promises[self._family[parent_id]]
        if promise.num_sequences == promise.max_sequences:
            self._extend(promise)
        promise.num_sequences += 1
        parent = self.tables[parent_id]
        for block_id in parent.block_ids:
            self.pool.share(block_id)
        self.tables[child_id] = BlockTable(parent.block_size, list(parent.block_ids), parent.num_tokens)
        self._max_blocks[child_id] = self._max_blocks[parent_id]
        self._family[child_id] = self._family[parent_id]

    def free(self, seq_id: int) -> None:
        """Give a sequence's references back; with the last of its family the promise ends too."""
        super().free(seq_id)
        family = self._family.pop(seq_id)
        promise = self._promises[family]
        promise.num_sequences -= 1
        if promise.num_sequences == 0:
            del self._promises[family]
        self._forget_copies()

    def _forget_copies(self) -> None:
        """Drop copies that a failed step has left behind: a target without an owner may soon have another."""
        waiting = [copy for copy in self.pending_copies if not self.pool.is_free(copy[1])]
        self.num_copies -= len(self.pending_copies) - len(waiting)
        self.pending_copies = waiting

    def _extend(self, promise: Promise) -> None:
        if self.num_promised + promise.num_blocks_per_fork > self.pool.num_blocks:
            raise AccountingError(
                f"one more fork may need {promise.num_blocks_per_fork} blocks; {self.num_promised} of "
                f"{self.pool.num_blocks} are promised"
            )
        promise.max_blocks += promise.num_blocks_per_fork
        promise.max_sequences += 1

    def _blocks_needed(self, num_prompt_tokens: int, max_slots: int, num_sequences: int) -> int:
        if max_slots <= num_prompt_tokens:
            return num_blocks_for(num_prompt_tokens, self.pool.block_size)  # nothing is written behind the prompt
        shared = num_prompt_tokens // self.pool.block_size
        return shared + num_sequences * (num_blocks_for(max_slots, self.pool.block_size) - shared)

    def append(self, seq_id: int) -> int:
        """Take the sequence's next slot; copy the block first if somebody else reads it too."""
        if not self.tables[seq_id].needs_block:
            (replacement("prepare_write") or type(self).prepare_write)(self, seq_id)
        return super().append(seq_id)

    def prepare_write(self, seq_id: int) -> None:
        """Make the last block of a sequence its own: put a copy in its place if it is shared."""
        table = self.tables[seq_id]
        shared = table.block_ids[-1]
        if self.pool.num_references(shared) == 1:
            return
        own = self.pool.allocate()
        self.pool.free(shared)  # only this table's reference: somebody else has it still
        table.block_ids[-1] = own
        self.pending_copies.append((shared, own))
        self.num_copies += 1

    def take_copies(self) -> list[tuple[int, int]]:
        """Return the copies to make before the next write, and forget them."""
        copies, self.pending_copies = self.pending_copies, []
        return copies

    def sharing(self) -> Sharing:
        """Return what sharing saves now."""
        return Sharing(
            num_blocks_without_sharing=sum(len(table.block_ids) for table in self.tables.values()),
            num_blocks_used=self.pool.num_blocks - self.pool.num_free,
            num_copies=self.num_copies,
        )

    def waste(self, output_lengths: dict[int, int] | None = None) -> Waste:
        """Count slots by kind; a shared block counts once."""
        last_blocks = {table.block_ids[-1]: table.num_empty_slots for table in self.tables.values() if table.block_ids}
        internal = sum(last_blocks.values())
        used = (self.pool.num_blocks - self.pool.num_free) * self.pool.block_size
        return Waste(token_states=used - internal, reserved=0, internal=internal, external=0)

    def count_references(self) -> Counter[int]:
        """Return how many tables hold each block."""
        return Counter(block_id for table in self.tables.values() for block_id in table.block_ids)

    def check_blocks(self) -> None:
        """Assert that the pool, the tables and the pending copies agree."""
        self.pool.check()
        counts = self.count_references()
        for block_id in range(self.pool.num_blocks):
            assert counts[block_id] == self.pool.num_references(block_id), f"block {block_id} is miscounted"
        for table in self.tables.values():
            table.check()
        for source, target in self.pending_copies:
            assert counts[target] == 1 and source != target, f"block {target} waits for a copy and is not one's own"

    def check(self) -> None:
        """Assert the invariants."""
        self.check_blocks()
        assert self._family.keys() == self.tables.keys() == self._max_blocks.keys()
        self._check_promises()

    def _check_promises(self) -> None:
        assert set(self._family.values()) == self._promises.keys()
        for family, promise in self._promises.items():
            members = [seq_id for seq_id, own in self._family.items() if own == family]
            blocks = {block_id for seq_id in members for block_id in self.tables[seq_id].block_ids}
            assert len(members) == promise.num_sequences <= promise.max_sequences
            assert len(blocks) <= promise.max_blocks, f"{len(blocks)} blocks, {promise.max_blocks} were promised"
        assert self.num_promised <= self.pool.num_blocks
