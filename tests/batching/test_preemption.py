"""Who is sent away when blocks run out, what becomes of the blocks, and how requests come back."""

from typing import Any

import pytest

from minipaged import use
from minipaged.batching.group import Group, Member
from minipaged.batching.plan import Plan
from minipaged.batching.preemption import Policy, Preemption, choose_victim
from minipaged.errors import AccountingError, UserError
from minipaged.paged.block_table import num_blocks_for
from tests.batching.steps import Driver

BOTH = pytest.mark.parametrize("policy", ["recompute", "swap"])
LENGTHS = pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33])


def spans(plan: Plan, request_id: int) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in plan.chunks if chunk.group.request_id == request_id]


def started(num_blocks: int, *lengths: int, **limits: Any) -> Driver:
    """Return a driver whose requests have all entered and have their first tokens."""
    driver = Driver(num_blocks, **limits)
    for num_tokens in lengths:
        driver.add(num_tokens)
    driver.step()
    return driver


# -- recompute or swap


@pytest.mark.parametrize(
    ("preemption", "numbers", "choice"),
    [
        (Preemption("recompute"), (64, 4, 0), ("recompute", "that is the policy")),
        (Preemption("swap"), (64, 4, 0), ("swap", "that is the policy")),
        (Preemption("swap"), (0, 4, 0), ("recompute", "nothing is computed yet")),
        (Preemption("auto"), (0, 4, 0), ("recompute", "nothing is computed yet")),
        (Preemption("swap", max_swapped_blocks=9), (64, 4, 5), ("swap", "that is the policy")),
        (Preemption("swap", max_swapped_blocks=8), (64, 4, 5), ("recompute", "the swap space of 8 blocks is full")),
        (Preemption("auto", max_swapped_blocks=0), (64, 1, 0), ("recompute", "the swap space of 0 blocks is full")),
        (Preemption("auto", 1, 15.5), (64, 4, 0), ("swap", "4 blocks take 62 s to move, 64 tokens 64 s to compute")),
        (Preemption("auto", 1, 16), (64, 4, 0), ("recompute", "4 blocks take 64 s to move, 64 tokens 64 s to compute")),
        (Preemption("auto", 0.5, 1), (9, 5, 0), ("recompute", "5 blocks take 5 s to move, 9 tokens 4.5 s to compute")),
    ],
)
def test_the_choice_between_recompute_and_swap(
    preemption: Preemption, numbers: tuple[int, int, int], choice: tuple[str, str]
):
    assert preemption.choose(*numbers) == choice


@pytest.mark.parametrize("policy", ["drop", "", None])
def test_an_unknown_policy_is_refused(policy: str):
    with pytest.raises(UserError, match=f"preemption must be one of auto, recompute, swap, not {policy!r}"):
        Preemption(policy)  # type: ignore[arg-type]


def test_the_victim_is_the_last_in_the_order_of_turns():
    groups = [Group(i, [Member(i, [1])], 1, 9, priority=0, arrival=i) for i in range(3)]
    assert choose_victim(groups) is groups[2]


@pytest.mark.parametrize(("seconds_per_block", "how"), [(15, "swap"), (17, "recompute")])
def test_auto_weighs_the_blocks_and_the_tokens_that_a_request_really_has(seconds_per_block: float, how: str):
    driver = Driver(num_blocks=4, preemption=Preemption("auto", seconds_per_block=seconds_per_block))
    driver.add(32, max_output_tokens=2)
    driver.add(32, max_output_tokens=2)
    driver.run()
    (event,) = driver.acts("preempt")
    moving = f"2 blocks take {2 * seconds_per_block} s to move, 32 tokens 32 s to compute"
    assert event.reason == f"request 0 needs a block; {how}: {moving}"
    assert driver.scheduler.num_swaps == (how == "swap")


def test_when_the_swap_space_is_full_the_next_one_computes_again():
    driver = Driver(num_blocks=6, block_size=4, preemption=Preemption("swap", max_swapped_blocks=3))
    for _ in range(3):
        driver.add(8, max_output_tokens=6)
    driver.run()
    reasons = [event.reason.split("; ")[1] for event in driver.acts("preempt")]
    assert reasons == ["swap: that is the policy", "recompute: the swap space of 3 blocks is full"]
    assert driver.scheduler.num_swapped_blocks == 0 and set(driver.num_outputs.values()) == {6}


# -- who goes and who comes back


