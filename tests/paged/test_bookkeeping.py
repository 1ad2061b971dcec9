"""Block pool, block tables and the paged cache: examples, refusals, and random walks that check every invariant."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipaged.errors import UserError
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable, num_blocks_for
from minipaged.paged.cache import PagedCache


@pytest.mark.parametrize(
    ("num_tokens", "after_prefill", "after_first_decode", "full_after_prefill"),
    [(15, 1, 1, 0), (16, 1, 2, 1), (17, 2, 2, 1), (31, 2, 2, 1), (32, 2, 3, 2), (33, 3, 3, 2)],
)
def test_a_block_is_taken_with_the_token_that_needs_it(
    num_tokens: int, after_prefill: int, after_first_decode: int, full_after_prefill: int
):
    cache = PagedCache(num_blocks=3, block_size=16)
    cache.allocate(0, num_tokens, max_tokens=num_tokens + 1)
    table = cache.tables[0]
    assert len(table.block_ids) == after_prefill
    assert table.num_tokens // 16 == full_after_prefill
    cache.append(0)
    assert len(table.block_ids) == after_first_decode
    cache.check()


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])
def test_the_least_number_of_blocks_is_enough(num_tokens: int):
    cache = PagedCache(num_blocks=num_blocks_for(num_tokens + 1, 16), block_size=16)
    cache.allocate(0, num_tokens, max_tokens=num_tokens + 1)
    cache.append(0)
    cache.free(0)
    assert cache.pool.num_free == cache.pool.num_blocks


def test_a_double_free_is_refused_and_changes_nothing():
    pool = BlockPool(num_blocks=2, block_size=4)
    block_id = pool.allocate()
    pool.free(block_id)
    with pytest.raises(UserError, match="block 0 is freed a second time"):
        pool.free(block_id)
    with pytest.raises(UserError, match="block 2 does not exist; ids are 0 to 1"):
        pool.free(2)
    pool.check()
    assert pool.num_free == 2


def test_an_empty_pool_says_how_large_it_is():
    pool = BlockPool(num_blocks=1, block_size=4)
    pool.allocate()
    with pytest.raises(UserError, match="all 1 blocks of the pool are in use"):
        pool.allocate()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_a_pool_without_slots_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(UserError, match="must be at least 1"):
        BlockPool(num_blocks, block_size)


def test_check_notices_broken_books():
    cache = PagedCache(num_blocks=4, block_size=4)
    cache.allocate(0, 5, max_tokens=8)
    cache.tables[0].block_ids[0] = 3  # a free block in a table, and block 0 lost
    with pytest.raises(AssertionError):
        cache.check()
    table = BlockTable(4, [1, 1], 8)
    with pytest.raises(AssertionError, match="twice"):
        table.check()


def test_a_refused_sequence_takes_nothing():
    cache = PagedCache(num_blocks=4, block_size=4)
    cache.allocate(0, 5, max_tokens=12)
    with pytest.raises(UserError, match="5 slots are not free: 4 blocks of 4 slots, 3 of them promised"):
        cache.allocate(1, 5, max_tokens=5)
    cache.check()
    assert cache.pool.num_free == 2 and 1 not in cache.tables


def test_waste_counts_the_empty_slots_of_last_blocks():
    cache = PagedCache(num_blocks=16, block_size=16)
    cache.allocate(0, 161, max_tokens=186)
    waste = cache.waste()
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (161, 0, 15, 0)


class PagedWalk(RuleBasedStateMachine):
    """Admit, grow and end sequences at random; compare every slot with a plain dictionary."""

    seen: dict[str, int] = {}  # noqa: RUF012

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 4, 16]))
    def start(self, num_blocks: int, block_size: int):
        self.cache = PagedCache(num_blocks, block_size)
        self.slots: dict[int, list[int]] = {}
        self.limit: dict[int, int] = {}
        self.next_id = 0

    @rule(num_prompt_tokens=st.integers(1, 40), num_more=st.integers(0, 20))
    def admit(self, num_prompt_tokens: int, num_more: int):
        most = num_prompt_tokens + num_more
        if not self.cache.can_admit(most):
            with pytest.raises(UserError):
                self.cache.allocate(self.next_id, num_prompt_tokens, most)
            self.count("refuse")
            return
        self.cache.allocate(self.next_id, num_prompt_tokens, most)
        self.slots[self.next_id] = self.cache.tables[self.next_id].slots(0, num_prompt_tokens)
        self.limit[self.next_id] = most
        self.next_id += 1
        self.count("admit")

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def append(self, data: st.DataObject):
        seq_id = data.draw(st.sampled_from(sorted(self.slots)))
        if len(self.slots[seq_id]) < self.limit[seq_id]:
            self.slots[seq_id].append(self.cache.append(seq_id))
            self.count("append")

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject):
        seq_id = data.draw(st.sampled_from(sorted(self.slots)))
        self.cache.free(seq_id)
        del self.slots[seq_id]
        self.count("free")

    @invariant()
    def books_are_right(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        taken = [slot for slots in self.slots.values() for slot in slots]
        assert len(set(taken)) == len(taken), "two tokens share a slot"
        for seq_id, slots in self.slots.items():
            assert self.cache.tables[seq_id].slots(0, len(slots)) == slots, "a token has moved"
        assert self.cache.waste().token_states == len(taken)

    def count(self, event: str):
        self.seen[event] = self.seen.get(event, 0) + 1


def test_random_walks_keep_the_books():
    PagedWalk.seen.clear()
    walk = PagedWalk.TestCase
    walk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
    walk("runTest").runTest()
    assert {event for event, count in PagedWalk.seen.items() if count > 50} == {"admit", "refuse", "append", "free"}
