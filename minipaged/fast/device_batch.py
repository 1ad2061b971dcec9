"""What the sequences that decode have on the GPU: block tables and sampling settings, kept there from step to step.

A decode step of 256 sequences changes little: every 16th sequence gets a block, a few have come or gone. So each
sequence has a **seat**, a row of the resident tensors, and a step sends four numbers a row and what has changed::

    host                                   device
    seat, token, position, output index -> rows of the step: block tables, slots, lengths, settings by seat
    (seat, place, block id) of new blocks -> resident block tables

**Tokens stay there.** The tokens that a step has chosen are kept in ``chosen``. Where the host does not know a token
yet it sends ``-1 - i`` instead, and the GPU takes the i-th of them.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minipaged.batching.cache import BatchingCache, PartialTable
from minipaged.batching.plan import Chunk
from minipaged.fast.inputs import DecodeInputs, Sampling
from minipaged.fast.rows.ops import expand_rows
from minipaged.fast.rows.reference import with_chosen
from minipaged.foundation.sampling import sampling_settings
from minipaged.foundation.sequence import Sequence
from minipaged.shapes import UNUSED_BLOCK, Int, Tensor
from minipaged.tiers import Tier
from minipaged.transfer import send


def num_outputs(chunk: Chunk) -> int:
    """Return the output index of the token that a sampled chunk chooses, those on their way counted."""
    return chunk.stop - chunk.group.num_prompt_tokens


@dataclass
class Seat:
    """A row of the resident tensors, and what is known to stand in it.

    A table grows at its end, and its last block may be replaced by a copy; a sequence that was sent away comes back
    with another table.
    """

    row: int
    table: PartialTable | None = None
    num_blocks: int = 0
    last_block_id: int = UNUSED_BLOCK


class DeviceBatch:
    """The resident tensors, and the books of who sits where.

    Args:
        num_seats: Most sequences that run.
        width: Entries of a block table.
        block_size: Slots in a block.
        vocab_size: Limits of ``top_k`` from there on are none.
        device: Where the tensors are.

    Invariants:
        Before a step, the row of each of its sequences holds the blocks of its table. The last row is nobody's.
    """

    def __init__(self, num_seats: int, width: int, block_size: int, vocab_size: int, device: torch.device) -> None:
        self.block_size, self.vocab_size, self.device = block_size, vocab_size, device
        self.nobody = num_seats
        self.block_tables = torch.full((num_seats + 1, width), UNUSED_BLOCK, dtype=torch.int32, device=device)
        self.sampling = Sampling.empty(num_seats + 1, device)
        self.chosen = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self.sent = torch.zeros((4, num_seats), dtype=torch.int64, device=device)
        self.output_indices = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self.step_sampling = Sampling.empty(num_seats, device)
        self.seats: dict[int, Seat] = {}  # by sequence
        self._free = list(range(num_seats))[::-1]

    # -- from the host

    def place(self, chunks: list[Chunk], seqs: list[Sequence], cache: BatchingCache, size: int) -> None:
        """Send what the step has to know of its rows, and fill up to ``size``.

        Cost:
            A few operations of Python per row, and one copy, or two where blocks were added.
        """
        self._seat(chunks, seqs)
        places, block_ids = self._changes(chunks, cache)
        if places:
            where, what = self._send([places, block_ids])
            self.block_tables.view(-1)[where] = what.to(torch.int32)
        padding = size - len(chunks)
        numbers = (
            [self.seats[chunk.member.seq_id].row for chunk in chunks] + [self.nobody] * padding,
            [chunk.member.token_ids[chunk.start] for chunk in chunks] + [0] * padding,
            [chunk.start for chunk in chunks] + [0] * padding,
            [num_outputs(chunk) for chunk in chunks] + [0] * padding,
        )
        self.sent[:, :size] = self._send(numbers)

    def _send(self, numbers: Sequences[list[int]]) -> Int[Tensor, "rows columns"]:
        return send(numbers, torch.int64, self.device)

    def _seat(self, chunks: list[Chunk], seqs: list[Sequence]) -> None:
        """Give every sequence a seat and put the settings of those that come there."""
        new = [seq for seq in seqs if seq.seq_id not in self.seats]
        if new:
            running = {chunk.member.seq_id for chunk in chunks}
            for seq_id in [seq_id for seq_id in self.seats if seq_id not in running]:
                self._free.append(self.seats.pop(seq_id).row)
            for seq in new:
                self.seats[seq.seq_id] = Seat(self._free.pop())
            self._write_settings(new)

    def _write_settings(self, new: list[Sequence]) -> None:
        rows = send([self.seats[seq.seq_id].row for seq in new], torch.int64, self.device)
        temperature, top_k, top_p, min_p, seeds, _ = sampling_settings(new, self.vocab_size, self.device)
        nothing = Sampling.empty(len(new), self.device)
        self.sampling.temperature[rows] = temperature
        self.sampling.top_k[rows] = nothing.top_k if top_k is None else top_k
        self.sampling.top_p[rows] = nothing.top_p if top_p is None else top_p
        self.sampling.min_p[rows] = nothing.min_p if min_p is None else min_p
        self.sampling.seeds[rows] = seeds

    def _changes(self, chunks: list[Chunk], cache: BatchingCache) -> tuple[list[int], list[int]]:
        """Return the places in the resident tables that have changed, and the block ids that go there."""
        places: list[int] = []
        block_ids: list[int] = []
        width = self.block_tables.shape[1]
        for chunk in chunks:
            seat, table = self.seats[chunk.member.seq_id], cache.tables[chunk.member.seq_id]
            num_blocks, last = len(table.block_ids), table.block_ids[-1]
            if seat.table is table and seat.num_blocks == num_blocks and seat.last_block_id == last:
                continue
            first = max(0, min(seat.num_blocks, num_blocks) - 1) if seat.table is table else 0
            places += range(seat.row * width + first, seat.row * width + num_blocks)
            block_ids += table.block_ids[first:]
            seat.table, seat.num_blocks, seat.last_block_id = table, num_blocks, last
        return places, block_ids

    # -- on the device

    def expand(self, inputs: DecodeInputs, size: int, tier: Tier) -> None:
        """Make the inputs of the step from what was sent. Nothing here depends on the host, so a graph can hold it."""
        expand_rows(
            self.sent,
            self.block_tables,
            *self.sampling.columns,
            self.chosen,
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            inputs.block_tables,
            inputs.seq_lens,
            self.output_indices,
            *self.step_sampling.columns,
            size=size,
            block_size=self.block_size,
            tier=tier,
        )

    def with_chosen(self, tokens: Int[Tensor, " T"]) -> Int[Tensor, " T"]:
        """Put the tokens chosen last in the places of the numbers that stand for them."""
        return with_chosen(tokens, self.chosen)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Make every row nobody's for a while, and keep what was sent and chosen."""
        sent, chosen = self.sent.clone(), self.chosen.clone()
        self.sent.zero_()
        self.sent[0] = self.nobody
        try:
            yield
        finally:
            self.sent.copy_(sent)
            self.chosen.copy_(chosen)

    def forget(self) -> None:
        """Let everybody go, after an error."""
        self._free += [seat.row for seat in self.seats.values()]
        self.seats.clear()
