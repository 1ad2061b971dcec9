"""Requests drawn at random, with tiny limits, for walks over the scheduler."""

from random import Random
from typing import Any

from minipaged.batching.group import Group
from minipaged.batching.plan import NextToken
from minipaged.batching.preemption import POLICIES, Preemption
from minipaged.paged.block_table import num_blocks_for
from tests.batching.steps import Driver


class RandomRequests:
    """A driver with tiny limits, all of them drawn at random, and requests that fit into its cache."""

    def __init__(self, rng: Random, num_priorities: int = 3):
        self.block_size = rng.choice([1, 4, 16])
        self.num_blocks = rng.randint(3, 9) * (6 if self.block_size == 1 else 1)
        self.num_priorities = num_priorities
        window = rng.choice([None, None, 1, 3, self.block_size, 2 * self.block_size + 1])
        preemption = Preemption(
            rng.choice(POLICIES),
            seconds_per_block=rng.choice([1, 5, 20]),
            max_swapped_blocks=rng.choice([None, None, 4, self.num_blocks]),
        )
        max_num_seqs = rng.randint(4, 16)
        budget = max_num_seqs + rng.choice([0, 1, 5, 40])
        limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "preemption": preemption}
        self.rng = rng
        self.driver: Any = self.make_driver(window, **limits)
        self.scheduler = self.driver.scheduler
        self.max_num_steps = 0  # that all requests so far may take together

    def make_driver(self, window: int | None, **limits: Any) -> Driver:
        return Driver(self.num_blocks, self.block_size, window, rng=self.rng, **limits)

    def draw_prompt(self, num_tokens: int) -> list[int]:
        return [self.driver.token() for _ in range(num_tokens)]

    def draw_options(self) -> dict[str, Any]:
        """Draw what else a request says."""
        return {"priority": self.rng.randrange(self.num_priorities)}

    def add(self) -> str:
        """Add samples, beams or a lone sequence; what it may need at most fits into the cache."""
        rng = self.rng
        kind = rng.choice(["lone", "samples", "beams"])
        count = 1 if kind == "lone" else rng.randint(2, min(4, self.scheduler.max_num_seqs))
        num_prompt_tokens = rng.randint(1, self.num_blocks * self.block_size // 3)
        max_output_tokens = rng.randint(1, 60)
        while not self.fits(num_prompt_tokens, max_output_tokens, count):
            if max_output_tokens > 1:
                max_output_tokens -= 1
            else:
                count, num_prompt_tokens = 1, max(1, num_prompt_tokens - 1)
        self.max_num_steps += num_prompt_tokens + (count + 1) * max_output_tokens
        answer = self.beams if kind == "beams" else self.samples
        prompt = self.draw_prompt(num_prompt_tokens)
        self.driver.add(prompt, max_output_tokens, answer, num_sequences=count, **self.draw_options())
        return f"add {kind}"

    def fits(self, num_prompt_tokens: int, max_output_tokens: int, count: int) -> bool:
        shared = num_prompt_tokens // self.block_size
        most = num_blocks_for(num_prompt_tokens + max_output_tokens - 1, self.block_size)
        return shared + count * (most - shared) <= self.num_blocks

    def samples(self, group: Group) -> list[NextToken]:
        """Let a sample end early now and then."""
        tokens = self.driver.samples(group)
        return [
            NextToken(each.seq_id, each.token_id, each.parent_id, each.is_last or self.rng.random() < 0.01)
            for each in tokens
        ]

    def beams(self, group: Group) -> list[NextToken]:
        """Choose parents at random, several times or never, in any order; the last step ends them all."""
        num_outputs = len(group.members[0].token_ids) - group.num_prompt_tokens
        if num_outputs + 1 == group.max_output_tokens:
            return []
        parents = self.rng.choices(group.members, k=self.rng.randint(1, group.num_sequences))
        return [
            self.driver.fork_of(parent) if parent in parents[:place] else self.driver.next_of(parent)
            for place, parent in enumerate(parents)
        ]

    def abort(self) -> str | None:
        """Drop a request wherever it is, twice."""
        if not self.scheduler.groups:
            return None
        group = self.rng.choice(list(self.scheduler.groups.values()))
        state = state_of(group)
        for _ in range(2):
            self.scheduler.abort(group.request_id)
        self.driver.memory.swapped.pop(group.request_id, None)
        return f"abort {state}"

    def abort_sequence(self) -> str | None:
        """Drop one of several sequences, or of a request that has not forked the only one."""
        if not self.scheduler.groups:
            return None
        groups = list(self.scheduler.groups.values())
        several = [group for group in groups if len(group.members) > 1]
        rare = [group for group in several if not group.is_decoding]  # in the middle of computing all again
        if not rare and self.rng.random() < 0.9:
            return None
        group = self.rng.choice(rare or several or groups)
        member = self.rng.choice(group.members)
        state = "leader" if member is group.members[0] and not group.is_decoding else "one"
        state = f"abort {state} of {min(2, len(group.members))} {state_of(group)}"
        for _ in range(2):
            self.scheduler.abort_sequence(group.request_id, member.seq_id)
        if group.request_id not in self.scheduler.groups:
            self.driver.memory.swapped.pop(group.request_id, None)
        return state


def state_of(group: Group) -> str:
    if group.swapped:
        return "swapped"
    if not group.is_running:
        return "sent away" if group.num_preemptions else "queued"
    return "decoding" if group.is_decoding else "mid-prefill"
