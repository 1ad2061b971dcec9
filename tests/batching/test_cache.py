"""The books under the scheduler, without it: what a request needs, shares, gives back, and how it is swapped."""

import pytest

from minipaged.batching.cache import BatchingCache, PartialTable, Room, Swapped
from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from minipaged.shapes import UNUSED_BLOCK


def lone(seq_id: int, length: int) -> Room:
    return Room([seq_id], [length], num_common=0, num_output_tokens=9)


def family_of(cache: BatchingCache, num_tokens: int, count: int) -> list[int]:
    """Allocate a prompt for sequence 0, fork it, and return the ids of all."""
    cache.allocate(lone(0, num_tokens))
    for child in range(1, count):
        cache.fork(0, child)
    cache.check()
    return list(range(count))


def append_all(cache: BatchingCache, seq_ids: list[int]) -> int:
    """Give each sequence a slot; return how many blocks that took, which must be what was foretold."""
    wanted, num_free = cache.num_blocks_for_next(seq_ids), cache.pool.num_free
    assert cache.can_append(seq_ids) == (wanted <= num_free)
    for seq_id in seq_ids:
        cache.append(seq_id)
        cache.check()
    assert num_free - cache.pool.num_free == wanted
    return wanted


# -- who enters


@pytest.mark.parametrize(
    ("lengths", "num_common", "num_blocks", "num_shared"),
    [
        ([6], 0, 2, 0),
        ([8], 0, 2, 0),
        ([9], 0, 3, 0),
        ([10, 10, 10], 9, 2 + 3, 8),
        ([10, 10, 10], 8, 2 + 3, 8),
        ([10, 10, 10], 7, 1 + 3 * 2, 4),
        ([8, 8], 8, 2, 8),
        ([8, 8], 9, 2, 8),
        ([3, 3], 3, 2, 0),
        ([10, 7], 10, 1 + 2 + 1, 4),
    ],
)
def test_full_blocks_of_common_tokens_are_taken_once(
    lengths: list[int], num_common: int, num_blocks: int, num_shared: int
):
    seq_ids = list(range(len(lengths)))
    room = Room(seq_ids, lengths, num_common, num_output_tokens=9)
    cache = BatchingCache(num_blocks, block_size=4)
    assert cache.num_blocks_needed(room) == num_blocks
    assert cache.can_admit(room) and not cache.can_admit(room, headroom=1)
    assert cache.shortage(room, headroom=1) == f"needs {num_blocks} blocks and 1 to spare, {num_blocks} are free"
    assert cache.allocate(room) == [0] + [num_shared] * (len(lengths) - 1)
    cache.check()
    assert cache.pool.num_free == 0
    tables = [cache.tables[seq_id] for seq_id in seq_ids]
    assert [table.num_tokens for table in tables] == lengths
    assert len({tuple(table.block_ids[: num_shared // 4]) for table in tables}) == 1
    own = [block_id for table in tables for block_id in table.block_ids[num_shared // 4 :]]
    assert len(set(own)) == len(own)


def test_a_request_that_does_not_fit_takes_nothing():
    cache = BatchingCache(num_blocks=5, block_size=4)
    cache.allocate(lone(0, 9))
    assert not cache.can_admit(lone(1, 9)) and cache.can_admit(lone(1, 8))
    with pytest.raises(AccountingError, match="sequence 1 needs 3 blocks, 2 are free"):
        cache.allocate(lone(1, 9))
    with pytest.raises(AccountingError, match="sequence 1 needs 4 blocks, 2 are free"):
        cache.allocate(Room([1, 2], [9, 9], num_common=8, num_output_tokens=1))
    cache.check()
    assert cache.pool.num_free == 2 and list(cache.tables) == [0]


def test_nothing_is_promised():
    cache = BatchingCache(num_blocks=2, block_size=4)
    for seq_id in range(2):
        cache.allocate(Room([seq_id], [4], num_common=0, num_output_tokens=1000))
    assert not cache.can_append([0]) and not cache.can_append([0, 1])
    with pytest.raises(AccountingError, match="all 2 blocks of the pool are in use"):
        cache.append(0)
    cache.check()


# -- growing


@pytest.mark.parametrize(("num_tokens", "count", "taken"), [(6, 1, 0), (8, 1, 1), (6, 3, 2), (8, 3, 3), (7, 2, 1)])
def test_the_blocks_of_the_next_tokens_are_foretold(num_tokens: int, count: int, taken: int):
    cache = BatchingCache(num_blocks=2 + taken, block_size=4)
    family = family_of(cache, num_tokens, count)
    assert append_all(cache, family) == taken and cache.pool.num_free == 0
    assert len(cache.take_copies()) == (count - 1 if num_tokens % 4 else 0)


def test_some_of_a_family_copy_their_block_and_the_last_of_all_writes_in_place():
    cache = BatchingCache(num_blocks=10, block_size=4)
    family_of(cache, 6, 4)
    assert append_all(cache, [2, 3]) == 2, "two others still read it"
    assert append_all(cache, [0]) == 1
    assert append_all(cache, [1]) == 0
    assert cache.take_copies() == [(1, 2), (1, 3), (1, 4)]


def test_a_block_too_few_for_the_copies_is_noticed_before_anything_is_taken():
    cache = BatchingCache(num_blocks=3, block_size=4)
    family_of(cache, 6, 3)
    assert (
        cache.pool.num_free == 1
        and not cache.can_append([0, 1, 2])
        and not cache.can_append([0, 1])
        and cache.can_append([2])
    )
    assert cache.num_blocks_of([0, 1, 2]) == 2 and not cache.pending_copies


def test_a_freed_sequence_takes_its_pending_copy_along():
    cache = BatchingCache(num_blocks=8, block_size=4)
    family_of(cache, 6, 2)
    cache.append(1)
    cache.free(1)
    assert cache.take_copies() == [] and cache.num_copies == 0
    cache.free(0)
    cache.check()
    assert cache.pool.num_free == 8


# -- a window


@pytest.mark.parametrize(("token", "num_released"), [(-3, 0), (0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2)])
def test_blocks_are_given_back_when_all_their_tokens_are_over(token: int, num_released: int):
    cache = BatchingCache(num_blocks=3, block_size=4, window=4)
    cache.allocate(lone(7, 10))
    slots = cache.slots(7, 0, 10)
    for _ in range(2):
        cache.release_before(7, token)
        cache.check()
    assert cache.pool.num_free == num_released == cache.tables[7].num_released
    assert cache.block_ids(7) == [UNUSED_BLOCK] * num_released + [0, 1, 2][num_released:]
    assert cache.slots(7, 4 * num_released, 10) == slots[4 * num_released :], "the others keep their places"
    cache.free(7)
    cache.check()
    assert cache.pool.num_free == 3


def test_a_shared_block_that_one_has_done_with_stays_with_the_others():
    cache = BatchingCache(num_blocks=4, block_size=4, window=4)
    family_of(cache, 9, 2)
    cache.release_before(0, 8)
    cache.check()
    assert cache.pool.num_free == 1 and cache.num_blocks_of([0]) == 1 and cache.num_blocks_of([0, 1]) == 3
    cache.fork(0, 2)
    cache.check()
    assert cache.block_ids(2) == [UNUSED_BLOCK, UNUSED_BLOCK, 2], "a fork has what its parent has"
    cache.release_before(1, 4)
    assert cache.pool.num_free == 2
    for seq_id in (1, 0, 2):
        cache.free(seq_id)
        cache.check()
    assert cache.pool.num_free == 4


def test_waste_counts_only_blocks_that_somebody_has():
    cache = BatchingCache(num_blocks=8, block_size=4, window=4)
    family_of(cache, 9, 2)
    assert cache.waste() == Waste(token_states=9, reserved=0, internal=3, external=0)
    for seq_id in (0, 1):
        cache.release_before(seq_id, 8)
    assert cache.waste() == Waste(token_states=1, reserved=0, internal=3, external=0)


# -- leaving and coming back


def test_a_family_is_swapped_with_each_block_once_and_comes_back_as_it_was():
    cache = BatchingCache(num_blocks=9, block_size=4)
    family = family_of(cache, 6, 3)
    append_all(cache, family[:2])
    cache.take_copies()
    cache.allocate(lone(8, 1))
    before = {seq_id: cache.block_ids(seq_id) for seq_id in family}
    swapped, block_ids = cache.swap_out(family)
    assert block_ids == [0, 2, 3, 1] and swapped.num_blocks == 4 and swapped.used_places == [0, 1, 2, 3]
    cache.check()
    assert list(cache.tables) == [8] and cache.pool.num_free == 8
    assert cache.can_swap_in(swapped, headroom=4) and not cache.can_swap_in(swapped, headroom=5)
    moved = {block_ids[place]: block_id for place, block_id in cache.swap_in(swapped)}
    cache.check()
    assert {seq_id: cache.block_ids(seq_id) for seq_id in family} == {
        seq_id: [moved[block_id] for block_id in ids] for seq_id, ids in before.items()
    }
    assert cache.pool.num_references(moved[0]) == 3 and cache.num_blocks_of(family) == 4


def test_blocks_that_were_given_back_are_not_swapped():
    cache = BatchingCache(num_blocks=4, block_size=4, window=4)
    cache.allocate(lone(7, 14))
    cache.release_before(7, 9)
    swapped, block_ids = cache.swap_out([7])
    assert (block_ids, swapped.num_blocks, swapped.tables[7].num_released) == ([2, 3], 2, 2)
    cache.allocate(lone(8, 5))
    (_, first), (_, second) = cache.swap_in(swapped)
    cache.check()
    assert cache.block_ids(7) == [UNUSED_BLOCK, UNUSED_BLOCK, first, second]
    assert cache.slots(7, 8, 14) == [*range(first * 4, first * 4 + 4), second * 4, second * 4 + 1]
    assert cache.pool.num_free == 0


def test_one_that_is_dropped_while_swapped_needs_no_block_back():
    cache = BatchingCache(num_blocks=4, block_size=4)
    family = family_of(cache, 6, 3)
    append_all(cache, family)
    cache.take_copies()
    swapped, _ = cache.swap_out(family)
    del swapped.tables[0]
    assert swapped.used_places == [0, 2, 3]
    assert cache.can_swap_in(swapped, headroom=1) and not cache.can_swap_in(swapped, headroom=2)
    assert [place for place, _ in cache.swap_in(swapped)] == [0, 2, 3]
    cache.check()
    assert cache.pool.num_free == 1 and cache.pool.num_references(cache.block_ids(1)[0]) == 2


def test_what_cannot_come_back_takes_nothing():
    cache = BatchingCache(num_blocks=3, block_size=4)
    cache.allocate(lone(0, 9))
    swapped, _ = cache.swap_out([0])
    cache.allocate(lone(1, 1))
    with pytest.raises(AccountingError, match="3 blocks are needed, 2 are free"):
        cache.swap_in(swapped)
    cache.check()
    assert cache.pool.num_free == 2 and list(cache.tables) == [1]
    cache.free(1)
    assert len(cache.swap_in(swapped)) == 3


def test_nothing_at_all_can_be_swapped():
    assert Swapped(0).used_places == []


# -- broken books


@pytest.mark.parametrize(
    "harm",
    [
        lambda cache: cache.tables[1].block_ids.pop(),
        lambda cache: cache.tables[1].block_ids.append(1),
        lambda cache: setattr(cache.tables[0], "num_released", 1),
        lambda cache: setattr(cache.tables[0], "num_released", 4),
        lambda cache: setattr(cache.tables[0], "num_tokens", 13),
        lambda cache: cache.pool.share(0),
        lambda cache: cache.pool.free(1),
        lambda cache: cache.pool.allocate(),
        lambda cache: cache.tables.pop(1),
        lambda cache: cache.pending_copies.append((2, 0)),
        lambda cache: cache.tables.update({5: PartialTable(4, [2, 2], 8)}),
    ],
    ids=["lost", "more", "released", "none", "length", "high", "low", "leak", "table", "copy", "twice"],
)
def test_check_notices_broken_books(harm):
    cache = BatchingCache(num_blocks=8, block_size=4)
    family_of(cache, 9, 2)
    harm(cache)
    with pytest.raises(AssertionError):
        cache.check()
