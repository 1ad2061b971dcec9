"""Requests of several sequences: samples and beams fork, leave and return together, and share what is in common."""

import pytest

from minipaged.batching.group import Group
from minipaged.batching.plan import NextToken
from minipaged.batching.preemption import Policy, Preemption
from tests.batching.steps import Driver

BOTH = pytest.mark.parametrize("policy", ["recompute", "swap"])


def num_used(driver: Driver) -> int:
    return driver.cache.pool.num_blocks - driver.cache.pool.num_free


def spans(driver: Driver) -> list[tuple[int, int, int]]:
    """Make a step and return which tokens of which sequence it computed."""
    return [(chunk.member.seq_id, chunk.start, chunk.stop) for chunk in driver.step().chunks]


# -- samples


@pytest.mark.parametrize(("num_tokens", "num_copies", "num_blocks"), [(18, 3, 5), (32, 0, 6), (16, 0, 5), (15, 3, 4)])
def test_four_samples_share_full_blocks_and_copy_a_part_full_one(num_tokens: int, num_copies: int, num_blocks: int):
    driver = Driver()
    driver.add(num_tokens, max_output_tokens=8, num_sequences=4)
    driver.step()
    assert num_used(driver) == -(-num_tokens // 16), "a fork takes no block"
    plan = driver.step()
    assert len(plan.copies) == num_copies == len(driver.acts("copy")) and plan.num_tokens == 4
    assert num_used(driver) == num_blocks
    assert not driver.step().copies
    driver.run()
    assert driver.num_outputs == {0: 8} and num_used(driver) == 0


def test_samples_end_one_by_one_and_give_back_their_seats():
    ends = {100: 3, 102: 2, 103: 5}

    def answer(group: Group) -> list[NextToken]:
        tokens = driver.samples(group)
        num_outputs = driver.num_outputs[0] + 1
        return [NextToken(t.seq_id, t.token_id, t.parent_id, num_outputs == ends[t.seq_id]) for t in tokens]

    driver = Driver(max_num_seqs=3)
    driver.add(5, answer=answer, num_sequences=3)
    driver.add(5, num_sequences=2, max_output_tokens=2)
    seats = []
    for _ in range(5):
        driver.step()
        seats.append(sum(group.num_sequences for group in driver.scheduler.running))
    assert seats == [3, 2, 1, 3, 0]
    ends_told = [(event.step, event.seq_id) for event in driver.acts("finish")]
    assert ends_told == [(2, 102), (3, 100), (5, None), (5, None)]  # of samples, and of the two requests
    assert num_used(driver) == 0


def test_a_sample_that_ends_with_its_first_token_never_takes_a_block():
    driver = Driver()

    def answer(group: Group) -> list[NextToken]:
        first, *others = driver.samples(group)
        return [NextToken(first.seq_id, first.token_id, is_last=first.seq_id == 100), *others]

    driver.add(16, answer=answer, num_sequences=2)
    driver.step()
    assert driver.group(0).seq_ids == [101] and num_used(driver) == 1
    driver.step()
    assert num_used(driver) == 2


@BOTH
def test_all_samples_of_a_request_leave_together_and_return_together(policy: Policy):
    """Three samples of 18 tokens have one full block in common. Request 0 ends in the step after they leave."""
    driver = Driver(num_blocks=5, preemption=Preemption(policy))
    driver.add(15, max_output_tokens=3)
    driver.add(18, max_output_tokens=5, num_sequences=3)
    driver.step()
    driver.step()
    assert num_used(driver) == 5, "one, and one in common, and three"
    assert spans(driver) == [(100, 16, 17)]
    (event,) = driver.acts("preempt")
    assert event.request_id == 1 and driver.group(1).seq_ids == [101, 102, 103]
    resumed = spans(driver)
    moves = [event.reason for event in driver.acts("swap")]
    if policy == "swap":
        assert moves == ["4 blocks out", "4 blocks in"], "the block in common moves once"
        assert resumed == [(101, 19, 20), (102, 19, 20), (103, 19, 20)]
    else:
        assert moves == [] and resumed == [(101, 0, 19), (102, 16, 19), (103, 16, 19)]
        assert [driver.cache.tables[seq_id].block_ids[0] for seq_id in (102, 103)] == [
            driver.cache.tables[101].block_ids[0]
        ] * 2
        assert num_used(driver) == 4
    driver.run()
    assert driver.num_outputs == {0: 3, 1: 5}


@BOTH
def test_samples_leave_right_after_the_fork_and_copy_when_they_are_back(policy: Policy):
    driver = Driver(num_blocks=3, preemption=Preemption(policy))
    driver.add(16, max_output_tokens=2)
    driver.add(18, max_output_tokens=3, num_sequences=2)
    driver.step()
    driver.step()
    assert driver.acts("preempt")[0].request_id == 1 and num_used(driver) == 0
    plan = driver.step()
    if policy == "swap":
        assert [event.reason for event in driver.acts("swap")] == ["2 blocks out", "2 blocks in"]
        assert len(plan.copies) == 1, "the part-full block is still shared"
    else:
        assert [(chunk.start, chunk.stop) for chunk in plan.chunks] == [(0, 18), (16, 18)]
        assert not plan.copies
    assert num_used(driver) == 3
    driver.run()
    assert driver.num_outputs == {0: 2, 1: 3}


def test_what_several_sequences_have_in_common_is_computed_first_and_once_in_chunks_too():
    driver = Driver(num_blocks=8, max_num_batched_tokens=10, block_size=4, preemption=Preemption("recompute"))
    driver.add(4, max_output_tokens=4)
    driver.add(17, max_output_tokens=4, num_sequences=3)
    driver.step_until("preempt")
    (chunk,) = driver.step_until("resume").chunks
    assert (chunk.member.seq_id, chunk.start, chunk.stop) == (101, 0, 10)
    assert spans(driver) == [(101, 10, 17), (102, 16, 17), (103, 16, 17)]
    assert spans(driver) == [(101, 17, 18), (102, 17, 18), (103, 17, 18)], "they decode together"
    driver.run()
    assert driver.num_outputs == {0: 4, 1: 4}


def test_tokens_to_compute_again_count_what_is_in_common_once():
    driver = Driver()
    driver.add(18, max_output_tokens=5, num_sequences=3)
    driver.step()
    driver.step()
    driver.step()
    group = driver.group(0)
    assert group.num_tokens_computed() == 18 + 3 * 2
    assert group.room().num_common == 18 and group.room().lengths == [20, 20, 20]
    assert group.room().num_output_tokens == 2


# -- beams


def beams(driver: Driver, *parents: list[int]):
    """Return an answer that lets beams follow from parents, given by their places, at each step; then all end."""
    steps = iter(parents)

    def answer(group: Group) -> list[NextToken]:
        places = next(steps, [])
        return [
            driver.fork_of(group.members[place]) if place in places[:i] else driver.next_of(group.members[place])
            for i, place in enumerate(places)
        ]

    return answer


def test_beams_are_dropped_forked_and_put_in_another_order_at_each_step():
    driver = Driver(block_size=4, num_blocks=40)
    driver.add(6, 9, beams(driver, [0, 0, 0], [2, 1, 1], [1, 0, 2], [2, 2, 2], [0]), num_sequences=3)
    orders = []
    while driver.scheduler.has_unfinished:
        driver.step()
        orders.append(driver.group(0).seq_ids if driver.scheduler.groups else [])
    assert orders == [[100, 101, 102], [102, 101, 103], [101, 102, 103], [103, 104, 105], [103], []]
    assert num_used(driver) == 0 and driver.acts("copy")


def test_beams_share_what_they_have_in_common_beyond_the_prompt():
    driver = Driver(block_size=4, num_blocks=40)
    driver.add(6, 9, beams(driver, [0, 0], [1, 1], [1, 1], [1, 1], [0, 1]), num_sequences=2)
    for _ in range(5):
        driver.step()
    group = driver.group(0)
    first, second = (member.token_ids for member in group.members)
    assert first[:9] == second[:9] and first[9] != second[9] and len(first) == 11
    room = group.room()
    assert (room.num_common, room.lengths) == (9, [10, 10])
    assert driver.cache.num_blocks_needed(room) == 4, "two full blocks in common and one each"


@BOTH
def test_beams_are_sent_away_in_the_middle_and_go_on_with_their_own_tokens(policy: Policy):
    driver = Driver(num_blocks=9, block_size=4, max_num_batched_tokens=12, preemption=Preemption(policy))
    driver.add(7, max_output_tokens=12)
    search = beams(driver, [0, 0, 0], [1, 0, 0], [2, 2, 1], [0, 1, 0], [0, 1, 2], [2, 1, 0], [1, 1, 1])
    driver.add(6, 8, search, num_sequences=3)
    driver.run()
    moves = [event.act for event in driver.acts("preempt", "resume", request_id=1)]
    assert moves[:2] == ["preempt", "resume"] and driver.acts("copy", request_id=1)
    assert driver.num_outputs == {0: 12, 1: 8} and num_used(driver) == 0
    assert bool(driver.scheduler.num_swaps) == (policy == "swap")


# -- a window


def test_blocks_that_have_left_the_window_are_given_back():
    driver = Driver(num_blocks=4, block_size=4, window=5)
    driver.add(16, max_output_tokens=1)
    driver.step()
    driver.add(10, max_output_tokens=7)
    used = []
    while driver.scheduler.has_unfinished:
        driver.step()
        used.append(num_used(driver))
    assert used == [2, 2, 1, 2, 2, 2, 0]


def test_under_a_window_chunks_of_a_prompt_give_back_blocks_as_they_go():
    driver = Driver(num_blocks=5, block_size=4, window=4, max_num_batched_tokens=7)
    driver.add(20, max_output_tokens=2)
    used = []
    for _ in range(4):
        driver.step()
        used.append(num_used(driver))
    assert used == [4, 3, 1, 0]


@BOTH
def test_samples_under_a_window_give_back_what_they_share_with_the_last_of_them(policy: Policy):
    driver = Driver(num_blocks=6, block_size=4, window=8, preemption=Preemption(policy))
    driver.add(5, max_output_tokens=20, num_sequences=2)
    used = []
    for _ in range(20):
        driver.step()
        used.append(num_used(driver))
    assert used[:4] == [2, 3, 3, 3] and max(used) <= 6 and used[-1] == 0


@BOTH
def test_one_whose_first_blocks_were_given_back_computes_them_again_or_brings_back_the_others(policy: Policy):
    driver = Driver(num_blocks=5, block_size=4, window=5, preemption=Preemption(policy))
    driver.add(3, max_output_tokens=6)
    driver.add(15, max_output_tokens=6)
    driver.step()
    driver.add(8, max_output_tokens=6, priority=-1)
    driver.step()
    driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == [1]
    if policy == "swap":
        assert driver.acts("swap")[0].reason == "1 blocks out", "three of its four blocks had left the window"
    plan = driver.step_until("resume")
    chunk = plan.chunks[-1]
    assert (chunk.start, chunk.stop) == ((0, 17) if policy == "recompute" else (16, 17))
    driver.run()
    assert driver.num_outputs == {0: 6, 1: 6, 2: 6} and num_used(driver) == 0
