"""Plausible wrong solutions of lesson 09, each with a piece of what its check says."""

from typing import Any

import torch

from minipaged.batching.group import Group
from minipaged.batching.plan import Plan
from minipaged.batching.scheduler import Scheduler
from minipaged.lessons.exercises.engine import check_attention, check_plan, check_victim


def attend(args: Any, scale: float, is_positioned: bool, is_interleaved: bool, is_cut: bool = True) -> torch.Tensor:
    """Attend as the solution does, but for the three things that can be switched off."""
    q, k_pool, v_pool, block_tables, query_starts, seq_lens = args
    out, group = torch.zeros_like(q), q.shape[1] // k_pool.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        start, end = query_starts[row : row + 2].tolist()
        block_ids = block_tables[row, : -(-length // k_pool.shape[1])].long()
        keys, values = (pool[block_ids].flatten(0, 1)[: length if is_cut else None] for pool in (k_pool, v_pool))
        if is_interleaved:
            keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        else:
            keys, values = (each.repeat(1, group, 1) for each in (keys, values))
        position = torch.arange(end - start) + (length - (end - start)) * is_positioned
        scores = torch.einsum("thd,lhd->htl", q[start:end], keys) * scale
        weights = scores.masked_fill(torch.arange(len(keys)) > position[:, None], float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("htl,lhd->thd", weights, values)
    return out


def attention_from_position_0(*args: Any, scale: float, window: int | None) -> torch.Tensor:
    return attend(args, scale, is_positioned=False, is_interleaved=True)


def attention_with_repeated_heads(*args: Any, scale: float, window: int | None) -> torch.Tensor:
    return attend(args, scale, is_positioned=True, is_interleaved=False)


def attention_past_the_end(*args: Any, scale: float, window: int | None) -> torch.Tensor:
    return attend(args, scale, is_positioned=True, is_interleaved=True, is_cut=False)


def attention_with_another_scale(*args: Any, scale: float, window: int | None) -> torch.Tensor:
    return attend(args, args[0].shape[-1] ** -0.5, is_positioned=True, is_interleaved=True)


def attention_in_the_dtype_of_q(*args: Any, scale: float, window: int | None) -> torch.Tensor:
    return attend(args, scale, is_positioned=True, is_interleaved=True)


def plan_of_everything(scheduler: Scheduler) -> Plan:
    return scheduler.plan_step()


def plan_that_forgets_the_rest_of_a_prompt(scheduler: Scheduler) -> Plan:
    plan = Plan()
    scheduler.plan_admission(plan)
    if not plan.chunks:
        scheduler.plan_decode(plan)
    return plan


def plan_that_goes_on_behind_admission(scheduler: Scheduler) -> Plan:
    plan = Plan()
    scheduler.plan_admission(plan)
    for group in [group for group in scheduler.running if not group.is_decoding]:
        scheduler.plan_prefill(group, plan)
    if not plan.chunks:
        scheduler.plan_decode(plan)
    return plan


def plan_that_is_not_returned(scheduler: Scheduler) -> None:
    scheduler.plan_admission(Plan())


def newest_victim(groups: list[Group]) -> Group:
    return groups[-1]


def place_of_the_victim(groups: list[Group]) -> int:
    return len(groups) - 1


def cheapest_of_all(groups: list[Group]) -> Group:
    return min(groups, key=lambda group: group.num_tokens_computed())


WRONG = [
    (check_attention, attention_from_position_0, "stands at position seq_len - n + i"),
    (check_attention, attention_with_repeated_heads, "reads KV head h // G"),
    (check_attention, attention_past_the_end, "0 times NaN is NaN"),
    (check_attention, attention_with_another_scale, "Use the scale that is given"),
    (check_attention, attention_in_the_dtype_of_q, "bfloat16 has 8 bits of precision"),
    (check_plan, plan_of_everything, "decode only if the plan has no chunks yet"),
    (check_plan, plan_that_forgets_the_rest_of_a_prompt, "go on with prompts that have entered"),
    (check_plan, plan_that_goes_on_behind_admission, "has a request twice"),
    (check_plan, plan_that_is_not_returned, "Return the plan"),
    (check_victim, place_of_the_victim, "Return the group itself"),
    (check_victim, newest_victim, "fewest computed tokens"),
    (check_victim, cheapest_of_all, "it stays, unless it is alone"),
]
