"""The checks of lesson 04: the plan of a step, the rows of a step, who is sent away, and how."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from minipaged.batching.cache import BatchingCache
from minipaged.batching.group import Group
from minipaged.batching.plan import Chunk, Event, NextToken, Plan
from minipaged.batching.preemption import Preemption, choose_victim
from minipaged.batching.rows import Rows
from minipaged.batching.scheduler import Scheduler
from minipaged.errors import AccountingError
from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.tiers import use

Piece = tuple[int, int, list[int]]
"""Tokens ``start`` to ``stop - 1`` of a sequence, and its block ids."""

MAX_STEPS = 100


@dataclass(frozen=True)
class Play:
    """Requests for a scheduler: (step in which it comes, prompt tokens, answer tokens, priority)."""

    requests: tuple[tuple[int, int, int, int], ...]
    num_blocks: int = 50
    max_num_seqs: int = 5
    max_num_batched_tokens: int = 16

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks of 4, {self.max_num_seqs} seats, {self.max_num_batched_tokens} tokens a step; "
            f"requests as (comes in step, prompt, answer, priority) {list(self.requests)}"
        )


PLAYS = (
    Play(((1, 3, 4, 0), (1, 5, 2, 0), (1, 6, 2, 0)), max_num_batched_tokens=5),
    Play(((1, 4, 6, 0), (2, 40, 2, 0), (3, 7, 2, 0))),
    Play(((1, 8, 5, 0), (1, 16, 5, 0), (1, 17, 5, 0)), max_num_seqs=2),
    Play(((1, 7, 8, 0), (1, 7, 8, 0), (2, 3, 4, 0)), num_blocks=5),
    Play(((1, 7, 8, 0), (1, 7, 8, 0), (3, 4, 2, -1)), num_blocks=5),
    Play(((1, 7, 9, 0), (1, 8, 9, 0), (1, 4, 9, 0), (4, 4, 2, 0)), num_blocks=8),
    Play(((1, 20, 3, 1), (2, 20, 3, 0)), max_num_batched_tokens=6),
)


@exercise
def check_plan_step(answer: Callable[[Scheduler], Plan]) -> None:
    """Let the answer and rung 4 plan the same requests, and compare what happens in each step."""
    for play in PLAYS:
        own, right = _acts(play, answer), _acts(play, Scheduler.plan_step)
        for step, acts in right.items():
            expect(
                own.get(step, []),
                acts,
                f"{play}\n  step {step}, as (act, request, tokens)",
                "Those who decode come first, then prompts that have entered, in the order of `scheduler.running`, "
                "then others enter, but not in a step in which somebody was sent away.",
            )


@exercise
def check_rows(answer: Callable[[list[Piece], int], tuple[list[int], list[int], list[int], list[int]]]) -> None:
    """Compare with the tensors that rung 4 makes of the chunks of real steps."""
    for play, block_size in product(PLAYS[:3], (4, 2)):
        cache = BatchingCache(play.num_blocks, block_size)
        scheduler = Scheduler(cache, play.max_num_seqs, play.max_num_batched_tokens)
        for chunks in _steps(play, scheduler, Scheduler.plan_step):
            rows = Rows.of(chunks, cache, torch.device("cpu"))
            pieces = [(c.start, c.stop, list(cache.tables[c.member.seq_id].block_ids)) for c in chunks]
            given = f"pieces {pieces} in blocks of {block_size}"
            own = answer(pieces, block_size)
            if not isinstance(own, tuple | list) or len(own) != 4:
                raise WrongAnswer(
                    f"{given}\n  got {own!r}\nReturn four lists: positions, slots, query_starts, seq_lens."
                )
            for (name, help), values in zip(HELP_ON_ROWS.items(), own, strict=True):
                expect(values, getattr(rows, name).tolist(), f"{given}: {name}", help)


HELP_ON_ROWS = {
    "positions": "A token's position is its place in its own sequence, counted from the sequence's first token.",
    "slots": "Position p is in block `block_ids[p // block_size]`, at place `p % block_size` of it.",
    "query_starts": "It begins with 0 and has one entry more than there are pieces: the last is the number of tokens.",
    "seq_lens": "A sequence's length counts every token in the cache, those of this step too: that is `stop`.",
}


@exercise
def check_victim(answer: Callable[[list[Group]], Group]) -> None:
    """Offer running requests of several ages, sizes and priorities."""
    for requests in (
        [(4, 0), (4, 0)],
        [(12, 0), (4, 0), (8, 0)],
        [(4, 0), (12, 0), (8, 0)],
        [(4, 2), (12, 0), (8, 1)],
        [(4, 0), (4, -1), (4, 0)],
    ):
        scheduler = Scheduler(BatchingCache(50, 4))
        for i, (num_tokens, priority) in enumerate(requests):
            scheduler.add(i, i, [1] * num_tokens, max_output_tokens=9, priority=priority)
        scheduler.schedule()
        for start in range(len(requests)):
            groups = scheduler.running[start:]
            names = [(group.request_id, group.priority, group.num_tokens) for group in groups]
            expect(
                getattr(answer(list(groups)), "request_id", None),
                choose_victim(groups).request_id,
                f"groups as (request_id, priority, tokens): {names}; the request_id of your choice",
                "Return one of the groups. They stand in the order of their turn, lower priority numbers first and "
                "older ones first among equals. The one whose turn comes last is the one to send away.",
            )


@exercise
def check_way(answer: Callable[[int, int, float, float, int], str]) -> None:
    """Compare with what "auto" chooses."""
    for num_tokens, num_blocks, seconds_per_token, seconds_per_block, places_left in (
        (64, 4, 2.0, 10.0, 100),
        (64, 4, 0.5, 10.0, 100),
        (64, 4, 0.625, 10.0, 100),  # 40 against 40
        (5, 2, 2.0, 4.0, 100),
        (0, 4, 2.0, 10.0, 100),
        (64, 4, 2.0, 10.0, 4),
        (64, 4, 2.0, 10.0, 3),
    ):
        policy = Preemption("auto", seconds_per_token, seconds_per_block, max_swapped_blocks=100)
        expect(
            answer(num_tokens, num_blocks, seconds_per_token, seconds_per_block, places_left),
            policy.choose(num_tokens, num_blocks, 100 - places_left)[0],
            f"{num_tokens} tokens at {seconds_per_token} s, {num_blocks} blocks at {seconds_per_block} s, "
            f"room for {places_left} more blocks",
            'Return "swap" only if all its blocks find a place, and moving them takes less time than computing the '
            'tokens again. If both take the same, "recompute".',
        )


def _acts(play: Play, plan_step: Callable[[Scheduler], Plan]) -> dict[int, list[tuple[str, int, int]]]:
    """Return what a scheduler does, by step."""
    acts: dict[int, list[tuple[str, int, int]]] = {}

    def listen(event: Event) -> None:
        if event.act not in ("wait", "finish"):
            acts.setdefault(event.step, []).append((event.act, event.request_id, event.num_tokens))

    limits = (play.max_num_seqs, play.max_num_batched_tokens)
    scheduler = Scheduler(BatchingCache(play.num_blocks, 4), *limits, Preemption("recompute"), listen)
    for _ in _steps(play, scheduler, plan_step):
        pass
    return acts


def _steps(play: Play, scheduler: Scheduler, plan_step: Callable[[Scheduler], Plan]) -> Iterator[list[Chunk]]:
    """Yield each step's chunks; its tokens are made up."""
    coming = list(enumerate(play.requests))
    for step in range(1, MAX_STEPS):
        for request_id, (_, prompt, answer, priority) in [each for each in coming if each[1][0] == step]:
            scheduler.add(request_id, request_id, [1] * prompt, max_output_tokens=answer, priority=priority)
        if not scheduler.has_unfinished:
            return
        plan = _plan(play, scheduler, plan_step)
        yield plan.chunks
        scheduler.update(plan, [_next_token(chunk) for chunk in plan.chunks if chunk.is_sampled])


def _plan(play: Play, scheduler: Scheduler, plan_step: Callable[[Scheduler], Plan]) -> Plan:
    try:
        with use(plan_step=plan_step):
            plan = scheduler.schedule()
    except AccountingError as error:
        raise WrongAnswer(f"{play}\n  step {scheduler.num_steps} breaks off: {error}") from error
    if not isinstance(plan, Plan):
        raise WrongAnswer(f"{play}\n  step {scheduler.num_steps}: return the plan, not {plan!r}")
    return plan


def _next_token(chunk: Chunk) -> NextToken:
    num_outputs = len(chunk.member.token_ids) + 1 - chunk.group.num_prompt_tokens
    return NextToken(chunk.member.seq_id, 7, is_last=num_outputs == chunk.group.max_output_tokens)
