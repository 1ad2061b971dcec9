"""The pool that counts references."""

import pytest

from minipaged.errors import AccountingError
from minipaged.sharing.ref_pool import RefCountedBlockPool


def test_only_the_last_free_gives_a_block_back():
    pool = RefCountedBlockPool(num_blocks=2, block_size=4)
    block_id = pool.allocate()
    pool.share(block_id)
    pool.share(block_id)
    for left in (2, 1):
        pool.free(block_id)
        assert pool.num_references(block_id) == left and pool.num_free == 1 and not pool.is_free(block_id)
        pool.check()
    pool.free(block_id)
    assert pool.num_references(block_id) == 0 and pool.num_free == 2
    pool.check()


def test_one_free_too_many_is_refused_and_changes_nothing():
    pool = RefCountedBlockPool(num_blocks=2, block_size=4)
    block_id = pool.allocate()
    pool.share(block_id)
    pool.free(block_id)
    pool.free(block_id)
    with pytest.raises(AccountingError, match="block 0 is freed a second time"):
        pool.free(block_id)
    pool.check()
    assert sorted(pool.free_block_ids) == [0, 1], "a block stands once in the free list"


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_that_does_not_exist_is_refused(block_id: int):
    pool = RefCountedBlockPool(num_blocks=2, block_size=4)
    pool.allocate()
    pool.allocate()
    with pytest.raises(AccountingError, match=f"block {block_id} does not exist; ids are 0 to 1"):
        pool.free(block_id)
    with pytest.raises(AccountingError, match=f"block {block_id} does not exist; ids are 0 to 1"):
        pool.share(block_id)
    pool.check()


def test_a_free_block_cannot_be_shared():
    pool = RefCountedBlockPool(num_blocks=2, block_size=4)
    with pytest.raises(AccountingError, match="block 1 is free and cannot be shared"):
        pool.share(1)
    pool.check()


def test_a_reused_block_starts_with_one_reference():
    pool = RefCountedBlockPool(num_blocks=1, block_size=4)
    block_id = pool.allocate()
    pool.share(block_id)
    pool.free(block_id)
    pool.free(block_id)
    assert pool.allocate() == block_id and pool.num_references(block_id) == 1


def test_check_notices_a_wrong_count():
    pool = RefCountedBlockPool(num_blocks=2, block_size=4)
    pool._num_references[1] = 1  # counted, yet in the free list
    with pytest.raises(AssertionError, match="block 1 has count 1"):
        pool.check()
