"""Block pool, block tables and the paged cache: examples, refusals, and random walks that check every invariant."""

from random import Random

import pytest

from minipaged.errors import AccountingError, UserError
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable, num_blocks_for
from minipaged.paged.cache import PagedCache
from tests.walks import run_small_walks, run_walks


@pytest.mark.parametrize(
    ("num_tokens", "after_prefill", "after_first_decode", "full_after_prefill"),
    [(15, 1, 1, 0), (16, 1, 2, 1), (17, 2, 2, 1), (31, 2, 2, 1), (32, 2, 3, 2), (33, 3, 3, 2)],
)
def test_a_block_is_taken_with_the_token_that_needs_it(
    num_tokens: int, after_prefill: int, after_first_decode: int, full_after_prefill: int
):
    cache = PagedCache(num_blocks=3, block_size=16)
    cache.allocate(0, num_tokens, max_slots=num_tokens + 1)
    table = cache.tables[0]
    assert len(table.block_ids) == after_prefill
    assert table.num_tokens // 16 == full_after_prefill
    cache.append(0)
    assert len(table.block_ids) == after_first_decode
    cache.check()


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_the_least_number_of_blocks_is_enough(num_tokens: int):
    cache = PagedCache(num_blocks=num_blocks_for(num_tokens + 1, 16), block_size=16)
    cache.allocate(0, num_tokens, max_slots=num_tokens + 1)
    cache.append(0)
    cache.free(0)
    assert cache.pool.num_free == cache.pool.num_blocks


def test_a_double_free_is_refused_and_changes_nothing():
    pool = BlockPool(num_blocks=2, block_size=4)
    block_id = pool.allocate()
    pool.free(block_id)
    with pytest.raises(AccountingError, match="block 0 is freed a second time"):
        pool.free(block_id)
    with pytest.raises(AccountingError, match="block 2 does not exist; ids are 0 to 1"):
        pool.free(2)
    pool.check()
    assert pool.num_free == 2


def test_an_empty_pool_says_how_large_it_is():
    pool = BlockPool(num_blocks=1, block_size=4)
    pool.allocate()
    with pytest.raises(AccountingError, match="all 1 blocks of the pool are in use"):
        pool.allocate()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_a_pool_without_slots_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(UserError, match="must be at least 1"):
        BlockPool(num_blocks, block_size)


def test_check_notices_broken_books():
    cache = PagedCache(num_blocks=4, block_size=4)
    cache.allocate(0, 5, max_slots=8)
    cache.tables[0].block_ids[0] = 3  # a free block in a table, and block 0 lost
    with pytest.raises(AssertionError):
        cache.check()
    table = BlockTable(4, [1, 1], 8)
    with pytest.raises(AssertionError, match="twice"):
        table.check()


def test_a_refused_sequence_takes_nothing():
    cache = PagedCache(num_blocks=4, block_size=4)
    cache.allocate(0, 5, max_slots=12)
    with pytest.raises(AccountingError, match="5 slots are not free: 4 blocks of 4 slots, 3 of them promised"):
        cache.allocate(1, 5, max_slots=5)
    cache.check()
    assert cache.pool.num_free == 2 and 1 not in cache.tables


def test_waste_counts_the_empty_slots_of_last_blocks():
    cache = PagedCache(num_blocks=16, block_size=16)
    cache.allocate(0, 161, max_slots=186)
    waste = cache.waste()
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (161, 0, 15, 0)


class PagedWalk:
    """Admit, grow and end sequences at random; compare every slot with plain lists."""

    rules = ("allocate", "append", "append", "append", "free")

    def __init__(self, rng: Random):
        self.cache = PagedCache(rng.randint(1, 12), rng.choice([1, 2, 3, 4, 16]))
        self.slots: dict[int, list[int]] = {}
        self.limit: dict[int, int] = {}
        self.next_id = 0

    def allocate(self, rng: Random) -> str:
        num_prompt_tokens = rng.randint(1, 3 * self.cache.pool.block_size)
        most = num_prompt_tokens + rng.randint(0, 2 * self.cache.pool.block_size)
        promised = sum(num_blocks_for(limit, self.cache.pool.block_size) for limit in self.limit.values())
        has_room = promised + num_blocks_for(most, self.cache.pool.block_size) <= self.cache.pool.num_blocks
        assert self.cache.can_admit(1, most) == has_room
        if not has_room:
            with pytest.raises(AccountingError):
                self.cache.allocate(self.next_id, num_prompt_tokens, most)
            return "refuse"
        self.cache.allocate(self.next_id, num_prompt_tokens, most)
        self.slots[self.next_id] = self.cache.tables[self.next_id].slots(0, num_prompt_tokens)
        self.limit[self.next_id] = most
        self.next_id += 1
        return "allocate"

    def append(self, rng: Random) -> str | None:
        if not self.slots:
            return None
        seq_id = rng.choice(list(self.slots))
        if len(self.slots[seq_id]) < self.limit[seq_id]:
            self.slots[seq_id].append(self.cache.append(seq_id))
            return "append"
        if self.limit[seq_id] % self.cache.pool.block_size:
            return None  # the last block has room beyond the limit
        with pytest.raises(AccountingError, match="blocks it was promised"):
            self.cache.append(seq_id)
        return "refuse to append"

    def free(self, rng: Random) -> str | None:
        if not self.slots:
            return None
        seq_id = rng.choice(list(self.slots))
        self.cache.free(seq_id)
        del self.slots[seq_id], self.limit[seq_id]
        return "free"

    def check(self) -> None:
        self.cache.check()
        taken = [slot for slots in self.slots.values() for slot in slots]
        assert len(set(taken)) == len(taken), "two tokens share a slot"
        for seq_id, slots in self.slots.items():
            assert self.cache.tables[seq_id].slots(0, len(slots)) == slots, "a token has moved"
        num_blocks = sum(num_blocks_for(len(slots), self.cache.pool.block_size) for slots in self.slots.values())
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - num_blocks, "a block is lost"
        assert self.cache.waste().token_states == len(taken)


EVENTS = {"allocate", "refuse", "append", "refuse to append", "free"}


def test_long_random_walks_keep_the_books(num_operations: int):
    events = run_walks(PagedWalk, num_operations)
    assert events.total() == num_operations
    assert events.keys() == EVENTS and min(events.values()) > num_operations / 50, events


def test_small_random_walks_keep_the_books():
    assert run_small_walks(PagedWalk).keys() == EVENTS
