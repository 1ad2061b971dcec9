"""Checks of lesson 01: what a token costs, attention over dense rows, places in an arena, and waste by kind."""

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch

from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.contiguous import reference
from minipaged.contiguous.arena import RESERVATIONS, Arena, Reservation
from minipaged.contiguous.buddy import BuddyAllocator
from minipaged.foundation.random_weights import SHAPES
from minipaged.foundation.weights import load_config
from minipaged.lessons.exercises.foundation import LOW_PRECISION, expect_low_precision, expect_rows
from minipaged.lessons.kit import WrongAnswer, exercise, expect


@exercise
def check_kv_bytes(answer: Callable[[Any, torch.dtype], int]) -> None:
    """Compare with the product's own formula, for models with and without grouped queries."""
    llama, qwen = (load_config(SHAPES / name)[0] for name in ("llama-3.1-8b-random", "qwen3-0.6b-random"))
    ungrouped = replace(llama, num_kv_heads=llama.num_heads)
    configs = {"Llama 3.1 8B": llama, "Llama 3.1 8B without grouped queries": ungrouped, "Qwen3 0.6B": qwen}
    for name, config in configs.items():
        for dtype in (torch.bfloat16, torch.float32):
            expect(
                answer(config, dtype),
                config.kv_bytes_per_token(dtype),
                f"{name} in {dtype}",
                f"A key and a value, in each of {config.num_layers} layers, for each of {config.num_kv_heads} KV "
                f"heads, of {config.head_dim} numbers each, of {dtype.itemsize} bytes each.",
            )


DECODE_INPUTS = (
    (AttentionCase("one sequence of 3 tokens", (3,), 1, 1, 2), "It sees seq_lens[b] tokens; NaN lies behind them."),
    (AttentionCase("sequences of 1 and 5 tokens", (1, 5), 1, 1, 2), "Row b ends at seq_lens[b]; NaN is behind it."),
    (
        AttentionCase("4 query heads on 2 KV heads", (4,), 4, 2, 4),
        "Query heads 0 and 1 read KV head 0, 2 and 3 head 1.",
    ),
    (AttentionCase("lengths 5, 0 and 20, 9 on 3 heads", (5, 0, 20), 9, 3, 8), "A row of length 0 gives zeros."),
    (AttentionCase("7 tokens and a window of 4", (7,), 2, 1, 4, window=4), "The newest 4 tokens are visible."),
)
"""Inputs of `check_contiguous_attention`, from easy to whole, each with what to look at where it fails."""


@exercise
def check_contiguous_attention(answer: Callable[..., torch.Tensor]) -> None:
    """Compare with the product's loop over rows that hold NaN behind their tokens."""
    for case, hint in DECODE_INPUTS:
        inputs = make_paged_inputs(case)
        arguments = inputs.q, *inputs.dense(), inputs.seq_lens
        scale = case.head_dim**-0.5
        expected = reference.contiguous_attention(*arguments, scale=scale, window=case.window)
        expect_rows(answer(*arguments, scale=scale, window=case.window), expected, case.name, hint)
    inputs = make_paged_inputs(DECODE_INPUTS[0][0])
    arguments = inputs.q, *inputs.dense(), inputs.seq_lens
    expected = reference.contiguous_attention(*arguments, scale=0.3, window=None)
    expect_rows(answer(*arguments, scale=0.3, window=None), expected, "scale = 0.3", "Use the scale that is given.")
    inputs = make_paged_inputs(LOW_PRECISION, torch.bfloat16)
    arguments = inputs.q * 8, *inputs.dense(), inputs.seq_lens
    expected = reference.contiguous_attention(*arguments, scale=0.3, window=None)
    expect_low_precision(answer(*arguments, scale=0.3, window=None), expected)


ALLOCATIONS = ((16, (4, 4, 4, 4, 1)), (16, (3, 5, 9)), (20, (16, 8, 4, 1)), (8, (1, 8, 2, 4)), (64, (8, 8, 8, 33, 16)))
"""Sizes of arenas and of the requests that come one after the other."""


@exercise
def check_allocator(answer: Callable[[int], Any]) -> None:
    """Let allocations come and go; every range must be free, aligned, and found if there is one."""
    for num_slots, sizes in ALLOCATIONS:
        allocator = answer(num_slots)
        for i, wanted in enumerate(sizes):
            _try_allocate(allocator, num_slots, wanted)
            if i == 2:
                allocator.free(min(allocator.allocated))
                _try_allocate(allocator, num_slots, 1)


def _try_allocate(allocator: Any, num_slots: int, wanted: int) -> None:
    taken, size = dict(allocator.allocated), BuddyAllocator.rounded(wanted)
    used = {slot for start, length in taken.items() for slot in range(start, start + length)}
    free = [start for start in range(0, num_slots - size + 1, size) if used.isdisjoint(range(start, start + size))]
    ranges = ", ".join(f"{start} to {start + length - 1}" for start, length in sorted(taken.items())) or "none"
    given = f"{wanted} of {num_slots} slots are wanted, so a range of {size}; taken ranges: {ranges}"
    start = allocator.find(size)
    if not free:
        expect(
            start, None, given, "No aligned range of this size is free inside the arena. Half a range does not help."
        )
    elif start not in free:
        raise WrongAnswer(
            f"{given}\n  expected one of {free}\n  got      {start!r}\n"
            "A range starts at a multiple of its size, lies inside the arena, and no taken range touches it."
        )
    expect(allocator.can_allocate(wanted), bool(free), f"can_allocate: {given}", "Keep the methods that were given.")
    expect(allocator.allocate(wanted), start, f"allocate: {given}", "Keep the methods that were given.")


@exercise
def check_waste(answer: Callable[[Reservation, int], Any]) -> None:
    """Compare with the arena's own books, under each policy and at each stage of an answer."""
    for policy in RESERVATIONS:
        for num_prompt, num_output in ((5, 2), (161, 25), (4, 4), (1, 1)):
            arena = Arena(num_slots=2048, max_model_len=256, reservation=policy)
            arena.allocate(0, num_prompt, num_output)
            for _ in range(num_output):
                own = arena.ranges[0]
                actual = answer(own, num_output)
                expect(
                    tuple(actual) if isinstance(actual, tuple | list) else actual,
                    astuple(arena.waste({0: num_output})),
                    f"{own}, an answer of {num_output} tokens",
                    "In order: written; still to be written; asked for and never written; rounded up. The four add up "
                    "to the length of the range.",
                )
                arena.append(0)
