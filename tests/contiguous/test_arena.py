"""The arena and its allocator: who owns which slots, and what that wastes."""

import random

import pytest

from minipaged.contiguous.arena import RESERVATIONS, Arena
from minipaged.contiguous.buddy import BuddyAllocator
from minipaged.errors import AccountingError, UserError
from tests.walks import run_small_walks, run_walks


@pytest.mark.parametrize(
    ("reservation", "expected"),
    [("max", (161, 25, 1862, 0)), ("pow2", (161, 25, 7, 63)), ("oracle", (161, 25, 0, 70))],
)
@pytest.mark.parametrize("num_slots", [2048, 5000])
def test_waste_of_each_policy_after_a_prefill(reservation: str, expected: tuple[int, ...], num_slots: int):
    arena = Arena(num_slots, max_model_len=2048, reservation=reservation)
    arena.allocate(0, num_prompt_tokens=161, num_output_tokens=25)
    waste = arena.waste({0: 25})
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == expected


def test_reserved_and_internal_come_together_while_the_output_length_is_unknown():
    arena = Arena(num_slots=2048, max_model_len=2048)
    arena.allocate(0, 161, 25)
    waste = arena.waste()
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (161, 1887, 0, 0)


def test_an_output_of_25_reserves_32_and_never_more_than_the_limit():
    arena = Arena(4096, 2048, "pow2")
    assert arena.slots_to_reserve(161, 25) == 161 + 32
    assert arena.slots_to_reserve(161, 32) == 161 + 32
    assert arena.slots_to_reserve(161, 33) == 161 + 64
    assert arena.slots_to_reserve(1900, 130) == 2048


def test_an_arena_shorter_than_the_limit_holds_one_range():
    arena = Arena(num_slots=10, max_model_len=2048)
    assert arena.limit == 8
    with pytest.raises(AccountingError, match="9 tokens do not fit into a reservation of 8 slots"):
        arena.allocate(0, 9, 1)
    arena.allocate(0, 8, 1)
    assert not arena.can_admit(1, 1)
    with pytest.raises(AccountingError, match="no range of 8 slots is free in the arena of 10"):
        arena.allocate(1, 1, 1)
    arena.check()


def test_a_full_reservation_refuses_the_next_token():
    arena = Arena(num_slots=4, max_model_len=4)
    arena.allocate(0, 3, 1)
    assert arena.append(0) == 3
    with pytest.raises(AccountingError, match="sequence 0 has filled its reservation of 4 slots"):
        arena.append(0)


def test_bad_arenas_are_refused():
    with pytest.raises(UserError, match="at least 1 slot"):
        Arena(0, 16)
    with pytest.raises(UserError, match="reservation must be one of max, pow2, oracle, not 'guess'"):
        Arena(16, 16, "guess")


def test_check_notices_a_lost_range_and_parted_buddies():
    arena = Arena(num_slots=32, max_model_len=8)
    arena.allocate(0, 3, 1)
    del arena.ranges[0]
    with pytest.raises(AssertionError):
        arena.check()
    buddy = BuddyAllocator(8)
    buddy._free[8].clear()
    buddy._free[4].update({0, 4})
    with pytest.raises(AssertionError, match="two free buddies stand apart"):
        buddy.check()


@pytest.mark.parametrize("num_slots", [1, 2, 7, 20, 64, 100])
def test_all_slots_come_back_as_they_were(num_slots: int):
    buddy = BuddyAllocator(num_slots)
    before = {size: set(starts) for size, starts in buddy._free.items()}
    starts = []
    while (start := buddy.allocate(1)) is not None:
        starts.append(start)
    assert sorted(starts) == list(range(num_slots))
    for start in random.Random(0).sample(starts, len(starts)):
        buddy.free(start)
        buddy.check()
    assert buddy._free == before


class ArenaWalk:
    """Reserve, grow and give back at random; compare every slot with plain lists."""

    rules = ("allocate", "append", "append", "append", "free")

    def __init__(self, rng: random.Random):
        self.arena = Arena(rng.choice([1, 5, 16, 37, 100]), max_model_len=12, reservation=rng.choice(RESERVATIONS))
        self.slots: dict[int, list[int]] = {}
        self.room: dict[int, int] = {}
        self.next_id = 0

    def allocate(self, rng: random.Random) -> str:
        num_prompt, num_output = rng.randint(1, 8), rng.randint(1, 4)
        if num_prompt > self.arena.limit or not self.arena.can_admit(num_prompt, num_output):
            with pytest.raises(AccountingError):
                self.arena.allocate(self.next_id, num_prompt, num_output)
            return "refuse"
        start = self.arena.allocate(self.next_id, num_prompt, num_output)
        self.slots[self.next_id] = list(range(start, start + num_prompt))
        self.room[self.next_id] = min(num_output, self.arena.limit - num_prompt)
        self.next_id += 1
        return "allocate"

    def append(self, rng: random.Random) -> str | None:
        able = [seq_id for seq_id, room in self.room.items() if room]
        if not able:
            return None
        seq_id = rng.choice(able)
        slot = self.arena.append(seq_id)
        assert slot == self.slots[seq_id][-1] + 1, "a sequence is not dense"
        self.slots[seq_id].append(slot)
        self.room[seq_id] -= 1
        return "append"

    def free(self, rng: random.Random) -> str | None:
        if not self.slots:
            return None
        seq_id = rng.choice(list(self.slots))
        self.arena.free(seq_id)
        del self.slots[seq_id], self.room[seq_id]
        return "free"

    def check(self) -> None:
        self.arena.check()
        taken = [slot for slots in self.slots.values() for slot in slots]
        assert len(set(taken)) == len(taken), "two tokens share a slot"
        assert all(0 <= slot < self.arena.num_slots for slot in taken)
        assert self.arena.waste().token_states == len(taken)


def test_long_random_walks_lose_no_range_and_share_no_slot(num_operations: int):
    events = run_walks(ArenaWalk, num_operations)
    assert events.total() == num_operations
    assert events.keys() == {"allocate", "refuse", "append", "free"}
    assert min(events.values()) > num_operations / 20, events


def test_small_random_walks_lose_no_range_and_share_no_slot():
    assert run_small_walks(ArenaWalk).keys() == {"allocate", "refuse", "append", "free"}
