"""Checks of lesson 09: attention of a mixed batch, a step that computes prompts alone, and who is sent away."""

from collections.abc import Callable
from typing import Any

import torch

from minipaged.batching.cache import BatchingCache
from minipaged.batching.group import Group, Member
from minipaged.batching.plan import NextToken, Plan
from minipaged.batching.reference import ragged_paged_attention
from minipaged.batching.scheduler import Scheduler
from minipaged.cases_batching import RaggedCase, make_ragged_inputs
from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.shapes import Tensor
from minipaged.tiers import use

HEADS = {"num_heads": 2, "num_kv_heads": 2, "block_size": 4}
POSITIONS = "Query i of n stands at position seq_len - n + i of its sequence, and sees the keys from 0 to there."
GROUPS = "With G query heads for each KV head, query head h reads KV head h // G: repeat_interleave, not repeat."
SCALE = "Use the scale that is given."
FLOAT32 = "Convert q, k and v with .float() before the scores are computed: bfloat16 has 8 bits of precision."
PAST_THE_END = "Slots behind a sequence's last token hold NaN here, and 0 times NaN is NaN: cut keys and values off."
OWN = "Each sequence reads its own blocks, in the order of its table, and only its first seq_len slots."

ATTENTION_CASES = (
    (RaggedCase("one decode row of 6 tokens", (6,), num_queries=(1,), **HEADS), POSITIONS),
    (RaggedCase("a prompt of 5 tokens", (5,), num_queries=(5,), **HEADS), POSITIONS),
    (RaggedCase("the last 3 of 9 tokens", (9,), num_queries=(3,), **HEADS), POSITIONS),
    (RaggedCase("prompts and decode rows, at block edges", (8, 7, 9, 4), num_queries=(4, 1, 9, 1), **HEADS), OWN),
    (RaggedCase("4 query heads over 2 KV heads", (40, 17), num_queries=(5, 1)), GROUPS),
    (RaggedCase("6 query heads over 2 KV heads", (33,), 6, 2, num_queries=(2,)), GROUPS),
)


@exercise
def check_attention(answer: Callable[..., Any]) -> None:
    """Compare with the product's reference; slots that no sequence owns hold NaN."""
    for case, help in ATTENTION_CASES:
        inputs = make_ragged_inputs(case)
        options = {"scale": case.head_dim**-0.5, "window": None}
        given = (
            f"{case.name}: seq_lens {list(case.seq_lens)}, new tokens {list(case.num_queries)}, S = {case.block_size}"
        )
        actual = answer(*inputs.args, **options)
        expect(type(actual).__name__, "Tensor", f"{given}; the type of the result", "Return the tensor.")
        expect(tuple(actual.shape), tuple(inputs.q.shape), f"{given}; the shape of the result", "One row per query.")
        expected = ragged_paged_attention(*inputs.args, **options)
        _expect_close(actual, expected, 1e-4, given, help)
    inputs = make_ragged_inputs(ATTENTION_CASES[1][0])
    actual, expected = (each(*inputs.args, scale=0.3, window=None) for each in (answer, ragged_paged_attention))
    _expect_close(actual, expected, 1e-4, "a prompt of 5 tokens, scale = 0.3", SCALE)
    inputs = make_ragged_inputs(ATTENTION_CASES[-1][0], dtype=torch.bfloat16)
    wide = inputs.q * 8, *inputs.args[1:]  # scores that are large for 8 bits of mantissa
    actual, expected = (each(*wide, scale=0.3, window=None) for each in (answer, ragged_paged_attention))
    expect(actual.dtype, torch.bfloat16, "the dtype of the result for q in bfloat16", "Return the dtype of q.")
    _expect_close(actual, expected, 0.02, "q, k and v in bfloat16, large scores", FLOAT32)


def _expect_close(actual: Tensor, expected: Tensor, tolerance: float, given: str, help: str) -> None:
    if actual.isnan().any():
        raise WrongAnswer(f"{given}\n  the result has NaN\n{PAST_THE_END}")
    worst = float((actual.float() - expected.float()).abs().max())
    if worst >= tolerance:
        raise WrongAnswer(f"{given}\n  the largest difference to the reference is {worst:.3g}\n{help}")


def prefill_alone(scheduler: Scheduler) -> Plan:
    """Plan a step as the exercise asks: whoever has a prompt to compute goes alone."""
    plan = Plan()
    for group in [group for group in scheduler.running if not group.is_decoding]:
        scheduler.plan_prefill(group, plan)
    scheduler.plan_admission(plan)
    if not plan.chunks:
        scheduler.plan_decode(plan)
    return plan


