"""A request can be dropped wherever it is, wholly or in part, and gives back everything."""

import pytest

from minipaged.batching.plan import Event
from minipaged.batching.preemption import Policy, Preemption
from tests.batching.steps import Driver

BOTH = pytest.mark.parametrize("policy", ["recompute", "swap"])


def assert_nothing_is_left(driver: Driver) -> None:
    scheduler = driver.scheduler
    assert driver.cache.pool.num_free == driver.cache.pool.num_blocks and not driver.cache.tables
    assert not scheduler.has_unfinished and not scheduler.running and scheduler.num_waiting == 0
    assert scheduler.num_swapped_blocks == 0
    assert scheduler.schedule().chunks == []


def three_samples(budget: int = 64) -> Driver:
    """Return a driver whose request 0 has samples 100, 101 and 102 with 16 + 3 tokens computed, in 4 + 3 x 1 blocks."""
    driver = Driver(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=budget)
    driver.add(17, max_output_tokens=6, num_sequences=3)
    while driver.num_outputs[0] < 3:
        driver.step()
    assert driver.cache.pool.num_free == 13
    return driver


# -- whole requests


def test_a_request_that_waits_is_dropped_and_the_next_one_enters():
    driver = Driver(num_blocks=4, max_num_batched_tokens=64)
    driver.add(64)
    driver.step()
    driver.add(20)
    driver.add(1)
    driver.scheduler.abort(0)
    driver.scheduler.abort(1)
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == [2]
    driver.scheduler.abort(2)
    assert [(event.request_id, event.reason) for event in driver.acts("finish")] == [(i, "abort") for i in (0, 1, 2)]
    assert_nothing_is_left(driver)


def test_a_request_in_the_middle_of_its_prompt_gives_back_all_blocks_of_it():
    driver = Driver(num_blocks=4, max_num_batched_tokens=8)
    driver.add(60)
    driver.step()
    assert driver.cache.pool.num_free == 0
    driver.scheduler.abort(0)
    assert_nothing_is_left(driver)


def test_a_request_that_decodes_gives_back_the_blocks_of_all_its_samples():
    driver = Driver(num_blocks=8, block_size=4)
    driver.add(6, num_sequences=3)
    for _ in range(5):
        driver.step()
    driver.scheduler.abort(0)
    assert driver.acts("finish") == [Event(5, "finish", 0, reason="abort")]
    assert_nothing_is_left(driver)


@BOTH
def test_a_request_that_was_sent_away_gives_back_its_place_in_the_swap_space(policy: Policy):
    driver = three_samples()
    driver.send_away(0, policy)
    assert driver.scheduler.num_swapped_blocks == (7 if policy == "swap" else 0)
    driver.scheduler.abort(0)
    assert_nothing_is_left(driver)


def test_a_second_abort_does_nothing():
    driver = Driver()
    driver.add(5)
    driver.add(5, num_sequences=2)
    driver.step()
    for _ in range(2):
        driver.scheduler.abort(0)
        driver.scheduler.abort_sequence(0, 100)
        driver.scheduler.abort_sequence(1, 102)
        driver.scheduler.abort(77)
        driver.check()
    assert [(event.request_id, event.seq_id) for event in driver.acts("finish")] == [(0, None), (1, 102)]
    driver.run()
    driver.scheduler.abort(1)
    assert len(driver.acts("finish")) == 3
    assert_nothing_is_left(driver)


# -- one sequence of several


def test_one_sample_is_dropped_and_gives_back_its_seat_and_its_own_blocks():
    driver = Driver(max_num_seqs=3)
    driver.add(18, num_sequences=3)
    driver.add(1)
    driver.step()
    driver.step()
    assert driver.cache.pool.num_free == 96 and driver.scheduler.num_waiting == 1
    driver.scheduler.abort_sequence(0, 102)
    driver.check()
    assert driver.cache.pool.num_free == 97 and driver.group(0).seq_ids == [100, 103]
    driver.step()
    assert driver.scheduler.num_waiting == 0
    for seq_id in (100, 103):
        driver.scheduler.abort_sequence(0, seq_id)
    assert [event.seq_id for event in driver.acts("finish")] == [102, 100, None], "the last one takes the request along"
    driver.scheduler.abort(1)
    assert_nothing_is_left(driver)


