"""Samples and beams of prompts that were found, and requests that find their own blocks when they come back."""

import pytest

from tests.prefix.steps import KINDS, Kind, PrefixDriver, serve

BOTH = pytest.mark.parametrize("kind", KINDS)


@BOTH
@pytest.mark.parametrize(("length", "num_copies", "num_used"), [(18, 3, 5), (32, 0, 6)])
def test_samples_of_a_prompt_share_its_blocks_with_the_cache_on(
    kind: Kind, length: int, num_copies: int, num_used: int
):
    driver = PrefixDriver(kind)
    prompt = list(range(length))
    for _ in range(2):
        request_id = driver.add(list(prompt), 20, num_sequences=4)
        driver.step()
        before = driver.cache.num_copies
        driver.step()
        assert driver.cache.num_copies - before == num_copies
        assert driver.cache.pool.num_blocks - driver.cache.pool.num_free == num_used
        seq_ids = driver.group(request_id).seq_ids
        assert driver.cache.pool.num_references(driver.cache.tables[seq_ids[0]].block_ids[0]) == 4
        driver.scheduler.abort_sequence(request_id, seq_ids[2])
        driver.check()
        driver.run()
        for _ in range(2):
            driver.scheduler.abort(request_id)
        assert driver.cache.pool.num_free == 100 and not driver.cache.tables
    assert driver.seen["admit with hit"] == 1


@BOTH
def test_samples_in_a_window_give_everything_back_with_the_cache_on(kind: Kind):
    driver = PrefixDriver(kind, num_blocks=40, block_size=4, window=8)
    for _ in range(2):
        serve(driver, list(range(18)), 20, num_sequences=2)
        assert driver.cache.pool.num_free == 40
    assert driver.seen["admit with hit"] == 1 and driver.cache.num_hit_tokens >= 16


@BOTH
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_whoever_was_sent_away_finds_its_own_blocks(kind: Kind, num_sequences: int):
    driver = PrefixDriver(kind, block_size=4)
    driver.add(list(range(14)), 10, num_sequences=num_sequences)
    for _ in range(5):
        driver.step()
    driver.send_away(0, "recompute")
    plan = driver.step()
    num_again = {("hash", 1): 3, ("hash", 3): 3 * 2, ("radix", 1): 1, ("radix", 3): 3 * 1}
    assert plan.num_tokens == num_again[kind, num_sequences] and driver.seen["resume with hit"] == 1
    assert driver.group(0).num_hit_tokens == 0, "that is about its prompt"
    driver.run()
    assert driver.num_outputs == {0: 10}


@BOTH
def test_several_that_found_everything_do_not_decode_beyond_the_budget(kind: Kind):
    driver = PrefixDriver(kind, 40, 4, max_num_seqs=5, max_num_batched_tokens=8)
    driver.add(8, num_sequences=3)
    driver.step()
    driver.step()
    driver.add(6, priority=-1)
    driver.send_away(0, "recompute")
    plans = [driver.step() for _ in range(3)]
    assert [plan.num_tokens for plan in plans] == [6, 4, 4]


@BOTH
def test_the_heir_of_several_does_not_write_into_what_it_has_found(kind: Kind):
    """Two beams part behind 9 tokens. The first has lost its own blocks; the second finds all of its own."""
    driver = PrefixDriver(kind, num_blocks=40, block_size=4, max_num_batched_tokens=4, max_num_seqs=4)
    driver.add(list(range(9)), 30, num_sequences=2)
    while driver.num_outputs[0] < 12:
        driver.step()
    first, second = driver.group(0).members
    driver.send_away(0, "recompute")
    lost = driver.cache.index.match([*first.token_ids], "", 12).block_ids[2]
    for block_id in driver.cache.index.forget(lost):
        driver.cache.pool.unmark_cached(block_id)
    driver.step()
    assert first.num_computed < second.num_computed and second.num_found >= 20
    driver.scheduler.abort_sequence(0, first.seq_id)
    assert second.num_computed >= 20
    driver.run()
    assert driver.cache.pool.num_free == 40
