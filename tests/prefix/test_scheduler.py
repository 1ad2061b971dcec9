"""Requests that find a part of their prompt: what they compute, what they wait for, and what they leave to others."""

from typing import Any

import pytest

from minipaged import use
from minipaged.batching.limits import MAX_PASSED
from minipaged.batching.plan import Plan
from minipaged.batching.preemption import Policy
from minipaged.prefix.scheduler import PrefixPlan
from tests.prefix.steps import KINDS, Kind, PrefixDriver, entries_of, serve

BOTH = pytest.mark.parametrize("kind", KINDS)


def num_computed(plans: list[Plan]) -> int:
    return sum(plan.num_tokens for plan in plans)


def run(driver: PrefixDriver) -> list[Plan]:
    plans = []
    while driver.scheduler.has_unfinished:
        plans.append(driver.step())
    return plans


# -- the edges of blocks


@pytest.mark.parametrize(("kind", "start"), [("hash", 16), ("radix", 31)])
def test_a_prompt_of_whole_blocks_that_comes_again_computes_its_last_token_in_its_place(kind: Kind, start: int):
    driver = PrefixDriver(kind)
    prompt = list(range(32))
    for expected in (0, start, start):
        group = driver.group(driver.add(list(prompt), 8))
        plan = driver.step()
        (chunk,) = plan.chunks
        assert (chunk.start, chunk.stop, chunk.is_sampled) == (expected, 32, True)
        table = driver.cache.tables[chunk.member.seq_id]
        assert table.num_tokens == 32 and len(table.block_ids) == 2
        assert group.num_hit_tokens == expected
        driver.run()


@BOTH
@pytest.mark.parametrize("policy", [None, "recompute", "swap"])
@pytest.mark.parametrize(
    ("length", "num_after_prefill", "num_after_decode", "num_full"),
    [(15, 1, 1, 0), (16, 1, 2, 1), (17, 2, 2, 1), (31, 2, 2, 1), (32, 2, 3, 2), (33, 3, 3, 2)],
)
def test_each_full_block_is_entered_once_when_it_is_full(
    kind: Kind, length: int, num_after_prefill: int, num_after_decode: int, num_full: int, policy: Policy | None
):
    driver = PrefixDriver(kind, num_blocks=num_after_decode)
    entered: list[int] = []
    insert = driver.cache.index.insert

    def counting(place: Any, token_ids: list[int], block_id: int) -> Any:
        result = insert(place, token_ids, block_id)
        entered.extend([block_id] if block_id in driver.cache.index and len(token_ids) == 16 else [])
        return result

    driver.cache.index.insert = counting
    driver.add(list(range(length)), 3)
    driver.step()
    assert len(driver.cache.tables[100].block_ids) == num_after_prefill
    assert len(entered) == len(entries_of(driver.cache.index)) == num_full
    if policy:
        driver.send_away(0, policy)
    driver.step()
    if driver.num_outputs[0] == 1:
        driver.step()
    assert len(driver.cache.tables[100].block_ids) == num_after_decode
    assert driver.cache.tables[100].num_tokens == length + 1
    is_cut_off = (length, policy) == (31, "swap")  # it came back into all blocks, also that of its own entry
    assert len(entered) == (length + 1) // 16 + is_cut_off  # which it then enters again
    driver.scheduler.abort(0)
    assert driver.cache.pool.num_free == num_after_decode


@BOTH
def test_what_was_filled_while_decoding_is_found_by_the_next_turn(kind: Kind):
    driver = PrefixDriver(kind)
    answer = list(range(1000, 1030))
    serve(driver, list(range(20)), 30)
    turn = [*range(20), *answer, 1, 2, 3]
    assert serve(driver, turn).num_hit_tokens == (48 if kind == "hash" else 49), "the last answer has no K and V"


# -- requests that come together


@BOTH
@pytest.mark.parametrize("budget", [128, 32])
def test_a_request_that_comes_with_another_hits_nothing_that_is_not_written(kind: Kind, budget: int):
    driver = PrefixDriver(kind, max_num_seqs=4, max_num_batched_tokens=budget)
    prompts = [[*range(32), *range(100 * i, 100 * i + 8)] for i in (1, 2)]
    groups = [driver.group(driver.add(prompt, 3)) for prompt in prompts]
    first = driver.step()
    assert [chunk.group.request_id for chunk in first.chunks] == [0]
    reasons = {128: "waits for a block that another request is computing", 32: "the step has its 32 tokens"}
    assert driver.acts("wait")[0].reason.startswith(reasons[budget])
    plans = [first, *run(driver)]
    assert [group.num_hit_tokens for group in groups] == [0, 32]
    assert num_computed(plans) == 40 + 8 + 2 * 2