@pytest.mark.parametrize("gone", [100, 101, 102])
def test_one_of_several_is_dropped_while_they_are_swapped_and_its_own_block_stays_behind(gone: int):
    driver = three_samples()
    driver.send_away(0, "swap")
    driver.scheduler.abort_sequence(0, gone)
    driver.check()
    assert driver.scheduler.num_swapped_blocks == 7, "the space is given back as a whole"
    plan = driver.step()
    (swap,) = plan.swaps_in
    assert [place for place, _ in swap.pairs] == [place for place in range(7) if place != gone - 100 + 4]
    assert [chunk.member.seq_id for chunk in plan.chunks] == [each for each in (100, 101, 102) if each != gone]
    driver.run()
    assert_nothing_is_left(driver)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("policy", [None, "recompute", "swap"])
@pytest.mark.parametrize("gone", [100, 101, 102])
def test_one_of_several_is_dropped_while_they_compute_everything_again(
    gone: int, policy: Policy | None, num_chunks: int
):
    """With 7 tokens a step the common 16 take three steps; the first sequence computes them for all."""
    driver = three_samples(budget=7)
    driver.send_away(0, "recompute")
    for _ in range(num_chunks):
        driver.step()
    assert [member.num_computed for member in driver.group(0).members] == [7 * num_chunks, 16, 16]
    if policy:
        driver.send_away(0, policy)
    driver.scheduler.abort_sequence(0, gone)
    driver.check()
    computed = 0 if policy == "recompute" else 7 * num_chunks
    assert driver.group(0).members[0].num_computed == computed, "the next one goes on where the first was"
    driver.run()
    assert driver.num_outputs == {0: 6}
    assert_nothing_is_left(driver)


@pytest.mark.parametrize("is_swapped", [False, True])
def test_those_who_lack_nothing_decode_when_the_one_that_did_is_dropped(is_swapped: bool):
    driver = Driver(num_blocks=20, block_size=4, max_num_batched_tokens=8)
    driver.add(5, max_output_tokens=9, num_sequences=2)
    for _ in range(3):
        driver.step()
    driver.send_away(0, "recompute")
    driver.step()
    assert [(member.num_computed, member.target) for member in driver.group(0).members] == [(7, 7), (5, 7)]
    if is_swapped:
        driver.send_away(0, "swap")
    driver.scheduler.abort_sequence(0, 101)
    (chunk,) = driver.step().chunks
    assert (chunk.member.seq_id, chunk.start, chunk.is_sampled) == (100, 7, True)
    driver.run()
    assert driver.num_outputs == {0: 9}
    assert_nothing_is_left(driver)


# -- while a step runs


@pytest.mark.parametrize("window", [None, 5])
def test_requests_and_samples_are_dropped_while_a_step_runs(window: int | None):
    driver = Driver(num_blocks=30, block_size=4, window=window)
    driver.add(9)
    driver.add(6, num_sequences=3)
    driver.add(6, num_sequences=2)
    driver.add(5, max_output_tokens=3)
    driver.step()

    def drop() -> None:
        driver.scheduler.abort(0)
        driver.scheduler.abort_sequence(1, driver.group(1).seq_ids[1])
        driver.scheduler.abort_sequence(2, driver.group(2).seq_ids[0])

    driver.step(between=drop)
    assert [len(group.members) for group in driver.scheduler.running] == [2, 1, 1]
    assert [len(member.token_ids) for member in driver.group(2).members] == [8], "the other one has its token"
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == [1, 2]
    for request_id in (1, 2):
        driver.scheduler.abort(request_id)
    assert_nothing_is_left(driver)


@pytest.mark.parametrize("gone", [100, 101])
def test_one_of_several_is_dropped_while_a_step_computes_everything_again(gone: int):
    driver = three_samples(budget=19)
    driver.send_away(0, "recompute")
    driver.step(between=lambda: driver.scheduler.abort_sequence(0, gone))
    driver.run()
    assert driver.num_outputs == {0: 6}
    assert_nothing_is_left(driver)


def test_all_are_dropped_while_a_step_runs():
    driver = Driver(num_blocks=30, block_size=4, max_num_batched_tokens=16)
    for _ in range(6):
        driver.add(7, num_sequences=2)
    driver.step()
    driver.step()
    driver.step(between=lambda: [driver.scheduler.abort(request_id) for request_id in range(6)])
    assert_nothing_is_left(driver)


@BOTH
@pytest.mark.parametrize("num_steps", range(0, 30, 3))
def test_dropping_everything_at_any_moment_frees_every_block(policy: Policy, num_steps: int):
    driver = Driver(num_blocks=7, block_size=4, max_num_batched_tokens=10, preemption=Preemption(policy))
    for count in (1, 2, 1, 2, 1):
        driver.add(7, max_output_tokens=9 // count, num_sequences=count)
    for _ in range(num_steps):
        driver.step()
    for request_id in range(5):
        driver.scheduler.abort(request_id)
    assert_nothing_is_left(driver)
