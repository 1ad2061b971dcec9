"""Fork and copy-on-write without a model: whose block is whose, which are copied, and what a table's slots hold."""

from random import Random

import pytest

from minipaged import use
from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from minipaged.paged.block_table import num_blocks_for
from minipaged.sharing.cache import Sharing, SharingCache
from tests.walks import run_small_walks, run_walks


def family_of(cache: SharingCache, num_prompt_tokens: int, count: int, num_output_tokens: int) -> list[int]:
    """Allocate a prompt for sequence 0, fork it, and return the ids of the family."""
    cache.allocate(0, num_prompt_tokens, num_prompt_tokens + num_output_tokens, count)
    for child in range(1, count):
        cache.fork(0, child)
    cache.check()
    return list(range(count))


def append_all(cache: SharingCache, seq_ids: list[int]) -> list[tuple[int, int]]:
    """Give each sequence a slot for its next token and return the copies that this needs."""
    for seq_id in seq_ids:
        cache.append(seq_id)
        cache.check()
    return cache.take_copies()


def test_a_part_full_prompt_block_is_copied_for_all_but_one_of_four():
    cache = SharingCache(num_blocks=8, block_size=16)
    family = family_of(cache, num_prompt_tokens=18, count=4, num_output_tokens=8)
    assert cache.sharing() == Sharing(num_blocks_without_sharing=8, num_blocks_used=2, num_copies=0)
    copies = append_all(cache, family)
    full, last = cache.tables[0].block_ids[0], 1
    assert cache.pool.num_references(full) == 4
    assert len(copies) == 3 and {source for source, _ in copies} == {last}
    assert cache.sharing() == Sharing(num_blocks_without_sharing=8, num_blocks_used=5, num_copies=3)
    assert cache.sharing().num_blocks_saved == 3
    assert cache.tables[3].block_ids == [full, last], "the last reader writes in place"
    for seq_id in (2, 0, 3, 1):
        cache.free(seq_id)
        cache.check()
    assert cache.pool.num_free == 8 and sorted(cache.pool.free_block_ids) == list(range(8))
    assert not any(cache.pool.num_references(block_id) for block_id in range(8))


def test_a_prompt_of_full_blocks_is_never_copied():
    cache = SharingCache(num_blocks=8, block_size=16)
    family = family_of(cache, num_prompt_tokens=32, count=4, num_output_tokens=8)
    assert append_all(cache, family) == []
    assert cache.sharing() == Sharing(num_blocks_without_sharing=12, num_blocks_used=6, num_copies=0)
    assert [cache.pool.num_references(block_id) for block_id in cache.tables[2].block_ids] == [4, 4, 1]


def test_three_samples_of_forty_tokens_peak_at_five_blocks_against_nine():
    cache = SharingCache(num_blocks=5, block_size=16)
    family = family_of(cache, num_prompt_tokens=40, count=3, num_output_tokens=7)
    copies = [append_all(cache, family) for _ in range(7)]  # the eighth token needs no slot
    assert [len(each) for each in copies] == [2, 0, 0, 0, 0, 0, 0]
    assert cache.sharing() == Sharing(num_blocks_without_sharing=9, num_blocks_used=5, num_copies=2)


