"""The checks of lesson 02a: slots, growth, the pool of free blocks, and writing."""

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import torch

from minipaged.errors import AccountingError
from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.paged import reference
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable
from minipaged.paged.cache import PagedCache
from minipaged.shapes import Tensor


def used_pool(num_blocks: int, block_size: int, free_ids: Sequence[int]) -> BlockPool:
    """Return a pool whose blocks are all taken but ``free_ids``, which it hands out in that order.

    Nothing is forced: all blocks are taken, and then these are given back in turn.

    Example:
        >>> pool = used_pool(8, 4, [7, 2, 5])
        >>> pool.allocate(), pool.allocate(), pool.num_free
        (7, 2, 1)
    """
    pool = BlockPool(num_blocks, block_size)
    for _ in range(num_blocks):
        pool.allocate()
    for block_id in free_ids:
        pool.free(block_id)
    return pool


SLOT_CASES = (([7, 2, 5], 4, 0, 10), ([7, 2, 5], 4, 3, 9), ([7, 2, 5], 4, 4, 4), ([3], 16, 0, 16), ([6, 0, 9], 1, 1, 3))


@exercise
def check_slot_mapping(slot_mapping: Callable[[list[int], int, int, int], list[int]]) -> None:
    """Compare with `BlockTable.slots`, also for pieces that begin in the middle and for an empty one."""
    for block_ids, block_size, start, stop in SLOT_CASES:
        expect(
            slot_mapping(list(block_ids), start, stop, block_size),
            BlockTable(block_size, block_ids, len(block_ids) * block_size).slots(start, stop),
            f"slot_mapping({block_ids}, start={start}, stop={stop}, block_size={block_size})",
            "Token i counts from the sequence's beginning: index i // block_size of the table, place i % block_size.",
        )


@exercise
def check_append(append: Callable[[BlockTable, BlockPool], int]) -> None:
    """Grow a sequence over two edges of blocks, beside `PagedCache.append` on a pool with the same free ids."""
    for block_size in (4, 1, 16):
        free_ids = [7, 2, 5, 0]
        cache, pool, table = PagedCache(8, block_size), used_pool(8, block_size, free_ids), BlockTable(block_size)
        cache.pool = used_pool(8, block_size, free_ids)
        cache.allocate(0, 0, max_slots=4 * block_size)
        for _ in range(2 * block_size + 2):
            given = f"append to {table.block_ids} with {table.num_tokens} tokens, blocks of {block_size}"
            slot, num_taken = append(table, pool), cache.append(0)
            own = cache.tables[0]
            expect(
                (slot, table.block_ids, table.num_tokens, pool.num_free),
                (num_taken, own.block_ids, own.num_tokens, cache.pool.num_free),
                f"{given}: (slot, block ids, tokens, free blocks)",
                "A block is taken only when the new token finds all blocks full; then the token is counted, and the "
                "slot is that of the new token, not of the next.",
            )


@exercise
def check_block_pool(pool_class: Callable[[int, int], Any]) -> None:
    """Take and give back at random: any order will do, but the books must be right after every step."""
    pool = pool_class(5, 4)
    expect((pool.num_blocks, pool.block_size), (5, 4), "num_blocks and block_size of Pool(5, 4)", "Keep both.")
    _check_free_ids(pool, set(range(5)), "a new pool of 5 blocks")
    _walk(pool, Random(0))
    for _ in range(5):
        pool.allocate()
    _check_refusal(pool, pool.allocate, "allocate() when no block is free", set())
    pool.free(3)
    _check_refusal(pool, lambda: pool.free(3), "free(3) of a block that is free already", {3})
    _check_refusal(pool, lambda: pool.free(5), "free(5) where ids end at 4", {3})
    _check_refusal(pool, lambda: pool.free(-1), "free(-1)", {3})


def _walk(pool: Any, rng: Random) -> None:
    taken: list[int] = []
    for _ in range(40):
        if taken and (len(taken) == pool.num_blocks or rng.random() < 0.45):
            block_id = taken.pop(rng.randrange(len(taken)))
            pool.free(block_id)
            what = f"free({block_id})"
        else:
            block_id = pool.allocate()
            what = f"allocate() -> {block_id}"
            if block_id in taken or block_id not in range(pool.num_blocks):
                raise WrongAnswer(f"{what} while {sorted(taken)} are taken: hand out only ids that are free.")
            taken.append(block_id)
        _check_free_ids(pool, set(range(pool.num_blocks)) - set(taken), f"after {what}")
    for block_id in taken:
        pool.free(block_id)


def _check_free_ids(pool: Any, free_ids: set[int], given: str) -> None:
    expect(
        (pool.num_free, [block_id for block_id in range(pool.num_blocks) if pool.is_free(block_id)]),
        (len(free_ids), sorted(free_ids)),
        f"{given}: (num_free, the ids for which is_free says yes)",
        "Every block is either free, once, or taken.",
    )


def _check_refusal(pool: Any, call: Callable[[], object], given: str, free_ids: set[int]) -> None:
    help = "Raise AccountingError before anything changes: else one block would be handed out twice, or lost."
    try:
        call()
    except AccountingError:
        _check_free_ids(pool, free_ids, f"{given}, refused")
    except (IndexError, KeyError, ValueError) as error:
        raise WrongAnswer(f"{given} raised {error!r}. {help}") from None
    else:
        raise WrongAnswer(f"{given} was not refused. {help}")


WRITE_CASES = ((4, [10]), (4, [31, 8, 9]), (1, [5, 0, 7]), (16, [17, -1, 16, -1]), (4, [-1, -1]), (4, []))


@exercise
def check_write_slots(write_slots: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]) -> None:
    """Compare both pools with the product's own, bit for bit, in memory like the engine's: a view of one tensor."""
    for block_size, slots in WRITE_CASES:
        k = torch.arange(1.0, 1 + 6 * len(slots)).view(len(slots), 2, 3)
        pools = [torch.zeros(2, 8, block_size, 2, 3) for _ in range(2)]
        for (k_pool, v_pool), write in zip(pools, (write_slots, reference.write_slots), strict=True):
            write(k.clone(), -k, k_pool, v_pool, torch.tensor(slots, dtype=torch.int64))
        given = f"write_slots of {len(slots)} tokens to slots {slots}, blocks of {block_size}"
        for name, actual, expected in zip(("k_pool", "v_pool"), *pools, strict=True):
            expect(
                _written(actual),
                _written(expected),
                f"{given}: slots of {name} with what they hold first",
                "A pool is one row of slots, block after block. A slot of -1 means: write this token nowhere.",
            )
            _expect_whole_slots(actual, expected, f"{given}: {name}")


def _written(pool: Tensor) -> dict[int, float]:
    """Return the first number of each slot that holds something."""
    rows: Iterable[Tensor] = pool.flatten(0, 1)
    return {slot: row.flatten()[0].item() for slot, row in enumerate(rows) if row.any()}


def _expect_whole_slots(actual: Tensor, expected: Tensor, given: str) -> None:
    for slot, rows in enumerate(zip(actual.flatten(0, 1), expected.flatten(0, 1), strict=True)):
        if not torch.equal(*rows):
            raise WrongAnswer(
                f"{given}, slot {slot}\n  expected {rows[1].tolist()}\n  got      {rows[0].tolist()}\n"
                "A slot takes the whole row of its token: every KV head, and every number of each head."
            )
