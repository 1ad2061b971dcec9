"""Rung 1's arena under the scheduler: ranges are reserved whole, so requests wait longer and nobody is sent away."""

import re
from random import Random

import pytest

from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import Room
from minipaged.contiguous.arena import Waste
from minipaged.errors import AccountingError
from tests.batching.steps import Driver


def room(seq_id: int, length: int, num_output_tokens: int) -> Room:
    return Room([seq_id], [length], num_common=0, num_output_tokens=num_output_tokens)


def test_a_prompt_has_slots_for_all_its_chunks_and_decodes_into_the_same_range():
    driver = Driver(cache=ArenaCache(num_slots=64, max_model_len=32), max_num_batched_tokens=8)
    driver.add(20, max_output_tokens=4)
    driver.add(5, max_output_tokens=2)
    slots = [chunk.slots for _ in range(6) for chunk in driver.step().chunks if chunk.group.request_id == 0]
    assert [slot for own in slots for slot in own] == list(range(23)) and [len(own) for own in slots[:3]] == [8, 8, 4]
    assert not driver.scheduler.has_unfinished and not driver.cache.ranges


@pytest.mark.parametrize(
    ("reservation", "num_at_once", "reason"),
    [
        ("max", 1, "needs a range of 64 slots, 0 of 64 slots are free in ranges of up to 0"),
        ("pow2", 2, "needs a range of 17 slots, 0 of 64 slots are free in ranges of up to 0"),
        ("oracle", 4, "needs a range of 16 slots, 0 of 64 slots are free in ranges of up to 0"),
    ],
)
def test_as_many_run_as_ranges_fit_and_the_next_one_says_what_it_waits_for(reservation, num_at_once: int, reason: str):
    """Thirteen tokens and three more: 64 by the limit, 13 + 4 (a range of 32) by the power of two, 16 exactly."""
    driver = Driver(cache=ArenaCache(num_slots=64, max_model_len=64, reservation=reservation))
    for _ in range(6):
        driver.add(13, max_output_tokens=3)
    driver.step()
    assert len(driver.scheduler.running) == num_at_once
    assert [(event.request_id, event.reason) for event in driver.acts("wait")] == [(num_at_once, reason)]
    driver.run()
    assert set(driver.num_outputs.values()) == {3} and driver.scheduler.num_preemptions == 0


def test_nobody_is_sent_away_from_an_arena():
    rng = Random(0)
    driver = Driver(cache=ArenaCache(num_slots=96, max_model_len=48, reservation="oracle"), rng=rng, max_num_seqs=5)
    for _ in range(150):
        num_prompt_tokens = rng.randint(1, 40)
        driver.add(num_prompt_tokens, rng.randint(1, 48 - num_prompt_tokens), priority=rng.randrange(2))
        if rng.random() < 0.2:
            driver.scheduler.abort(rng.choice(list(driver.scheduler.groups)))
        driver.step()
    driver.run(max_steps=5000)
    assert driver.scheduler.num_preemptions == 0 and driver.acts("wait") and not driver.cache.ranges
    assert sorted(e.request_id for e in driver.acts("finish")) == list(range(150))
    assert driver.cache.buddy.largest_free == 64


def test_waste_is_what_was_reserved_and_not_used():
    driver = Driver(cache=ArenaCache(num_slots=64, max_model_len=20, reservation="max"))
    driver.add(10, max_output_tokens=8)
    for _ in range(3):
        driver.step()
    assert driver.cache.waste() == Waste(token_states=12, reserved=8, internal=0, external=12)
    assert driver.cache.waste({100: 8}) == Waste(token_states=12, reserved=6, internal=2, external=12)


def test_a_range_has_room_for_every_token_that_was_announced_and_no_more():
    cache = ArenaCache(num_slots=16, max_model_len=16, reservation="oracle")
    cache.allocate(room(0, 6, num_output_tokens=2))
    assert cache.can_append([0]) and (cache.append(0), cache.append(0)) == (6, 7)
    with pytest.raises(AccountingError, match="sequence 0 has filled its reservation of 8 slots"):
        cache.append(0)
    with pytest.raises(AccountingError, match="no range of 9 slots is free"):
        cache.allocate(room(1, 8, num_output_tokens=1))
    cache.check()


def test_an_arena_knows_no_headroom_windows_copies_or_swaps():
    cache = ArenaCache(num_slots=16, max_model_len=16)
    assert cache.can_admit(room(0, 3, 3), headroom=99)
    cache.allocate(room(0, 3, 3))
    cache.note_computed(0, 3, [1, 2, 3])
    assert cache.slots(0, 1, 3) == [1, 2] and list(cache.block_ids(0)) == [0, 1, 2]
    assert cache.take_copies() == [] and cache.num_blocks_of([0]) == 0
    refusals = {
        "a range of the arena cannot be shared": lambda: cache.fork(0, 1),
        "a range of the arena is never swapped": lambda: cache.swap_out([0]),
    }
    for message, act in refusals.items():
        with pytest.raises(AccountingError, match=re.escape(message)):
            act()
    cache.check()
    assert list(cache.ranges) == [0]
