"""Drive a scheduler over a cache that remembers, and compare what the index says with what the memory holds."""

import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Literal

from minipaged.batching.group import Group
from minipaged.batching.plan import Plan
from minipaged.prefix.cache import PrefixCache, PrefixRoom
from minipaged.prefix.eviction import LRU
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.radix_tree import RadixTree
from minipaged.prefix.scheduler import PrefixGroup, PrefixScheduler
from tests.batching.random_requests import RandomRequests
from tests.batching.steps import Driver

Kind = Literal["hash", "radix"]
KINDS: tuple[Kind, ...] = ("hash", "radix")


def make_cache(kind: Kind, num_blocks: int = 100, block_size: int = 16, window: int | None = None) -> PrefixCache:
    index = HashChain("model", block_size) if kind == "hash" else RadixTree(block_size)
    return PrefixCache(num_blocks, block_size, window, index, LRU())


def entries_of(index: Any) -> dict[int, Any]:
    """Return what an index has of each block: an entry of the chain or a node of the tree."""
    return index._entry_of if isinstance(index, HashChain) else index._node_of


def tokens_up_to(entry: Any) -> list[int]:
    """Return the tokens of an entry and of all before it."""
    pieces = []
    while entry.parent is not None:
        pieces.append(entry.token_ids)
        entry = entry.parent
    return [token for piece in reversed(pieces) for token in piece]


def admit(cache: PrefixCache, seq_id: int, tokens: list[int], salt: str = "") -> int:
    """Let a lone sequence enter, and return how many of its tokens were found."""
    length = len(tokens)
    (start,) = cache.allocate(PrefixRoom([seq_id], [length], 0, 1, [tokens], salt, [length - 1]))
    cache.take_copies()
    return start


def enter_and_leave(cache: PrefixCache, tokens: list[int], salt: str = "") -> int:
    """Let a sequence enter, compute all its tokens and end; return how many of them were found."""
    start = admit(cache, -1, tokens, salt)
    cache.note_computed(-1, len(tokens), tokens)
    cache.release_pins()
    cache.free(-1)
    return start


def count_calls(action: Callable[[], object]) -> int:
    """Return how many functions of Python and of C are called by it, calls within calls included."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


class PrefixDriver(Driver):
    """Rung 4's driver, whose memory also has to hold whatever the index promises.

    ``seen`` counts groups that entered with tokens from the cache, evictions and the like.
    """

    def __init__(
        self, kind: Kind, num_blocks: int = 100, block_size: int = 16, window: int | None = None, **options: Any
    ):
        cache = make_cache(kind, num_blocks, block_size, window)
        super().__init__(cache=cache, scheduler_type=PrefixScheduler, **options)
        self.kind = kind
        self.seen: Counter[str] = Counter()

    def group(self, request_id: int) -> PrefixGroup:
        return self.scheduler.groups[request_id]

    def check_plan(self, plan: Plan) -> None:
        super().check_plan(plan)
        pool, size = self.cache.pool, self.cache.pool.block_size
        for chunk in plan.chunks:
            cached = [slot for slot in chunk.slots if pool.is_cached(slot // size)]
            assert not cached, "a slot is written that somebody may read as a part of another sequence"
        for source, target in plan.copies:
            assert pool.num_references(source) and not pool.is_cached(target), "a copy comes from or goes to nowhere"
        entered = {event.request_id: event.act for event in self.acts_of_step("admit", "resume")}
        for group in {id(chunk.group): chunk.group for chunk in plan.chunks}.values():
            if group.request_id in entered:
                self.count_hits(group, plan, entered[group.request_id])
        self.seen["shared rows"] += len(getattr(plan, "shared", []))

    def count_hits(self, group: Group, plan: Plan, act: str) -> None:
        num_tokens = group.members[0].num_computed
        is_swapped = any(swap.request_id == group.request_id for swap in plan.swaps_in)
        if num_tokens and not is_swapped:
            self.seen[f"{act} with hit"] += 1
            self.seen["partial hit"] += num_tokens % self.cache.pool.block_size != 0
        if len(group.members) == 1:
            assert is_swapped or num_tokens < len(group.members[0].token_ids), "nothing is left to compute"
            assert is_swapped or self.kind == "radix" or num_tokens % self.cache.pool.block_size == 0

    def acts_of_step(self, *acts: str) -> list[Any]:
        """Return what was told since the last step began."""
        found = []
        for event in reversed(self.events):
            if event.step < self.scheduler.num_steps:
                break
            if event.act in acts:
                found.append(event)
        return found

    def check(self) -> None:
        super().check()
        cache, size = self.cache, self.cache.pool.block_size
        assert not cache._pinned, "a block is held for a copy that is done"
        for block_id, entry in entries_of(cache.index).items():
            history, expected = 0, []
            for token in tokens_up_to(entry):
                history = hash((history, token))
                expected.append(history)
            own = expected[-len(entry.token_ids) :]
            found = self.memory.block(block_id)[: len(own)]
            assert found == own, f"block {block_id} does not hold what it is called"
            assert len(own) <= size
        assert cache._coming == Counter(walk.coming for walk in cache._walks.values() if walk.coming is not None)
        for seq_id, table in cache.tables.items():
            walk = cache._walks[seq_id]
            assert walk.num_entered * size <= table.num_tokens, "a block is entered that is not full"
        self.seen["evictions"] = cache.pool.num_evictions
        self.seen["hit tokens"] = cache.num_hit_tokens


def serve(driver: PrefixDriver, prompt: list[int], max_output_tokens: int = 1, **options: Any) -> PrefixGroup:
    """Let a request run alone from first to last, and return its group."""
    group = driver.group(driver.add(list(prompt), max_output_tokens, **options))
    driver.run()
    return group


class PrefixRequests(RandomRequests):
    """Random requests whose prompts begin alike: each is the beginning of one of three texts, and a tail."""

    def __init__(self, rng: Random, kind: Kind | None = None, num_priorities: int = 3, num_salts: int = 2):
        self.kind: Kind = kind or rng.choice(KINDS)
        self.salts = [f"salt {i}" if i else "" for i in range(num_salts)]
        super().__init__(rng, num_priorities)
        length = self.num_blocks * self.block_size
        stem = [rng.randrange(3) for _ in range(length)]
        places = [rng.randrange(length // 2) for _ in range(3)]
        self.texts = [stem[:place] + [rng.randrange(3) for _ in range(length - place)] for place in places]

    def make_driver(self, window: int | None, **limits: Any) -> PrefixDriver:
        return PrefixDriver(self.kind, self.num_blocks, self.block_size, window, rng=self.rng, **limits)

    def draw_prompt(self, num_tokens: int) -> list[int]:
        tail = self.rng.choice([0, 0, 1, self.rng.randrange(num_tokens)])
        beginning = self.rng.choice(self.texts)[: max(1, num_tokens - tail)]
        return beginning + super().draw_prompt(num_tokens - len(beginning))

    def draw_options(self) -> dict[str, Any]:
        return super().draw_options() | {"cache_salt": self.rng.choice(self.salts)}
