"""The resident tables: after whatever has happened to a sequence, a step reads the blocks that its table has now."""

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minipaged.batching.cache import BatchingCache, Room
from minipaged.batching.plan import Chunk
from minipaged.fast.device_batch import DeviceBatch
from minipaged.fast.inputs import PADDING_SLOT, DecodeInputs, batch_sizes
from minipaged.foundation.sampling import sampling_settings
from minipaged.tiers import Tier
from tests.fake_sequences import sequence
from tests.kernels.helpers import DEVICE

NUM_SEATS, WIDTH, SLOTS, VOCAB = 4, 8, 4, 100
TIERS = ("torch", "triton")


class Bench:
    """A cache, resident tensors beside it, and sequences that decode."""

    def __init__(self, tier: Tier = "torch", num_blocks: int = 32) -> None:
        self.tier: Tier = tier
        self.device = DEVICE if tier == "triton" else torch.device("cpu")
        self.cache = BatchingCache(num_blocks, SLOTS)
        self.batch = DeviceBatch(NUM_SEATS, WIDTH, SLOTS, VOCAB, self.device)
        self.inputs = DecodeInputs(NUM_SEATS, WIDTH, self.device)
        self.seqs: dict[int, Any] = {}
        self.sent: list[int] = []  # numbers per copy to the device
        send = self.batch._send
        self.batch._send = lambda numbers: (self.sent.append(sum(map(len, numbers))), send(numbers))[1]

    def add(self, seq_id: int, num_tokens: int, **params: Any) -> None:
        self.cache.allocate(Room([seq_id], [num_tokens], 0, 99))
        self.note(seq_id, **params)

    def note(self, seq_id: int, **params: Any) -> None:
        """Let a sequence that has a table decode, with parameters of its own."""
        seq = sequence(seed=seq_id + 1000, **({"temperature": 0.5 + seq_id} | params))
        seq.seq_id = seq_id  # type: ignore[attr-defined]
        self.seqs[seq_id] = seq

    def step(self, *seq_ids: int, size: int | None = None, token: int = 7, number: int | None = None) -> None:
        """Let some sequences take a slot and run, and compare what the step reads with the books."""
        chunks, seqs = [], [self.seqs[seq_id] for seq_id in seq_ids]
        for seq_id in seq_ids:
            slot = self.cache.append(seq_id)
            start = self.cache.tables[seq_id].num_tokens - 1
            member: Any = SimpleNamespace(seq_id=seq_id, token_ids=[0] * start + [token + seq_id])
            group: Any = SimpleNamespace(num_prompt_tokens=3)
            chunks.append(Chunk(group, member, start, start + 1, [slot], True))
        self.cache.take_copies()
        size = size or len(seq_ids)
        self.sent.clear()
        if number is not None:  # what the host knows in the place of the token
            chunks[0].member.token_ids[-1] = number
        self.batch.place(chunks, seqs, self.cache, size)
        chunks[0].member.token_ids[-1] = token + seq_ids[0]
        self.expand(size)
        self.check(chunks, seqs, size)

    def expand(self, size: int) -> None:
        self.batch.expand(self.inputs, size, self.tier)

    def check(self, chunks: list[Chunk], seqs: list[Any], size: int) -> None:
        rows, count = self.inputs.rows(size), len(chunks)
        assert rows.token_ids[:count].tolist() == [chunk.member.token_ids[-1] for chunk in chunks]
        assert rows.positions[:count].tolist() == [chunk.start for chunk in chunks]
        assert rows.slots[:count].tolist() == [chunk.slots[0] for chunk in chunks]
        assert rows.seq_lens[:count].tolist() == [chunk.stop for chunk in chunks]
        for row, chunk in enumerate(chunks):
            block_ids = self.cache.tables[chunk.member.seq_id].block_ids
            assert rows.block_tables[row, : len(block_ids)].tolist() == block_ids
        assert rows.slots[count:].tolist() == [PADDING_SLOT] * (size - count)
        assert rows.seq_lens[count:].tolist() == [0] * (size - count)
        settings, mine = self.batch.step_sampling, sampling_settings(seqs, VOCAB, self.device)
        assert torch.equal(settings.temperature[:count], mine[0]) and torch.equal(settings.seeds[:count], mine[4])
        for name, own in zip(("top_k", "top_p", "min_p"), mine[1:4], strict=True):
            assert getattr(settings, name)[:count].tolist() == (
                own.tolist() if own is not None else [NEUTRAL[name]] * count
            )
        assert self.batch.output_indices[:count].tolist() == [chunk.stop - 3 for chunk in chunks]


NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_without_a_new_block_sends_four_numbers_a_row(tier: Tier):
    b = Bench(tier)
    b.add(0, 4)
    b.add(1, 5)
    b.step(0, 1)
    assert b.sent == [8, 8]  # two places and two blocks of each table
    for _ in range(2):
        b.step(0, 1)
        assert b.sent == [8]
    b.step(1, 0)
    assert b.sent == [2 * 2, 8], "of the table that has grown its last two blocks, whatever the order of rows"


@pytest.mark.parametrize("tier", TIERS)
def test_a_copied_last_block_is_sent_also_when_the_table_has_grown_since(tier: Tier):
    b = Bench(tier)
    b.add(0, 6)
    b.step(0)
    for num_unseen in (0, 1, 3):
        child = 10 + num_unseen
        b.cache.fork(0, child)
        b.note(child)
        before = b.cache.tables[0].block_ids[-1]
        for _ in range(num_unseen):  # steps that run eagerly, and do not look at the resident tables
            b.cache.append(0)
            b.cache.take_copies()
        b.step(0, child)
        moved = b.cache.tables[0].block_ids != b.cache.tables[child].block_ids
        assert moved and before in b.cache.tables[0].block_ids + b.cache.tables[child].block_ids
        b.cache.free(child)


@pytest.mark.parametrize("tier", TIERS)
def test_one_who_comes_back_in_other_blocks_reads_those(tier: Tier):
    b = Bench(tier)
    b.add(0, 6)
    b.add(1, 7)
    b.step(0, 1)
    old = list(b.cache.tables[0].block_ids)
    swapped, _ = b.cache.swap_out([0])
    b.add(2, 9)  # takes the blocks
    b.step(1, 2)
    b.cache.swap_in(swapped)
    assert b.cache.tables[0].block_ids != old
    b.step(0, 1, 2)
    b.cache.free(0)
    b.cache.allocate(Room([0], [8], 0, 99))  # computed again
    b.step(0, 1, 2)


@pytest.mark.parametrize("tier", TIERS)
def test_a_seat_that_is_taken_over_has_nothing_of_who_sat_there(tier: Tier):
    b = Bench(tier)
    for seq_id, params in enumerate([{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0}]):
        b.add(seq_id, 9, **params)
    b.step(0, 1, 2, 3)
    rows = {seq_id: seat.row for seq_id, seat in b.batch.seats.items()}
    for seq_id in (0, 1, 2, 3):
        b.cache.free(seq_id)
    for seq_id in (7, 8):
        b.add(seq_id, 3)
    b.step(8, 7, size=4)
    assert {b.batch.seats[seq_id].row for seq_id in (7, 8)} <= set(rows.values())
    assert b.batch.seats.keys() == {7, 8} and len(b.batch._free) == NUM_SEATS - 2


@pytest.mark.parametrize("tier", TIERS)
def test_a_number_in_the_place_of_a_token_is_the_one_chosen_last(tier: Tier):
    b = Bench(tier)
    b.add(0, 5)
    b.batch.chosen[:] = torch.tensor([40, 41, -1, 43])
    numbers, expected = [-2, 9, -1, -4, 0, -3], [41, 9, 40, 43, 0, 0]  # a row that has found none goes on with any
    assert b.batch.with_chosen(torch.tensor(numbers, device=b.device)).tolist() == expected
    for number, token in zip(numbers, expected, strict=True):
        b.step(0, number=number, token=token)


