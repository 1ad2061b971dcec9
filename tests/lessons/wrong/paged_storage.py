"""Plausible wrong answers to the exercises of lesson 02a, and a piece of what each check says."""

from minipaged.errors import AccountingError
from minipaged.lessons.exercises import paged_storage as checks
from minipaged.paged.block_pool import BlockPool
from minipaged.paged.block_table import BlockTable
from minipaged.shapes import Tensor


def slots_without_the_size(block_ids: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return [block_ids[token // block_size] + token % block_size for token in range(start, stop)]


def slots_counted_from_the_start(block_ids: list[int], start: int, stop: int, block_size: int) -> list[int]:
    return [block_ids[i // block_size] * block_size + i % block_size for i in range(stop - start)]


def append_that_takes_a_block_too_early(table: BlockTable, pool: BlockPool) -> int:
    if not table.block_ids:
        table.block_ids.append(pool.allocate())
    slot = table.slot(table.num_tokens)
    table.num_tokens += 1
    if table.num_tokens % table.block_size == 0:
        table.block_ids.append(pool.allocate())
    return slot


def append_that_returns_the_next_place(table: BlockTable, pool: BlockPool) -> int:
    if table.needs_block:
        table.block_ids.append(pool.allocate())
    table.num_tokens += 1
    return table.block_ids[-1] * table.block_size + table.num_tokens % table.block_size


class PoolThatFreesTwice:
    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_ids = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_ids)

    def is_free(self, block_id: int) -> bool:
        return block_id in self.free_ids

    def allocate(self) -> int:
        if not self.free_ids:
            raise AccountingError("no block is free")
        return self.free_ids.pop()

    def free(self, block_id: int) -> None:
        self.free_ids.append(block_id)


class PoolThatTrustsItsList(PoolThatFreesTwice):
    def allocate(self) -> int:
        return self.free_ids.pop()


def write_that_floors_minus_one(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    block_size = k_pool.shape[1]
    for pool, new in ((k_pool, k), (v_pool, v)):
        pool[slot_mapping // block_size, slot_mapping % block_size] = new


def write_of_keys_alone(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    used = slot_mapping >= 0
    k_pool.view(-1, *k.shape[1:])[slot_mapping[used]] = k[used]


def write_of_one_head_over_all(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    for pool, new in ((k_pool, k), (v_pool, v)):
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                pool[slot // pool.shape[1], slot % pool.shape[1]] = new[i, 0]


def write_of_one_number_a_slot(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, slot_mapping: Tensor) -> None:
    for pool, new in ((k_pool, k), (v_pool, v)):
        for i, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                pool[slot // pool.shape[1], slot % pool.shape[1], 0, 0] = new[i, 0, 0]


WRONG = [
    (checks.check_slot_mapping, slots_without_the_size, "block_size=4"),
    (checks.check_slot_mapping, slots_counted_from_the_start, "start=3"),
    (checks.check_append, append_that_takes_a_block_too_early, "only when the new token finds all blocks full"),
    (checks.check_append, append_that_returns_the_next_place, "not of the next"),
    (checks.check_block_pool, PoolThatFreesTwice, "free(3) of a block that is free already was not refused"),
    (checks.check_block_pool, PoolThatTrustsItsList, "allocate() when no block is free raised IndexError"),
    (checks.check_write_slots, write_that_floors_minus_one, "A slot of -1 means: write this token nowhere"),
    (checks.check_write_slots, write_of_keys_alone, "v_pool"),
    (checks.check_write_slots, write_of_one_head_over_all, "every KV head"),
    (checks.check_write_slots, write_of_one_number_a_slot, "every number of each head"),
]
