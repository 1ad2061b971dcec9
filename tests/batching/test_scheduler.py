"""Who runs at each step, in which order, within which budget, and what is told about it."""

import pytest

from minipaged import use
from minipaged.batching.cache import BatchingCache
from minipaged.batching.plan import Chunk, Event, NextToken, Plan
from minipaged.batching.preemption import Preemption
from minipaged.batching.scheduler import Scheduler
from minipaged.errors import AccountingError, UserError
from tests.batching.steps import Driver


def sizes(plan: Plan) -> dict[int, int]:
    """Return how many tokens of each request a step computes."""
    counts: dict[int, int] = {}
    for chunk in plan.chunks:
        counts[chunk.group.request_id] = counts.get(chunk.group.request_id, 0) + chunk.stop - chunk.start
    return counts


# -- the budget of a step


@pytest.mark.parametrize(
    ("num_tokens", "budget", "chunks"),
    [
        (80, 32, [32, 32, 16]),
        (64, 32, [32, 32]),
        (32, 32, [32]),
        (31, 32, [31]),
        (33, 32, [31, 2]),
        (65, 32, [32, 31, 2]),
        (3000, 2048, [2048, 952]),
        (3, 2, [2, 1]),
        (4, 3, [2, 2]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_a_prompt_is_cut_into_chunks_that_fit_into_the_step(num_tokens: int, budget: int, chunks: list[int]):
    driver = Driver(num_blocks=200, max_num_batched_tokens=budget)
    driver.add(num_tokens, max_output_tokens=2)
    plans = [driver.step() for _ in chunks]
    assert [plan.num_tokens for plan in plans] == chunks
    assert [plan.chunks[0].is_sampled for plan in plans] == [False] * (len(chunks) - 1) + [True]
    assert driver.step().num_tokens == 1 and not driver.scheduler.has_unfinished


def test_a_long_prompt_gets_only_what_those_who_decode_leave():
    driver = Driver(max_num_batched_tokens=8)
    for _ in range(3):
        driver.add(2)
    assert sizes(driver.step()) == {0: 2, 1: 2, 2: 2}
    driver.add(16, max_output_tokens=3)
    assert [sizes(driver.step())[3] for _ in range(4)] == [5, 5, 4, 2], "no single token stays behind"
    assert sizes(driver.step()) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_decodes_come_first_in_a_step_and_a_long_prompt_never_stops_them():
    driver = Driver(max_num_batched_tokens=10)
    first, second = driver.add(4), driver.add(3)
    driver.step()
    driver.add(90, max_output_tokens=2)
    for _ in range(11):
        chunks = driver.step().chunks
        assert [chunk.group.request_id for chunk in chunks] == [first, second, 2]
        assert [chunk.stop - chunk.start for chunk in chunks[:2]] == [1, 1]
    assert driver.num_outputs == {first: 12, second: 12}


def test_prompts_that_have_entered_go_on_in_the_order_of_their_turn():
    driver = Driver(max_num_batched_tokens=20)
    driver.add(30)
    driver.add(30)
    driver.add(4)
    assert sizes(driver.step()) == {0: 20}
    assert sizes(driver.step()) == {0: 10, 1: 10}
    assert sizes(driver.step()) == {0: 1, 1: 18, 2: 1}, "19 would leave a single token behind"
    assert sizes(driver.step()) == {0: 1, 1: 2, 2: 3}


def test_seats_are_256_or_as_many_as_a_step_has_tokens():
    cache = BatchingCache(8, 4)
    assert Scheduler(cache).max_num_seqs == 256
    assert Scheduler(cache, max_num_batched_tokens=100).max_num_seqs == 100
    assert Scheduler(cache, max_num_seqs=100, max_num_batched_tokens=100).max_num_seqs == 100
    with pytest.raises(UserError, match="max_num_seqs must be at most max_num_batched_tokens, which is 100, not 101"):
        Scheduler(cache, max_num_seqs=101, max_num_batched_tokens=100)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_a_limit_that_is_no_number_from_1_is_refused(name: str, value: object):
    with pytest.raises(UserError, match=f"{name} must be a whole number from 1, not {value!r}"):
        Scheduler(BatchingCache(8, 4), **{name: value})  # type: ignore[arg-type]


# -- who enters


def test_requests_enter_first_come_first_served_within_their_priority():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=64)
    for priority in (0, 5, 0, -1, 5, -1):
        driver.add(4, max_output_tokens=2, priority=priority)
    driver.run()
    assert [event.request_id for event in driver.acts("admit")] == [3, 5, 0, 2, 1, 4]


def test_one_of_higher_priority_goes_before_those_who_run_but_sends_nobody_away():
    driver = Driver(max_num_batched_tokens=40)
    driver.add(4, priority=1)
    driver.step()
    driver.add(100, priority=0)
    driver.add(4, priority=-1)
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == [2, 1, 0]
    assert sizes(driver.step()) == {0: 1, 2: 1, 1: 38} and not driver.acts("preempt")


def test_the_head_of_the_queue_is_never_overtaken():
    driver = Driver(num_blocks=5, block_size=4)
    driver.add(12, max_output_tokens=4)
    driver.add(12, max_output_tokens=2)
    driver.add(1, max_output_tokens=2)  # would fit at once
    for _ in range(4):
        assert sizes(driver.step()).keys() == {0}
    assert sizes(driver.step()) == {1: 12, 2: 1}


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 32])
def test_a_request_enters_when_the_blocks_of_its_whole_prompt_are_free(num_tokens: int):
    need = -(-num_tokens // 16)
    enough, too_few = (Driver(num_blocks=4 + extra, max_num_batched_tokens=24) for extra in (need, need - 1))
    for driver in (enough, too_few):
        driver.add(60)
        driver.add(num_tokens)
        for _ in range(4):  # 24, 24, 12 and a decode
            plan = driver.step()
    assert sizes(plan) == {0: 1}
    assert enough.group(1).is_running and not too_few.group(1).is_running
    reason = f"needs {need} blocks, {need - 1} are free"
    assert [event.reason for event in too_few.acts("wait", request_id=1)][-1] == reason


def test_a_request_takes_a_seat_for_each_of_its_sequences_before_they_fork():
    driver = Driver(max_num_seqs=5, max_num_batched_tokens=64)
    driver.add(40, num_sequences=3, max_output_tokens=2)
    driver.add(4, num_sequences=3)
    driver.add(4)
    driver.step()
    assert driver.acts("wait")[-1].reason == "needs 3 of 5 seats, 3 are taken (max_num_seqs)"
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == []
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == [1, 2]


def test_a_request_with_more_sequences_than_seats_is_refused():
    driver = Driver(max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(UserError, match=r"the request has 5 sequences; at most 4 run at a time \(max_num_seqs\)"):
        driver.add(4, num_sequences=5)
    assert not driver.scheduler.has_unfinished


def test_a_step_whose_tokens_are_spent_lets_nobody_enter_and_says_so():
    driver = Driver(max_num_batched_tokens=8)
    driver.add(8)
    driver.add(4)
    driver.step()
    waiting = driver.acts("wait")[-1]
    assert waiting == Event(1, "wait", 1, reason="the step has its 8 tokens (max_num_batched_tokens)")
    assert driver.scheduler.num_waiting == 1


# -- what is told


def test_every_act_is_told_with_its_step_request_sequence_and_numbers():
    """The prompt of 6 leaves room for 3 more tokens of another one, which then waits for a block."""
    driver = Driver(num_blocks=4, block_size=4, max_num_batched_tokens=9, preemption=Preemption("swap"))
    driver.add(6, max_output_tokens=3, num_sequences=2)
    driver.add(5, max_output_tokens=2)
    driver.run()
    assert driver.events == [
        Event(1, "admit", 0),
        Event(1, "chunk", 0, 100, 6),
        Event(1, "admit", 1),
        Event(1, "chunk", 1, 101, 3),
        Event(2, "preempt", 1, reason="request 0 needs a block; swap: that is the policy"),
        Event(2, "swap", 1, reason="2 blocks out"),
        Event(2, "decode", 0, 100, 1),
        Event(2, "decode", 0, 102, 1),
        Event(2, "copy", 0, reason="block 1 to 3"),
        Event(3, "decode", 0, 100, 1),
        Event(3, "decode", 0, 102, 1),
        Event(3, "wait", 1, reason="needs 2 blocks and 3 to spare to be swapped in"),
        Event(3, "finish", 0, reason="done"),
        Event(4, "resume", 1),
        Event(4, "swap", 1, reason="2 blocks in"),
        Event(4, "chunk", 1, 101, 2),
        Event(5, "decode", 1, 101, 1),
        Event(5, "finish", 1, reason="done"),
    ]


def test_a_scheduler_without_a_listener_does_the_same():
    heard, silent = Driver(num_blocks=7, block_size=4), Driver(num_blocks=7, block_size=4)
    silent.scheduler.listener = None
    for driver in (heard, silent):
        driver.add(9, max_output_tokens=8, num_sequences=2)
        driver.add(7, max_output_tokens=9)
    assert heard.run() == silent.run()
    assert heard.scheduler.num_preemptions == silent.scheduler.num_preemptions > 0
    assert heard.acts("finish") and not silent.events


# -- ends and misuse


def test_a_request_alone_grows_to_the_last_slot_and_is_never_sent_away():
    driver = Driver(num_blocks=10)
    driver.add(100, max_output_tokens=61)
    assert driver.run() == 61 and driver.num_outputs == {0: 61}
    assert not driver.acts("preempt", "wait")


def test_one_that_outgrows_the_cache_alone_is_a_fault_of_the_caller():
    driver = Driver(num_blocks=10)
    driver.add(100, max_output_tokens=62)
    with pytest.raises(AccountingError, match="request 0 has outgrown the cache, and nobody else runs"):
        driver.run()
    driver.scheduler.abort(0)
    assert driver.cache.pool.num_free == 10


def test_a_sequence_that_no_token_continues_is_dropped():
    driver = Driver(num_blocks=8, block_size=4)
    driver.add(6, answer=lambda group: [])
    driver.add(6)
    driver.step()
    assert [group.request_id for group in driver.scheduler.running] == [1]
    assert driver.acts("finish") == [Event(1, "finish", 0, reason="done")]


def test_a_name_can_be_used_again_when_its_request_has_gone():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    driver.add(4, max_output_tokens=3)
    driver.step()
    scheduler = driver.scheduler
    scheduler.add(9, 201, [1, 2, 3], max_output_tokens=2)
    scheduler.abort(9)
    scheduler.add(9, 202, [4, 5], max_output_tokens=2)
    assert scheduler.num_waiting == 1
    scheduler.abort(0)
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.member.seq_id, chunk.token_ids) == (202, [4, 5])


def test_another_plan_can_take_the_place_of_a_step():
    """Prompts before decodes, one at a time: who decodes stands still while a prompt is computed."""

    def prompts_first(scheduler: Scheduler) -> Plan:
        plan = Plan()
        if not any(not group.is_decoding for group in scheduler.running):
            scheduler.plan_admission(plan)
        for group in scheduler.running if not plan.chunks else ():
            if group.is_decoding:
                (member,) = group.members
                slot = scheduler.cache.append(member.seq_id)
                plan.add(Chunk(group, member, member.num_computed, member.num_computed + 1, [slot], True))
        return plan

    scheduler = Scheduler(BatchingCache(8, 4))
    with use(plan_step=prompts_first):
        for request_id in range(2):
            scheduler.add(request_id, request_id, [1] * 4, max_output_tokens=9)
            plan = scheduler.schedule()
            assert [chunk.member.seq_id for chunk in plan.chunks] == [request_id]
            scheduler.update(plan, [NextToken(request_id, 5)])
        assert [chunk.member.seq_id for chunk in scheduler.schedule().chunks] == [0, 1]