@BOTH
def test_two_that_cannot_both_finish_take_turns_and_get_all_their_tokens(policy: Policy):
    driver = Driver(num_blocks=7, preemption=Preemption(policy))  # each ends at 65 tokens, 5 blocks
    driver.add(36, max_output_tokens=30)
    driver.add(36, max_output_tokens=30)
    driver.step_until("preempt")
    assert driver.scheduler.num_steps == 14, "both had 48 tokens computed and three full blocks"
    num_tokens = len(driver.group(1).members[0].token_ids)
    assert num_tokens == 36 + driver.num_outputs[1] == 49
    plan = driver.step_until("resume")
    assert spans(plan, 1) == ([(0, 49)] if policy == "recompute" else [(48, 49)])
    driver.run()
    assert driver.num_outputs == {0: 30, 1: 30} and driver.scheduler.num_preemptions == 1
    chunks = [event.num_tokens for event in driver.acts("chunk")]
    assert chunks == ([36, 36, 49] if policy == "recompute" else [36, 36])


@BOTH
def test_the_newest_goes_first_and_the_oldest_never(policy: Policy):
    driver = Driver(num_blocks=9, block_size=4, preemption=Preemption(policy))
    for _ in range(4):
        driver.add(8, max_output_tokens=20)
    driver.run()
    gone = [event.request_id for event in driver.acts("preempt")]
    assert gone[:2] == [3, 2] and 0 not in gone
    assert [event.request_id for event in driver.acts("finish")] == [0, 1, 2, 3]


def test_the_lowest_priority_goes_before_the_newest():
    driver = Driver(num_blocks=6, block_size=4, max_num_batched_tokens=16)
    driver.add(8, priority=7)
    driver.add(7, priority=0)
    driver.step()
    driver.add(4, priority=3)
    driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == []
    driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == [0]


@BOTH
def test_nobody_enters_in_the_step_in_which_somebody_is_sent_away(policy: Policy):
    driver = started(4, 32, 32, preemption=Preemption(policy))
    driver.add(1)  # two blocks get free at once
    plan = driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == [1]
    assert [chunk.group.request_id for chunk in plan.chunks] == [0] and driver.cache.pool.num_free == 1


@BOTH
def test_one_that_was_sent_away_keeps_its_place_before_those_who_came_later(policy: Policy):
    driver = Driver(num_blocks=5, preemption=Preemption(policy))
    driver.add(32, max_output_tokens=6)
    driver.add(40, max_output_tokens=3)
    driver.step()
    driver.add(1, max_output_tokens=4)
    while driver.scheduler.has_unfinished:
        driver.step()
    order = [(event.act, event.request_id) for event in driver.acts("admit", "resume", "preempt")]
    assert order == [("admit", 0), ("admit", 1), ("preempt", 1), ("resume", 1), ("admit", 2)]


@pytest.mark.parametrize(
    ("policy", "num_free", "reason"),
    [
        ("recompute", 5, "needs 3 blocks and 3 to spare, 5 are free"),
        ("recompute", 6, None),
        ("swap", 4, "needs 2 blocks and 3 to spare to be swapped in"),
        ("swap", 5, None),
    ],
)
def test_one_comes_back_only_if_everybody_can_grow_by_a_block_after_that(
    policy: Policy, num_free: int, reason: str | None
):
    driver = started(num_free + 6, 4 * num_free - 3, 7, 7, 7, block_size=4, preemption=Preemption(policy))
    driver.step()
    driver.step()  # request 1 needs its third block
    assert [event.request_id for event in driver.acts("preempt")] == [3] and driver.cache.pool.num_free == 0
    driver.scheduler.abort(0)
    driver.step()
    assert driver.group(3).is_running == (reason is None)
    assert [event.reason for event in driver.acts("wait")] == ([reason] if reason else [])


def test_with_nobody_else_there_one_comes_back_into_the_last_block():
    driver = Driver(num_blocks=3, block_size=4, preemption=Preemption("recompute"))
    driver.add(4, max_output_tokens=5)
    driver.add(8, max_output_tokens=5)
    driver.step()
    driver.step()
    assert driver.acts("preempt") and len(driver.group(1).members[0].token_ids) == 9
    driver.scheduler.abort(0)
    assert spans(driver.step(), 1) == [(0, 9)] and driver.cache.pool.num_free == 0


@BOTH
def test_one_that_is_sent_away_in_the_middle_of_its_prompt_goes_on_from_there_only_if_swapped(policy: Policy):
    driver = Driver(num_blocks=5, max_num_batched_tokens=17, preemption=Preemption(policy))
    driver.add(15, max_output_tokens=5)
    driver.add(64, max_output_tokens=1)
    assert [spans(driver.step(), 1) for _ in range(3)] == [[(0, 2)], [(2, 18)], []]
    assert driver.acts("preempt")[0].request_id == 1
    plan = driver.step_until("resume")
    assert spans(plan, 1) == ([(0, 17)] if policy == "recompute" else [(18, 35)])
    driver.run()
    assert driver.num_outputs == {0: 5, 1: 1}