@pytest.mark.parametrize("block_size", [1, 4, 5, 16])
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 15, 16, 17, 32])
def test_fork_copies_only_the_last_partial_block(num_tokens: int, block_size: int):
    cache = SharingCache(num_blocks=100, block_size=block_size)
    family_of(cache, num_tokens, count=2, num_output_tokens=2)
    assert cache.take_copies() == [] and cache.sharing().num_blocks_used == num_blocks_for(num_tokens, block_size)
    copies = append_all(cache, [1])
    assert [source for source, _ in copies] == ([cache.tables[0].block_ids[-1]] if num_tokens % block_size else [])
    assert (
        cache.tables[1].block_ids[: num_tokens // block_size] == cache.tables[0].block_ids[: num_tokens // block_size]
    )
    assert append_all(cache, [0]) == [], "the parent is alone with its block now"


def test_a_child_of_a_child_shares_with_both():
    cache = SharingCache(num_blocks=8, block_size=4)
    cache.allocate(0, 6, max_slots=12, num_sequences=3)
    cache.fork(0, 1)
    append_all(cache, [1])
    cache.fork(1, 2)
    cache.check()
    assert cache.tables[2].block_ids == cache.tables[1].block_ids != cache.tables[0].block_ids
    assert [cache.pool.num_references(block_id) for block_id in cache.tables[2].block_ids] == [3, 2]
    cache.free(1)
    assert append_all(cache, [2]) == [], "its parent has gone, so it is alone"
    assert append_all(cache, [0]) == []


def test_the_books_allow_a_family_exactly_the_room_that_it_was_promised():
    cache = SharingCache(num_blocks=5, block_size=16)
    assert cache.can_admit(18, 26, num_sequences=4)  # 1 shared, 4 x 1 of their own
    assert not cache.can_admit(18, 26, num_sequences=5)
    assert cache.can_admit(18, 18, num_sequences=100), "without output nothing is copied"
    with pytest.raises(AccountingError, match="5 sequences of 26 slots need 6 blocks; 0 of 5 are promised to others"):
        cache.allocate(0, 18, 26, num_sequences=5)
    cache.check()
    assert cache.pool.num_free == 5 and not cache.tables
    family = family_of(cache, 18, count=4, num_output_tokens=8)
    for _ in range(8):
        append_all(cache, family)
    assert cache.pool.num_free == 0 and not cache.can_admit(1, 1)


def test_a_fork_beyond_the_promise_needs_room_of_its_own():
    cache = SharingCache(num_blocks=4, block_size=4)
    cache.allocate(0, 6, max_slots=8)
    assert cache.num_promised == 2
    cache.fork(0, 1)
    cache.fork(0, 2)
    assert cache.num_promised == 4
    with pytest.raises(AccountingError, match="one more fork may need 1 blocks; 4 of 4 are promised"):
        cache.fork(0, 3)
    cache.check()
    assert 3 not in cache.tables and cache.pool.num_references(0) == 3
    append_all(cache, [0, 1, 2])
    cache.free(1)
    cache.fork(2, 3)  # in the place of the one that has gone
    cache.check()


def test_a_freed_sequence_takes_its_pending_copies_along():
    cache = SharingCache(num_blocks=8, block_size=4)
    family_of(cache, 6, count=3, num_output_tokens=2)
    cache.append(1)  # and then, before the copies are made, the step fails
    cache.append(2)
    cache.free(1)
    cache.check()
    assert cache.pending_copies == [(1, 3)] and cache.num_copies == 1
    cache.free(2)
    assert cache.take_copies() == [] and cache.num_copies == 0


def test_waste_counts_a_shared_block_once():
    cache = SharingCache(num_blocks=8, block_size=16)
    family = family_of(cache, 18, count=4, num_output_tokens=8)
    assert cache.waste() == Waste(token_states=18, reserved=0, internal=14, external=0)
    append_all(cache, family)
    assert cache.waste() == Waste(token_states=16 + 4 * 3, reserved=0, internal=4 * 13, external=0)


def test_a_sequence_cannot_outgrow_its_promise():
    cache = SharingCache(num_blocks=8, block_size=4)
    cache.allocate(0, 4, max_slots=4)
    with pytest.raises(AccountingError, match="sequence 0 has all 1 blocks it was promised"):
        cache.append(0)
    cache.check()


@pytest.mark.parametrize(
    "harm",
    [
        lambda cache: cache.tables[1].block_ids.pop(),
        lambda cache: cache.tables[1].block_ids.reverse() or cache.tables[1].block_ids.append(0),
        lambda cache: cache.pool.share(0),
        lambda cache: cache.pool.free(0),
        lambda cache: cache.pool.allocate(),
        lambda cache: cache.pending_copies.append((0, 1)),
        lambda cache: cache._family.pop(1),
        lambda cache: setattr(cache._promises[0], "max_blocks", 1),
        lambda cache: setattr(cache._promises[0], "max_blocks", 9),
        lambda cache: setattr(cache._promises[0], "num_sequences", 1),
    ],
    ids=[
        "lost-block",
        "block-twice",
        "count-high",
        "count-low",
        "leak",
        "copy-to-shared",
        "no-family",
        "over-promise",
        "promise-over-pool",
        "members",
    ],
)
def test_check_notices_broken_books(harm):
    cache = SharingCache(num_blocks=8, block_size=4)
    family_of(cache, 6, count=2, num_output_tokens=4)
    harm(cache)
    with pytest.raises(AssertionError):
        cache.check()


class SharingWalk:
    """Families grow, fork and end at random, over a memory that holds a different number for every token.

    A block that loses its last reader forgets what it held, and copies are made as the engine makes them: all at
    once, before the new tokens are written. So a copy that is missing, too much or out of place shows as a token
    that a sequence finds changed.
    """

    rules = ("allocate", "fork", "fork", "step", "step", "step", "free", "fail_midway")

    def __init__(self, rng: Random):
        self.cache = SharingCache(rng.randint(1, 14), rng.choice([1, 2, 3, 4, 16]))
        self.size = self.cache.pool.block_size
        self.memory: list[int | None] = [None] * (self.cache.pool.num_blocks * self.size)
        self.tokens: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}  # tokens that each sequence may still take
        self.family: dict[int, int] = {}
        self.per_fork: dict[int, int] = {}  # blocks, by family
        self.promised: dict[int, list[int]] = {}  # blocks and sequences, by family
        self.num_copies = 0
        self.next_id = 0
        self.next_token = 0

    def allocate(self, rng: Random) -> str:
        prompt, more, width = rng.randint(1, 3 * self.size), rng.randint(0, 2 * self.size), rng.randint(1, 4)
        per_fork = num_blocks_for(prompt + more, self.size) - prompt // self.size if more else 0
        need = prompt // self.size + width * per_fork if more else num_blocks_for(prompt, self.size)
        has_room = self._num_promised() + need <= self.cache.pool.num_blocks
        assert self.cache.can_admit(prompt, prompt + more, width) == has_room
        if not has_room:
            with pytest.raises(AccountingError, match=f"need {need} blocks"):
                self.cache.allocate(self.next_id, prompt, prompt + more, width)
            return "refused prompt"
        seq_id = self._new_id()
        self.cache.allocate(seq_id, prompt, prompt + more, width)
        self.tokens[seq_id], self.room[seq_id], self.family[seq_id] = self._new_tokens(prompt), more, seq_id
        self.per_fork[seq_id], self.promised[seq_id] = per_fork, [need, width]
        for slot, token in zip(self.cache.tables[seq_id].slots(0, prompt), self.tokens[seq_id], strict=True):
            self.memory[slot] = token
        return "prompt"

    def fork(self, rng: Random) -> str | None:
        if not self.tokens:
            return None
        parent, child = rng.choice(list(self.tokens)), self.next_id
        family = self.family[parent]
        promise, members = self.promised[family], list(self.family.values()).count(family)
        if members == promise[1]:
            if self._num_promised() + self.per_fork[family] > self.cache.pool.num_blocks:
                with pytest.raises(AccountingError, match="one more fork"):
                    self.cache.fork(parent, child)
                return "refused fork"
            promise[0] += self.per_fork[family]
            promise[1] += 1
        num_free = self.cache.pool.num_free
        self.cache.fork(parent, self._new_id())
        assert self.cache.pool.num_free == num_free, "a fork takes no block"
        self.tokens[child], self.room[child] = list(self.tokens[parent]), self.room[parent]
        self.family[child] = family
        return "fork"

    def step(self, rng: Random) -> str | None:
        """Let some sequences take their next token, as one decode does."""
        batch = self._batch(rng)
        if not batch:
            return None
        slots = [self.cache.append(seq_id) for seq_id in batch]
        copies = self.cache.take_copies()
        assert len({target for _, target in copies}) == len(copies)
        assert not {source for source, _ in copies} & {target for _, target in copies}
        for source, target in copies:
            self.memory[target * self.size : (target + 1) * self.size] = self._block(source)
        assert len(set(slots)) == len(slots), "two sequences write into one slot"
        for seq_id, slot, token in zip(batch, slots, self._new_tokens(len(batch)), strict=True):
            self.memory[slot] = token
            self.tokens[seq_id].append(token)
            self.room[seq_id] -= 1
        self.num_copies += len(copies)
        return "step with copies" if copies else "step"

    def free(self, rng: Random) -> str | None:
        if not self.tokens:
            return None
        self._forget(rng.choice(list(self.tokens)))
        return "free"

    def fail_midway(self, rng: Random) -> str | None:
        """Begin a step that never comes to its copies, and drop the sequences that took part."""
        batch = self._batch(rng)
        if not batch or rng.random() < 0.5:
            return None
        for seq_id in batch:
            self.cache.append(seq_id)
        for seq_id in rng.sample(batch, len(batch)):
            self._forget(seq_id)
        assert self.cache.pending_copies == []
        return "failed step"

    def check(self) -> None:
        self.cache.check()
        assert self.cache.tables.keys() == self.tokens.keys()
        held = set()
        for seq_id, tokens in self.tokens.items():
            slots = self.cache.tables[seq_id].slots(0, len(tokens))
            assert [self.memory[slot] for slot in slots] == tokens, "a token has changed"
            held.update(slots)
        blocks = {slot // self.size for slot in held}
        assert self.cache.pool.num_free == self.cache.pool.num_blocks - len(blocks), "a block is lost"
        assert self.cache.num_promised == self._num_promised()
        waste = self.cache.waste()
        assert (waste.token_states, waste.internal) == (len(held), len(blocks) * self.size - len(held))
        alone = sum(num_blocks_for(len(tokens), self.size) for tokens in self.tokens.values())
        assert self.cache.sharing() == Sharing(alone, len(blocks), self.num_copies)

    def _batch(self, rng: Random) -> list[int]:
        able = [seq_id for seq_id, room in self.room.items() if room]
        return rng.sample(able, rng.randint(1, len(able))) if able else []

    def _forget(self, seq_id: int) -> None:
        self.cache.free(seq_id)
        family = self.family.pop(seq_id)
        del self.tokens[seq_id], self.room[seq_id]
        if family not in self.family.values():
            del self.promised[family]
        for block_id in self.cache.pool.free_block_ids:
            self.memory[block_id * self.size : (block_id + 1) * self.size] = [None] * self.size

    def _block(self, block_id: int) -> list[int | None]:
        return self.memory[block_id * self.size : (block_id + 1) * self.size]

    def _num_promised(self) -> int:
        return sum(blocks for blocks, _ in self.promised.values())

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _new_tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))