@BOTH
@pytest.mark.parametrize("loss", [None, "abort", "recompute", "swap"])
def test_a_common_beginning_of_64_requests_is_computed_once_whatever_becomes_of_the_first(kind: Kind, loss: str | None):
    driver = PrefixDriver(kind, num_blocks=400, max_num_seqs=80, max_num_batched_tokens=512)
    groups = [driver.group(driver.add([*range(2048), 5000 + i, 1, 2], 4)) for i in range(64)]
    plans = [driver.step()]
    if loss == "abort":
        driver.scheduler.abort(0)
    elif loss:
        driver.send_away(0, loss)  # type: ignore[arg-type]
    plans += run(driver)
    num_running = 64 - (loss == "abort")
    assert num_computed(plans) == 2048 + num_running * (3 + 3)
    hits = [group.num_hit_tokens for group in groups]
    assert hits.count(2048) == 63 - (loss == "abort"), hits
    assert len(plans) < 20


@BOTH
def test_nobody_waits_for_a_block_that_only_looks_the_same(kind: Kind):
    """Their second blocks are equal, but each stands behind another first one."""
    driver = PrefixDriver(kind)
    groups = [driver.group(driver.add([i, *range(15), *range(50, 66), 7], 2)) for i in (100, 200)]
    plan = driver.step()
    assert len(plan.chunks) == 2 and not driver.acts("wait")
    driver.run()
    assert [group.num_hit_tokens for group in groups] == [0, 0]


@BOTH
def test_requests_of_other_salts_do_not_wait_for_each_other_and_find_nothing(kind: Kind):
    driver = PrefixDriver(kind)
    prompt = list(range(64))
    for salt in ("a", "b"):
        driver.add(list(prompt), 1, cache_salt=salt)
    assert len(driver.step().chunks) == 2
    driver.run()
    options: list[dict[str, Any]] = [{"cache_salt": "a"}, {}, {"cache_salt": ""}]
    groups = [serve(driver, prompt, **each) for each in options]
    hits = [group.num_hit_tokens for group in groups]
    assert hits == ([48, 0, 48] if kind == "hash" else [63, 0, 63])


# -- passing one that waits


def entered(driver: PrefixDriver) -> list[int]:
    """Return who entered in the last step, in that order."""
    return [event.request_id for event in reversed(driver.acts_of_step("admit"))]


@BOTH
def test_a_short_request_passes_one_that_waits_for_a_block_and_leaves_it_its_turn(kind: Kind):
    driver = PrefixDriver(kind, max_num_batched_tokens=128)
    for prompt in ([*range(48), 1], [*range(48), 2], [3] * 8, [*range(48), 4], [5] * 8):
        driver.add(prompt, 2)
    driver.step()
    assert entered(driver) == [0, 2, 4]
    waiting = driver.acts_of_step("wait")
    assert {event.request_id for event in waiting} == {1, 3}
    assert all(event.reason.startswith("waits for a block") for event in waiting)
    driver.step()
    assert entered(driver) == [1, 3]
    driver.run()


@BOTH
def test_only_a_request_that_the_step_has_tokens_for_passes(kind: Kind):
    """Its rest would take tokens of the next step from the one that it passed."""
    for length, order in ((15, [0, 2]), (16, [0])):
        driver = PrefixDriver(kind, max_num_batched_tokens=64)
        for prompt in ([*range(48), 1], [*range(48), 2], [3] * length):
            driver.add(prompt, 2)
        driver.step()
        assert entered(driver) == order, f"{length} tokens beside 49, where the step has 64"
        driver.run()


@BOTH
def test_nobody_passes_one_that_waits_for_free_blocks(kind: Kind):
    driver = PrefixDriver(kind, num_blocks=4)
    for prompt in ([1] * 40, [2] * 40, [3] * 8):
        driver.add(prompt, 2)
    driver.step()
    assert entered(driver) == [0]
    driver.run()


