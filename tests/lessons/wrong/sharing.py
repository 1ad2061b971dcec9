"""Plausible wrong answers to the exercises of lesson 03."""

from minipaged.errors import AccountingError
from minipaged.lessons.exercises.sharing import check_copy_blocks, check_prepare_write, check_ref_counts
from minipaged.paged.block_pool import BlockPool
from minipaged.shapes import Tensor
from minipaged.sharing.cache import SharingCache


class Counting(BlockPool):
    """The part of the pool that the lesson gives."""

    def __init__(self, num_blocks: int, block_size: int):
        super().__init__(num_blocks, block_size)
        self.counts = [0] * num_blocks

    def num_references(self, block_id: int) -> int:
        return self.counts[block_id]

    def allocate(self) -> int:
        block_id = super().allocate()
        self.counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        if self.counts[block_id] == 0:
            raise AccountingError(f"block {block_id} is free")
        self.counts[block_id] += 1


class FreesAtOnce(Counting):
    """Gives the block back although others hold it."""

    def free(self, block_id: int) -> None:
        super().free(block_id)
        self.counts[block_id] -= 1


class NeverGivesBack(Counting):
    """Counts down to 0, and forgets the free queue."""

    def free(self, block_id: int) -> None:
        if self.counts[block_id] == 0:
            raise AccountingError(f"block {block_id} is free")
        self.counts[block_id] -= 1


class SharesFreeBlocks(Counting):
    """Lets anybody share a block that nobody has."""

    def share(self, block_id: int) -> None:
        self.counts[block_id] += 1

    def free(self, block_id: int) -> None:
        if self.counts[block_id] == 1:
            super().free(block_id)
        self.counts[block_id] = max(0, self.counts[block_id] - 1)


def write_anyway(cache: SharingCache, seq_id: int) -> None:
    """Copy nothing."""


def keep_the_reference(cache: SharingCache, seq_id: int) -> None:
    """Forget that the sequence reads the old block no more."""
    table = cache.tables[seq_id]
    old = table.block_ids[-1]
    if cache.pool.num_references(old) > 1:
        table.block_ids[-1] = cache.pool.allocate()
        cache.pending_copies.append((old, table.block_ids[-1]))
        cache.num_copies += 1


def copy_always(cache: SharingCache, seq_id: int) -> None:
    """Copy a block that nobody else reads, too."""
    table = cache.tables[seq_id]
    old, new = table.block_ids[-1], cache.pool.allocate()
    cache.pool.free(old)
    table.block_ids[-1] = new
    cache.pending_copies.append((old, new))
    cache.num_copies += 1


def copy_backwards(cache: SharingCache, seq_id: int) -> None:
    """Copy the new block over the old one."""
    table = cache.tables[seq_id]
    old = table.block_ids[-1]
    if cache.pool.num_references(old) > 1:
        table.block_ids[-1] = cache.pool.allocate()
        cache.pool.free(old)
        cache.pending_copies.append((table.block_ids[-1], old))
        cache.num_copies += 1


def free_twice(cache: SharingCache, seq_id: int) -> None:
    """Give the reference back before the copy and once more after it."""
    table = cache.tables[seq_id]
    old = table.block_ids[-1]
    if cache.pool.num_references(old) > 1:
        cache.pool.free(old)
        table.block_ids[-1] = cache.pool.allocate()
        cache.pending_copies.append((old, table.block_ids[-1]))
        cache.num_copies += 1
        cache.pool.free(old)


def swap_from_and_to(pool: Tensor, pairs: Tensor) -> None:
    """Read a pair as (to, from)."""
    planes = pool.view(-1, *pool.shape[-4:])
    planes[:, pairs[:, 0]] = planes[:, pairs[:, 1]]


def copy_keys_only(pool: Tensor, pairs: Tensor) -> None:
    """Forget the values."""
    planes = pool.view(-1, *pool.shape[-4:])
    planes[::2, pairs[:, 1]] = planes[::2, pairs[:, 0]]


def copy_elsewhere(pool: Tensor, pairs: Tensor) -> Tensor:
    """Leave the pool as it was, and return a changed one."""
    planes = pool.clone().view(-1, *pool.shape[-4:])
    planes[:, pairs[:, 1]] = planes[:, pairs[:, 0]]
    return planes.view(pool.shape)


WRONG = [
    (check_ref_counts, FreesAtOnce, "Only the last `free` may give the block back"),
    (check_ref_counts, NeverGivesBack, "Only the last `free` may give the block back"),
    (check_ref_counts, SharesFreeBlocks, "share(1)"),
    (check_prepare_write, keep_the_reference, "counts"),
    (check_prepare_write, write_anyway, "a new one takes its place"),
    (check_prepare_write, copy_always, "Nothing else changes"),
    (check_prepare_write, copy_backwards, "copies (from, to)"),
    (check_prepare_write, free_twice, "its reference goes back"),
    (check_copy_blocks, swap_from_and_to, "A pair is (from, to)"),
    (check_copy_blocks, copy_keys_only, "in every plane alike"),
    (check_copy_blocks, copy_elsewhere, "The pool itself has to change"),
]
