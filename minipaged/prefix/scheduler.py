"""Rung 4's scheduler, with requests that find a part of their prompt in the cache, and read what they share once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from minipaged.batching.group import Group
from minipaged.batching.plan import Chunk, NextToken, Plan
from minipaged.batching.scheduler import Scheduler
from minipaged.paged.block_table import num_blocks_for
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.ops import SHARED_UNIT
from minipaged.prefix.radix_tree import num_common


@dataclass(eq=False)
class PrefixGroup(Group):
    """Rung 4's group, whose room says what to look for.

    Args:
        cache_salt: See `SamplingParams`.
        num_hit_tokens: Tokens of the prompt that it found in the cache when it entered for the first time.
        num_evictions: Cached blocks that were given up for it.
    """

    cache_salt: str = ""
    num_hit_tokens: int = 0
    num_evictions: int = 0

    def room(self) -> PrefixRoom:
        """Return what the group needs, and what to look for.

        A lone sequence computes at least its newest token, for its logits. Several compute theirs afterwards.
        """
        room = super().room()
        is_lone = len(self.members) == 1
        return PrefixRoom(
            **vars(room),
            token_ids=[member.token_ids for member in self.members],
            salt=self.cache_salt,
            limits=[length - is_lone for length in room.lengths],
        )


@dataclass(frozen=True)
class SharedRows:
    """Rows of a step that stand together, and how many first tokens they read from the same blocks."""

    num_rows: int
    num_tokens: int


@dataclass
class PrefixPlan(Plan):
    """Rung 4's plan. Its chunks begin with the rows of ``shared``, in that order; the others follow."""

    shared: list[SharedRows] = field(default_factory=list)


class PrefixScheduler(Scheduler):
    """Continuous batching over a cache that remembers.

    Changes of rung 4: a request begins behind what it finds in the cache, and what it costs the cache is counted.
    One that waits for a block which is just being computed lets short ones pass. Rows that decode and have one or more
    times `SHARED_UNIT` tokens at their beginning in the same blocks are put side by side, to read those once.
    """

    group_type = PrefixGroup
    cache: PrefixCache
    groups: dict[int, PrefixGroup]

    def add(self, request_id: int, *args: Any, cache_salt: str = "", **kwargs: Any) -> None:
        """Queue a request; see `Scheduler.add`. ``cache_salt`` says whose blocks it may find."""
        super().add(request_id, *args, **kwargs)
        self.groups[request_id].cache_salt = cache_salt

    def plan_step(self) -> PrefixPlan:
        """Plan as rung 4 does, and put rows with a common beginning side by side."""
        plan = PrefixPlan(**vars(super().plan_step()))
        if self.cache.window is None:  # rows with a window do not read their beginning
            plan.shared, plan.chunks = self._side_by_side(plan.chunks)
        return plan

    def update(self, plan: Plan, tokens: Iterable[NextToken]) -> None:
        """Note what a step has done. The blocks that it copied may be evicted again."""
        super().update(plan, tokens)
        self.cache.release_pins()

    def _enter(self, group: PrefixGroup, plan: Plan) -> None:
        is_first, before = group.num_preemptions == 0, group.num_evictions
        hits, evictions = self.cache.num_hit_tokens, self.cache.pool.num_evictions
        super()._enter(group, plan)
        group.num_evictions = before + self.cache.pool.num_evictions - evictions
        for member in group.members:
            member.num_found = self.cache.num_found(member.seq_id)
        if is_first:
            group.num_hit_tokens = self.cache.num_hit_tokens - hits

    def may_be_passed(self, group: PrefixGroup) -> bool:
        """Let others enter while a group waits for a block that a running request is about to write."""
        return group.waiting_room is not None and self.cache.is_coming(group.waiting_room)

    def _append(self, group: PrefixGroup, plan: Plan) -> None:
        evictions = self.cache.pool.num_evictions
        super()._append(group, plan)
        group.num_evictions += self.cache.pool.num_evictions - evictions

    def _side_by_side(self, chunks: list[Chunk]) -> tuple[list[SharedRows], list[Chunk]]:
        """Return groups of rows that share their first blocks, and the chunks in their order, all others behind."""
        num_blocks = num_blocks_for(SHARED_UNIT, self.cache.pool.block_size)
        together: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in chunks:
            # The newest token is never shared. A block that nobody else has needs no further look.
            if chunk.stop - chunk.start == 1 and chunk.stop > SHARED_UNIT:
                block_ids = self.cache.tables[chunk.member.seq_id].block_ids
                if self.cache.pool.num_references(block_ids[num_blocks - 1]) > 1:
                    together.setdefault(tuple(block_ids[:num_blocks]), []).append(chunk)
        groups = [group for group in together.values() if len(group) > 1]
        if not groups:
            return [], chunks
        shared = [SharedRows(len(group), self._num_common_tokens(group)) for group in groups]
        first = [chunk for group in groups for chunk in group]
        is_first = {id(chunk) for chunk in first}
        return shared, first + [chunk for chunk in chunks if id(chunk) not in is_first]

    def _num_common_tokens(self, group: list[Chunk]) -> int:
        """Return how many first tokens lie in blocks of all rows, in whole units."""
        tables = [self.cache.tables[chunk.member.seq_id].block_ids for chunk in group]
        num_blocks = num_common(min(tables), max(tables))  # so far all tables between them agree too
        num_tokens = min(num_blocks * self.cache.pool.block_size, *(chunk.stop - 1 for chunk in group))
        return num_tokens // SHARED_UNIT * SHARED_UNIT