Step = list[tuple[int, int, int]]

PLAN_CASES = (
    ("one prompt of 5 tokens", {0: (5, 1)}, 16),
    (
        "a prompt of 40 comes in step 3, while two others decode; 16 tokens a step",
        {0: (10, 1), 1: (6, 1), 2: (40, 3)},
        16,
    ),
    ("three prompts of 20 come at once; 16 tokens a step", {0: (20, 1), 1: (20, 1), 2: (20, 1)}, 16),
    ("a prompt of 7 comes in every second step", {0: (7, 1), 1: (7, 3), 2: (7, 5), 3: (7, 7)}, 8),
)


@exercise
def check_plan(answer: Callable[[Scheduler], Plan]) -> None:
    """Run small schedulers with the answer as their plan, and compare what each step computes."""
    for given, requests, budget in PLAN_CASES:
        actual, expected = (_steps_with(plan, requests, budget) for plan in (answer, prefill_alone))
        expect(
            actual,
            expected,
            f"{given}: (request, first token, end) of each step",
            "First go on with prompts that have entered, then admit, and decode only if the plan has no chunks yet.",
        )


def _steps_with(
    plan_step: Callable[[Scheduler], Plan], requests: dict[int, tuple[int, int]], budget: int
) -> list[Step]:
    """Return what each step computes. Requests are (prompt tokens, the step in which it comes); answers have 4."""
    scheduler = Scheduler(BatchingCache(32, 4), max_num_batched_tokens=budget)
    steps: list[Step] = []
    with use(plan_step=lambda scheduler: _a_plan(plan_step(scheduler))):
        while len(steps) < 20 and (len(steps) < 8 or scheduler.has_unfinished):
            for request_id, (num_tokens, comes) in requests.items():
                if comes == len(steps) + 1:
                    scheduler.add(request_id, request_id, [1] * num_tokens, max_output_tokens=4)
            plan = scheduler.schedule()
            steps.append([(chunk.group.request_id, chunk.start, chunk.stop) for chunk in plan.chunks])
            _expect_no_doubles(steps)
            scheduler.update(plan, [_next(chunk.member, requests) for chunk in plan.chunks if chunk.is_sampled])
    return steps


def _a_plan(plan: Any) -> Plan:
    expect(type(plan).__name__, "Plan", "the type of the result", "Return the plan.")
    return plan


def _expect_no_doubles(steps: list[Step]) -> None:
    requests = [request_id for request_id, _, _ in steps[-1]]
    if len(set(requests)) < len(requests):
        raise WrongAnswer(
            f"step {len(steps)} has a request twice, as (request, first token, end)\n  {steps[-1]}\n"
            "plan_admission starts on the prompts of those that enter. So go on with prompts before it, not behind it."
        )


def _next(member: Member, requests: dict[int, tuple[int, int]]) -> NextToken:
    is_last = len(member.token_ids) + 1 == requests[member.seq_id][0] + 4
    return NextToken(member.seq_id, 1, is_last=is_last)


def cheapest(groups: list[Group]) -> Group:
    """Choose as the exercise asks: whoever has computed the least goes, but not the one that needs the block."""
    return min(reversed(groups[1:] or groups), key=lambda group: group.num_tokens_computed())


@exercise
def check_victim(answer: Callable[[list[Group]], Group]) -> None:
    """Compare with the rule of the exercise, on lists of groups that have computed so much."""
    for counts in ((30,), (30, 20), (30, 20, 50), (10, 20, 50), (30, 20, 40, 20), (5, 0, 0, 7), (9, 9, 9)):
        groups = [_group(request_id, count) for request_id, count in enumerate(counts)]
        expected = cheapest(groups)
        victim = answer(list(groups))
        expect(type(victim).__name__, "Group", "the type of the result", "Return the group itself, not its place.")
        expect(
            victim.request_id,
            expected.request_id,
            f"groups 0 to {len(counts) - 1} have computed {list(counts)} tokens; the request that is sent away",
            "The one with the fewest computed tokens, and of several the last. The first of the list is the one that "
            "needs the block: it stays, unless it is alone.",
        )


def _group(request_id: int, num_computed: int) -> Group:
    member = Member(request_id, [1] * 60, num_computed=num_computed)
    return Group(request_id, [member], num_sequences=1, max_output_tokens=9, priority=0, arrival=request_id)