def test_one_that_has_to_compute_more_than_fits_is_sent_away_once_and_waits_until_the_other_has_gone():
    """Twelve blocks: request 0 grows from 2 to 8, and request 1 has 150 tokens, 10 blocks."""
    driver = Driver(num_blocks=12, max_num_batched_tokens=32, preemption=Preemption("recompute"))
    driver.add(24, max_output_tokens=105)
    driver.add(146, max_output_tokens=10)
    while driver.scheduler.groups.get(0):
        driver.step()
    assert [(event.step, event.request_id) for event in driver.acts("preempt")] == [(10, 1)]
    assert len(driver.group(1).members[0].token_ids) == 150
    assert driver.acts("wait")[-1].reason == "needs 10 blocks and 2 to spare, 4 are free"
    chunks = [spans(driver.step(), 1) for _ in range(5)]
    assert chunks == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 128)], [(128, 150)]]
    driver.run()
    assert driver.num_outputs == {0: 105, 1: 10} and driver.scheduler.num_preemptions == 1


def test_a_prompt_that_fits_beside_a_long_sequence_sends_nobody_away():
    driver = started(64, 120)
    driver.add(50)
    driver.step()
    for _ in range(30):
        plan = driver.step()
        assert [chunk.group.request_id for chunk in plan.chunks] == [0, 1] and plan.num_tokens == 2
    assert driver.scheduler.num_preemptions == 0


# -- somebody else's choice


def test_another_rule_can_choose_the_victim_among_those_without_slots_yet():
    offered: list[list[int]] = []

    def second(groups: list[Group]) -> Group:
        offered.append([group.request_id for group in groups])
        return groups[1]

    driver = started(3, 15, 16, 5)
    with use(choose_victim=second):
        plan = driver.step()
    assert offered == [[1, 2]], "request 0 has its slot for this step already"
    assert [event.request_id for event in driver.acts("preempt")] == [2]
    assert [chunk.group.request_id for chunk in plan.chunks] == [0, 1]


def test_a_rule_may_send_away_the_one_that_needs_the_block():
    driver = started(3, 15, 16, 5)
    with use(choose_victim=lambda groups: groups[0]):
        plan = driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == [1]
    assert [chunk.group.request_id for chunk in plan.chunks] == [0, 2]


@pytest.mark.parametrize("choose", [lambda groups: None, lambda groups: Group(2, [Member(2, [1])], 1, 9, 0, 2)])
def test_a_victim_that_was_not_offered_is_refused(choose):
    driver = started(2, 16, 16)
    with use(choose_victim=choose), pytest.raises(AccountingError, match="none of the groups that it was given"):
        driver.step()
    assert not driver.acts("preempt")
    for request_id in range(2):
        driver.scheduler.abort(request_id)
    assert driver.cache.pool.num_free == 2


# -- full blocks, with and without preemption


@LENGTHS
def test_a_block_is_taken_with_the_token_that_needs_it(num_tokens: int):
    driver = Driver(num_blocks=num_blocks_for(num_tokens + 1, 16))
    driver.add(num_tokens, max_output_tokens=2)
    driver.step()
    assert driver.cache.num_blocks_of([100]) == {15: 1, 16: 1, 17: 2, 31: 2, 32: 2, 33: 3}[num_tokens]
    plan = driver.scheduler.schedule()
    assert driver.cache.num_blocks_of([100]) == {15: 1, 16: 2, 17: 2, 31: 2, 32: 3, 33: 3}[num_tokens]
    assert driver.cache.tables[100].num_tokens == num_tokens + 1
    driver.memory.carry_out(plan, driver.histories)
    driver.scheduler.update(plan, driver.next_tokens(plan))
    assert not driver.scheduler.has_unfinished and driver.cache.pool.num_free == driver.cache.pool.num_blocks


@BOTH
@LENGTHS
def test_one_that_is_sent_away_right_after_its_first_token_finishes(num_tokens: int, policy: Policy):
    """Request 0 needs its second block in the second step, and there is none."""
    num_blocks = 1 + num_blocks_for(num_tokens, 16)
    driver = Driver(num_blocks, preemption=Preemption(policy))
    driver.add(16, max_output_tokens=2)
    driver.add(num_tokens, max_output_tokens=2)
    driver.step()
    driver.step()
    assert [event.request_id for event in driver.acts("preempt")] == [1]
    assert len(driver.group(1).members[0].token_ids) == num_tokens + 1
    plan = driver.step()
    assert spans(plan, 1) == ([(0, num_tokens + 1)] if policy == "recompute" else [(num_tokens, num_tokens + 1)])
    assert [(event.act, event.request_id) for event in driver.acts("preempt", "finish", "resume")] == [
        ("preempt", 1),
        ("finish", 0),
        ("resume", 1),
        ("finish", 1),
    ]
    assert driver.num_outputs == {0: 2, 1: 2} and driver.cache.pool.num_free == num_blocks