@BOTH
def test_a_step_passes_by_at_most_so_many(kind: Kind):
    """A step looks at one more than it may pass, so what it takes does not grow with the queue."""
    for num_waiting, order in ((MAX_PASSED, [0, MAX_PASSED + 1]), (MAX_PASSED + 1, [0])):
        driver = PrefixDriver(kind, num_blocks=400, max_num_batched_tokens=512)
        for i in range(num_waiting + 1):
            driver.add([*range(48), i], 1)
        driver.add([7] * 8, 1)
        driver.step()
        assert entered(driver) == order
        assert len(driver.acts_of_step("wait")) == num_waiting


# -- a small pool


@BOTH
def test_a_request_whose_blocks_were_reused_finds_nothing_and_is_told_what_was_given_up(kind: Kind):
    driver = PrefixDriver(kind, num_blocks=4, block_size=4)
    groups = [serve(driver, prompt) for prompt in (list(range(8)), list(range(100, 116)), list(range(8)))]
    assert [group.num_hit_tokens for group in groups] == [0, 0, 0]
    assert [group.num_evictions for group in groups] == [0, 2, 2]


@BOTH
def test_a_lone_request_may_fill_a_pool_that_is_full_of_other_things(kind: Kind):
    """Ten blocks: 100 tokens and 61 more, whose last has no slot. It takes 61 steps and sends nobody away."""
    driver = PrefixDriver(kind, num_blocks=10)
    serve(driver, list(range(160)))
    group = driver.group(driver.add([*range(50), *range(500, 550)], 61))
    assert len(run(driver)) == 61 and not driver.acts("preempt")
    assert group.num_hit_tokens == (48 if kind == "hash" else 50)
    assert driver.cache.pool.num_free == 10


def test_a_copy_is_made_from_a_block_that_others_would_have_taken_in_the_same_step():
    driver = PrefixDriver("radix", num_blocks=6, block_size=4, max_num_seqs=8)
    serve(driver, [0, 1, 2, 3])
    for i in range(5):
        serve(driver, [100 + i])
    assert driver.cache.pool.num_idle == 6
    driver.add([0, 1, 2, 77], 2)
    for i in range(4):
        driver.add([200 + i, 1, 1, 1], 1)
    plan = driver.step()
    assert plan.copies == [(0, driver.cache.tables[next(iter(driver.cache.tables))].block_ids[0])]
    assert len(plan.chunks) == 5 and driver.cache.pool.num_evictions == 5, "all but the source"
    driver.run()
    assert driver.cache.pool.num_free == 6


def test_where_source_and_copy_do_not_fit_the_prompt_is_computed():
    driver = PrefixDriver("radix", num_blocks=1, block_size=4)
    groups = [serve(driver, prompt) for prompt in ([0, 1, 2, 3], [0, 1, 2, 9], [0, 1, 2, 9])]
    assert [group.num_hit_tokens for group in groups] == [0, 0, 0] and len(driver.acts("finish")) == 3
    driver = PrefixDriver("radix", num_blocks=2, block_size=4)
    assert [serve(driver, prompt).num_hit_tokens for prompt in ([0, 1, 2, 3], [0, 1, 2, 9])] == [0, 3]


# -- a digest that gives everything one key, and rows that stand together


def test_with_one_key_for_all_blocks_everybody_computes_what_is_right():
    with use(block_key=lambda parent, token_ids: b"one"):
        driver = PrefixDriver("hash", num_blocks=30, block_size=4)
        groups = [serve(driver, [i % 2, *range(20)], 6, num_sequences=2) for i in range(6)]
        for i in range(6):
            driver.add([i % 2, *range(20)], 6)
        driver.run()
    assert sum(group.num_hit_tokens for group in groups) <= 6 * 4 and driver.cache.pool.num_free == 30


@BOTH
@pytest.mark.parametrize("block_size", [16, 256, 2048])
def test_rows_that_begin_in_the_same_blocks_stand_side_by_side(kind: Kind, block_size: int):
    driver = PrefixDriver(kind, num_blocks=8 * 4096 // block_size, block_size=block_size)
    for i in range(6):
        driver.add([i % 2, *range(1, 2048), 5000 + i], 4)
    for i in range(2):
        driver.add([9 + i] * 3, 9)
    for _ in range(3):
        plan = driver.step()
    assert isinstance(plan, PrefixPlan) and len(plan.chunks) == 8
    assert [(rows.num_rows, rows.num_tokens) for rows in plan.shared] == [(3, 2048), (3, 2048)]
    assert [chunk.group.request_id for chunk in plan.chunks] == [0, 2, 4, 1, 3, 5, 6, 7]
    driver.run()