@pytest.mark.parametrize("tier", TIERS)
def test_at_rest_nobody_is_there_and_everything_is_as_before_after_it(tier: Tier):
    b = Bench(tier)
    b.add(0, 5)
    b.step(0, size=2)
    b.batch.chosen[:] = torch.arange(4)
    sent, chosen, tables = b.batch.sent.clone(), b.batch.chosen.clone(), b.batch.block_tables.clone()
    with b.batch.at_rest():
        b.expand(NUM_SEATS)
        assert b.inputs.slots.tolist() == [PADDING_SLOT] * NUM_SEATS and not b.inputs.seq_lens.any()
        b.batch.chosen.fill_(9)
    assert torch.equal(b.batch.sent, sent) and torch.equal(b.batch.chosen, chosen)
    assert torch.equal(b.batch.block_tables, tables)


def test_after_an_error_everybody_gets_a_seat_anew():
    b = Bench()
    b.add(0, 5)
    b.add(1, 5)
    b.step(0, 1)
    b.batch.forget()
    assert not b.batch.seats and sorted(b.batch._free) == list(range(NUM_SEATS))
    b.step(1, 0, size=4)


@pytest.mark.parametrize(("tier", "seed"), [*(("torch", seed) for seed in range(20)), ("triton", 20), ("triton", 21)])
def test_random_comings_and_goings_leave_the_right_tables(tier: Tier, seed: int):
    rng, b = Random(seed), Bench(tier, num_blocks=40)
    names, swapped = iter(range(10_000)), {}
    for _ in range(150):
        living = [seq_id for seq_id in b.seqs if seq_id in b.cache.tables]
        act = rng.choice(["add", "fork", "free", "swap out", "swap in", "unseen", *["step"] * 4])
        if act == "add" and len(living) < NUM_SEATS and b.cache.pool.num_free > 8:
            b.add(next(names), rng.randint(1, 12), top_k=rng.choice([0, 5]), min_p=rng.choice([0, 0.1]))
        elif act == "fork" and living and len(living) < NUM_SEATS:
            child = next(names)
            b.cache.fork(rng.choice(living), child)
            b.note(child)
        elif act == "free" and living:
            b.cache.free(rng.choice(living))
        elif act == "swap out" and living:
            gone = rng.choice(living)
            swapped[gone], _ = b.cache.swap_out([gone])
        elif act == "swap in" and swapped and len(living) < NUM_SEATS:
            back = rng.choice(list(swapped))
            if b.cache.can_swap_in(swapped[back]):
                b.cache.swap_in(swapped.pop(back))
        else:
            for seq_id in [each for each in living if b.cache.tables[each].num_tokens >= WIDTH * SLOTS - 1]:
                b.cache.free(seq_id)
                living.remove(seq_id)
            chosen = rng.sample(living, rng.randint(0, len(living)))
            if chosen and b.cache.can_append(chosen):
                if act == "unseen":
                    _ = [b.cache.append(seq_id) for seq_id in chosen]
                    b.cache.take_copies()
                else:
                    b.step(*chosen, size=next(size for size in batch_sizes(NUM_SEATS) if size >= len(chosen)))
        b.cache.check()


def sizes(largest: int) -> Iterator[int]:
    """Yield the size that each number of rows is filled up to."""
    return (next(size for size in batch_sizes(largest) if size >= count) for count in range(1, largest + 1))


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 15, 16, 17, 31, 32, 33, 256])
def test_every_number_of_rows_has_a_size_and_the_largest_is_exact(largest: int):
    assert sorted(set(batch_sizes(largest))) == batch_sizes(largest) and batch_sizes(largest)[-1] == largest
    assert all(count <= size < max(2 * count, count + 16) for count, size in enumerate(sizes(largest), start=1))