EVENTS = {"prompt", "refused prompt", "fork", "refused fork", "step", "step with copies", "free", "failed step"}


def test_long_random_walks_lose_no_block_and_change_no_token(num_operations: int):
    events = run_walks(SharingWalk, num_operations)
    assert events.total() == num_operations
    assert events.keys() == EVENTS and min(events.values()) > num_operations / 200, events


def test_small_random_walks_lose_no_block_and_change_no_token():
    assert run_small_walks(SharingWalk).keys() == EVENTS


def no_copy(cache: SharingCache, seq_id: int) -> None:
    """Write into the shared block."""


def copy_without_release(cache: SharingCache, seq_id: int) -> None:
    """Copy, and keep the reference to the old block."""
    table = cache.tables[seq_id]
    if cache.pool.num_references(table.block_ids[-1]) > 1:
        own = cache.pool.allocate()
        cache.pending_copies.append((table.block_ids[-1], own))
        cache.num_copies += 1
        table.block_ids[-1] = own


def always_copy(cache: SharingCache, seq_id: int) -> None:
    """Copy a block that nobody else reads, and give the old one back."""
    table = cache.tables[seq_id]
    own = cache.pool.allocate()
    cache.pool.free(table.block_ids[-1])
    cache.pending_copies.append((table.block_ids[-1], own))
    table.block_ids[-1] = own


@pytest.mark.parametrize("sabotage", [no_copy, copy_without_release, always_copy])
def test_the_walk_sees_a_wrong_copy_on_write(sabotage):
    with use(prepare_write=sabotage), pytest.raises((AssertionError, AccountingError)):
        run_walks(SharingWalk, 3000)


def test_the_walk_sees_copies_that_are_never_made(monkeypatch: pytest.MonkeyPatch):
    take = SharingCache.take_copies
    monkeypatch.setattr(SharingCache, "take_copies", lambda self: take(self)[1:])
    with pytest.raises(AssertionError, match="a token has changed"):
        run_walks(SharingWalk, 3000)
