"""The checks of lesson 03: counts of a pool, copy-on-write, and the copies themselves."""

from collections.abc import Callable
from typing import Any

import torch

from minipaged.errors import AccountingError
from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.shapes import Tensor
from minipaged.sharing import reference
from minipaged.sharing.cache import SharingCache
from minipaged.sharing.ref_pool import RefCountedBlockPool
from minipaged.tiers import use

Call = tuple[str, int | None]

POOL_CALLS: list[list[Call]] = [
    [("allocate", None), ("share", 0), ("free", 0), ("free", 0)],
    [("allocate", None), ("share", 0), ("share", 0), ("free", 0), ("share", 0), ("free", 0), ("free", 0), ("free", 0)],
    [("allocate", None), ("allocate", None), ("share", 1), ("free", 0), ("free", 1), ("free", 1)],
    [("share", 1)],
    [("allocate", None), ("free", 0), ("free", 0)],
    [("allocate", None), ("share", 0), ("free", 0), ("free", 0), *[("allocate", None)] * 3, ("free", 0)],
]
"""Calls of a pool of 3 blocks, some of which must be refused."""

WRITES = [(6, 3, [0, 1, 2]), (6, 3, [2, 0, 1]), (8, 3, [0, 1, 2]), (5, 2, [1, 1, 0, 0]), (3, 2, [0, 1]), (7, 1, [0, 0])]
"""Prompt tokens, sequences, and who writes in which order, in blocks of 4 slots."""

PAIRS = [[[7, 5]], [[7, 5], [7, 0]], [[1, 2], [3, 4], [1, 6]]]
"""Blocks to copy, from and to."""


@exercise
def check_ref_counts(answer: type[RefCountedBlockPool]) -> None:
    """Compare a pool class with rung 3's, call by call."""
    for calls in POOL_CALLS:
        own, right = answer(3, 4), RefCountedBlockPool(3, 4)
        given = "a pool of 3 blocks:"
        for call in calls:
            given += f" {call[0]}({'' if call[1] is None else call[1]})"
            expect(
                _call(own, *call),
                _call(right, *call),
                given,
                "Sharing a free block, and freeing one, must raise AccountingError; `super().free` does the latter.",
            )
            expect(
                _counts(own),
                _counts(right),
                given,
                "`share` adds one to the count and `free` takes one away. Only the last `free` may give the block "
                "back to the free queue, with `super().free`, and its count is then 0.",
            )


@exercise
def check_prepare_write(answer: Callable[[SharingCache, int], None]) -> None:
    """Let the answer and rung 3 prepare the same writes, and compare their books after each."""
    for num_prompt_tokens, num_sequences, writers in WRITES:
        own, right = (_forked(num_prompt_tokens, num_sequences) for _ in range(2))
        given = f"blocks of 4, a prompt of {num_prompt_tokens} tokens, {num_sequences} sequences; writes by"
        for seq_id in writers:
            given += f" {seq_id}"
            right.append(seq_id)
            try:
                with use(prepare_write=answer):
                    own.append(seq_id)
            except AccountingError as error:
                raise WrongAnswer(
                    f"{given}\n  the pool refuses: {error}\nFree a reference once, and only one."
                ) from error
            _compare_books(own, right, given)


@exercise
def check_copy_blocks(answer: Callable[[Tensor, Tensor], None]) -> None:
    """Let the answer and the reference copy the same blocks, in one layer's keys and in everything."""
    for shape in [(8, 4, 1, 2), (2, 2, 8, 4, 1, 2)]:
        for pairs in PAIRS:
            before = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            own, right = before.clone(), before.clone()
            answer(own, torch.tensor(pairs))
            reference.copy_blocks(right, torch.tensor(pairs))
            expect(
                _origins(own, before),
                _origins(right, before),
                f"copy_blocks(pool of shape {list(shape)}, {pairs}); the lists say for each plane, K or V of a layer, "
                "what each block holds now",
                "A pair is (from, to). The pool itself has to change, whole blocks of it, in every plane alike.",
            )


def _call(pool: Any, name: str, block_id: int | None) -> Any:
    """Return what a call returns, or that it was refused."""
    try:
        result = getattr(pool, name)(*([] if block_id is None else [block_id]))
    except AccountingError:
        return "AccountingError"
    return result if name == "allocate" else None


def _counts(pool: RefCountedBlockPool) -> dict[str, list[int]]:
    return {"counts": [pool.num_references(block_id) for block_id in range(3)], "free": pool.free_block_ids}


def _forked(num_prompt_tokens: int, num_sequences: int) -> SharingCache:
    """Return a cache with a prompt and its forks; what it hands out next is not in order."""
    cache = SharingCache(num_blocks=12, block_size=4)
    for _ in range(12):
        cache.pool.allocate()
    for block_id in (7, 2, 5, 0, 9, 1, 3, 4, 6, 8, 10, 11):
        cache.pool.free(block_id)
    cache.allocate(0, num_prompt_tokens, max_slots=12, num_sequences=num_sequences)
    for seq_id in range(1, num_sequences):
        cache.fork(0, seq_id)
    return cache


def _compare_books(own: SharingCache, right: SharingCache, given: str) -> None:
    for what, books, help in (
        (
            "block tables",
            lambda cache: {seq_id: table.block_ids for seq_id, table in cache.tables.items()},
            "If others hold the last block too, a new one takes its place in this table. Nothing else changes.",
        ),
        (
            "counts",
            lambda cache: [cache.pool.num_references(block_id) for block_id in range(cache.pool.num_blocks)],
            "The sequence reads the old block no more: its reference goes back with `cache.pool.free`.",
        ),
        (
            "copies (from, to)",
            lambda cache: [tuple(pair) for pair in cache.pending_copies],
            "Each new block needs the keys and values of the old one: note (old, new) in `cache.pending_copies`.",
        ),
        ("num_copies", lambda cache: cache.num_copies, "Count every copy in `cache.num_copies`."),
    ):
        expect(books(own), books(right), f"{given}: {what}", help)


def _origins(pool: Tensor, before: Tensor) -> list[list[int | str]]:
    """Return for each block of each plane which block of that plane it was before; "?" for none."""
    planes, old = (each.reshape(-1, *each.shape[-4:]) for each in (pool, before))
    return [
        [next((i for i, was in enumerate(old_plane) if torch.equal(block, was)), "?") for block in plane]
        for plane, old_plane in zip(planes, old, strict=True)
    ]
