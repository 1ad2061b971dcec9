"""The arena: who owns which slots, and what that wastes."""

import random

import pytest

from minipaged.contiguous.arena import Arena
from minipaged.errors import UserError


def test_waste_of_the_longest_reservation():
    arena = Arena(num_slots=2048, max_model_len=2048)
    arena.allocate(0, num_prompt_tokens=161)
    waste = arena.waste({0: 25})
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (161, 25, 1862, 0)


def test_reserved_and_internal_come_together_while_the_output_length_is_unknown():
    arena = Arena(num_slots=2048, max_model_len=2048)
    arena.allocate(0, num_prompt_tokens=161)
    waste = arena.waste()
    assert (waste.token_states, waste.reserved, waste.internal, waste.external) == (161, 1887, 0, 0)


def test_an_arena_shorter_than_the_limit_is_one_row():
    arena = Arena(num_slots=10, max_model_len=2048)
    assert (arena.num_rows, arena.row_length) == (1, 10)
    with pytest.raises(UserError, match="11 tokens do not fit into a row of 10 slots"):
        arena.allocate(0, 11)


def test_a_full_row_refuses_the_next_token():
    arena = Arena(num_slots=4, max_model_len=4)
    arena.allocate(0, 3)
    assert arena.append(0) == 3
    with pytest.raises(UserError, match="sequence 0 has filled its row of 4 slots"):
        arena.append(0)


def test_an_arena_without_slots_is_refused():
    with pytest.raises(UserError, match="at least 1 slot"):
        Arena(0, 16)


def test_check_notices_a_lost_row():
    arena = Arena(num_slots=32, max_model_len=8)
    arena.allocate(0, 3)
    del arena.ranges[0]
    with pytest.raises(AssertionError):
        arena.check()


def test_random_walks_lose_no_row_and_share_no_slot():
    rng = random.Random(0)
    arena = Arena(num_slots=100, max_model_len=12)
    fired = dict.fromkeys(("admit", "full", "append", "free"), 0)
    tokens: dict[int, list[int]] = {}
    for seq_id in range(2000):
        if not arena.can_admit():
            fired["full"] += 1
        elif rng.random() < 0.5:
            start = arena.allocate(seq_id, length := rng.randint(1, 12))
            tokens[seq_id] = list(range(start, start + length))
            fired["admit"] += 1
        for other in list(tokens):
            if rng.random() < 0.04:
                arena.free(other)
                del tokens[other]
                fired["free"] += 1
            elif len(tokens[other]) < 12:
                tokens[other].append(arena.append(other))
                fired["append"] += 1
        arena.check()
        taken = [slot for slots in tokens.values() for slot in slots]
        assert len(set(taken)) == len(taken)
        assert arena.waste().token_states == len(taken)
    assert min(fired.values()) > 100, fired
