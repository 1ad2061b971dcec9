"""Every part of the bookkeeping that `use` can replace drives generation on the rungs that have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minipaged import LLM, SamplingParams, use
from minipaged.batching.preemption import choose_victim
from minipaged.batching.scheduler import Scheduler
from minipaged.contiguous.arena import Arena
from minipaged.contiguous.buddy import BuddyAllocator
from minipaged.errors import AccountingError
from minipaged.paged.block_pool import BlockPool
from minipaged.prefix.block_key import block_key
from minipaged.prefix.caching_pool import CachingBlockPool
from minipaged.prefix.eviction import LRU
from minipaged.sharing.cache import SharingCache
from minipaged.sharing.ref_pool import RefCountedBlockPool
from minipaged.tiers import parts
from tests.tiny_models import make_tiny_model

PROMPTS = [[1, 2, 3, 4, 5, 6], [9, 8, 7], [1, 2, 3, 4, 5, 9, 9]]
LAST = ("batching", "prefix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def generate(folder: Path, rung: str, **options: Any) -> list[list[int]]:
    """Generate on an engine that has to preempt where it can, and to copy where it can share."""
    params: dict[str, Any] = {"max_tokens": 10, "temperature": 0}
    if rung not in ("contiguous", "paged") and options.get("cache") != "contiguous":
        params |= {"n": 2, "temperature": 1, "seed": 3}
    num_blocks = 12 if rung in LAST else 32
    llm = LLM(str(folder), rung=rung, device="cpu", block_size=4, num_blocks=num_blocks, max_model_len=32, **options)
    return [result.token_ids for result in llm.generate(PROMPTS, SamplingParams(**params))]


def counting_class(base: type, method: str, calls: list[Any]) -> type:
    """Return a subclass that notes the calls of one method."""

    def counted(self: Any, *args: Any) -> Any:
        calls.append(args)
        return getattr(base, method)(self, *args)

    return type(f"My{base.__name__}", (base,), {method: counted})


def counting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return counted


CLASSES = {
    "allocator": (BuddyAllocator, "allocate"),
    "block_pool": (BlockPool, "allocate"),
    "ref_counted_block_pool": (RefCountedBlockPool, "share"),
    "caching_block_pool": (CachingBlockPool, "share"),
    "eviction_policy": (LRU, "add"),
}
FUNCTIONS = {
    "prepare_write": lambda cache, seq_id: SharingCache.prepare_write(cache, seq_id),
    "plan_step": lambda scheduler: type(scheduler).plan_step(scheduler),
    "choose_victim": choose_victim,
    "block_key": block_key,
}
PLACES = [
    ("allocator", "contiguous", {}),
    ("allocator", "batching", {"cache": "contiguous"}),
    ("allocator", "prefix", {"cache": "contiguous"}),
    ("block_pool", "paged", {}),
    ("ref_counted_block_pool", "sharing", {}),
    ("ref_counted_block_pool", "batching", {}),
    ("ref_counted_block_pool", "prefix", {"prefix_cache": None}),
    ("caching_block_pool", "prefix", {}),
    ("caching_block_pool", "prefix", {"prefix_cache": "radix"}),
    ("eviction_policy", "prefix", {}),
    *(("prepare_write", rung, {}) for rung in ("sharing", *LAST)),
    *((part, rung, {}) for part in ("plan_step", "choose_victim") for rung in LAST),
    ("block_key", "prefix", {}),
]


def spy_on(part: str, calls: list[Any]) -> Any:
    """Return what takes a part's place, does the same, and notes that it was asked."""
    if part in CLASSES:
        return counting_class(*CLASSES[part], calls)
    return counting(FUNCTIONS[part], calls)


@pytest.mark.parametrize(("part", "rung", "options"), PLACES)
def test_a_replaced_part_is_asked_and_the_tokens_stay_the_same(
    folder: Path, part: str, rung: str, options: dict[str, Any]
) -> None:
    calls: list[Any] = []
    expected = generate(folder, rung, **options)
    with use(**{part: spy_on(part, calls)}):
        assert generate(folder, rung, **options) == expected
    assert calls


@pytest.mark.parametrize(("part", "rung", "options"), PLACES)
def test_an_error_in_a_replaced_part_comes_through(folder: Path, part: str, rung: str, options: dict[str, Any]) -> None:
    def fail(*args: Any) -> Any:
        raise TypeError("the reader's own")

    mine = fail
    if part in CLASSES:
        base, method = CLASSES[part]
        mine = type("Mine", (base,), {method: fail})
    with use(**{part: mine}), pytest.raises(TypeError, match="the reader's own"):
        generate(folder, rung, **options)


def test_every_part_that_is_no_operation_is_tried_here() -> None:
    operations = {name for name, contract in parts().items() if "[" in contract or "-> None; " in contract}
    operations -= {"prepare_write"}
    assert parts().keys() - operations == CLASSES.keys() | FUNCTIONS.keys()


def test_a_part_of_another_rung_is_not_asked(folder: Path) -> None:
    calls: list[Any] = []
    with use(block_pool=spy_on("block_pool", calls)):
        generate(folder, "batching")
    assert not calls


def test_a_plan_step_that_lets_one_request_run_at_a_time_changes_the_order_and_not_the_tokens(folder: Path) -> None:
    most = []

    def one_at_a_time(scheduler: Any) -> Any:
        scheduler.max_num_seqs = 2  # the samples of one request
        plan = Scheduler.plan_step(scheduler)
        most.append(len(scheduler.running))
        return plan

    expected = generate(folder, "batching")
    with use(plan_step=one_at_a_time):
        assert generate(folder, "batching") == expected
    assert max(most) == 1


class EqualRanges:
    """The plainest allocator: the arena is cut once into ranges of the size that is asked for first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.allocated: dict[int, int] = {}

    def can_allocate(self, num_slots: int) -> bool:
        return self._free_start(num_slots) is not None

    def allocate(self, num_slots: int) -> int | None:
        start = self._free_start(num_slots)
        if start is not None:
            self.allocated[start] = num_slots
        return start

    def free(self, start: int) -> None:
        del self.allocated[start]

    def _free_start(self, size: int) -> int | None:
        starts = range(0, self.num_slots - size + 1, size)
        return next((start for start in starts if start not in self.allocated), None)


def test_an_allocator_of_ones_own_without_powers_of_two_serves_rung_contiguous(folder: Path) -> None:
    def tokens() -> list[list[int]]:
        llm = LLM(str(folder), rung="contiguous", device="cpu", block_size=4, num_blocks=16, max_model_len=21)
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0))
        assert llm.engine.cache.used_slots == 0
        return [result.token_ids for result in results]

    expected = tokens()
    with use(allocator=EqualRanges):
        assert tokens() == expected
        arena = Arena(num_slots=64, max_model_len=21)
        assert [arena.allocate(seq_id, 3, 2) for seq_id in range(3)] == [0, 21, 42]
        assert not arena.can_admit(3, 2)
        assert arena.waste().external == 0


@pytest.mark.parametrize(("start", "length"), [(3, 16), (0, 2), (16, 16)])
def test_an_allocator_whose_ranges_attention_could_not_read_is_refused(start: int, length: int) -> None:
    class Wrong(EqualRanges):
        def allocate(self, num_slots: int) -> int:
            self.allocated[start] = length
            return start

    with use(allocator=Wrong):
        arena = Arena(num_slots=16 + start % 16, max_model_len=8)
    with pytest.raises(AccountingError, match="begin at a multiple of its length"):
        arena.allocate(0, 3, 2)
    assert not arena.ranges and not arena.buddy.allocated
