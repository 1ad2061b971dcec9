"""Rung 1's engine: prefill writes K and V once, decode runs one token per sequence."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from minipaged.contiguous.arena import Arena
from minipaged.contiguous.ops import contiguous_attention
from minipaged.errors import UserError
from minipaged.foundation.generate import Engine as FoundationEngine
from minipaged.foundation.generate import EngineOptions as FoundationOptions
from minipaged.foundation.model import Attend, DecoderModel
from minipaged.foundation.sampling_params import SamplingParams
from minipaged.foundation.sequence import Sequence
from minipaged.shapes import Float, Int, Tensor


@dataclass(frozen=True, kw_only=True)
class EngineOptions(FoundationOptions):
    """Rung 0's options, and the size of the cache.

    Args:
        num_blocks: Blocks of the cache. ``num_blocks * block_size`` is its memory in slots, on this rung too, which
            does not know blocks.
        block_size: Slots in a block.
        reservation: How much a sequence reserves where it needs one dense range; see `arena.RESERVATIONS`.
    """

    num_blocks: int
    block_size: int = 16
    reservation: str = "max"


class Engine(FoundationEngine):
    """Static batches over an arena with one dense reservation per sequence.

    Adds to rung 0: a cache, and with it the difference between prefill (a whole prompt, bound by arithmetic) and
    decode (one token a sequence, bound by memory).
    """

    rung = "contiguous"
    options_type = EngineOptions
    options: EngineOptions

    def __init__(self, model: DecoderModel, options: EngineOptions):
        super().__init__(model, options)
        self.make_cache(options.num_blocks, options.block_size)

    # -- what rung 0 left open

    def max_output_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the smaller of the model's limit and the cache's. The last token needs no slot."""
        free_slots = self.slots_per_sequence(num_prompt_tokens, params) - num_prompt_tokens
        return min(super().max_output_tokens(num_prompt_tokens, params), free_slots + 1)

    def check_prompt(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """Refuse a prompt that the cache could not hold even if it were empty."""
        prompt = super().check_prompt(prompt_token_ids, params)
        room = self.slots_per_sequence(len(prompt), params)
        if len(prompt) > room:
            raise UserError(
                f"the prompt has {len(prompt)} tokens; the cache has room for {room} of one sequence "
                f"(num_blocks {self.options.num_blocks} x block_size {self.options.block_size})"
            )
        return prompt

    def decode(self, batch: list[Sequence]) -> Float[Tensor, "B V"]:
        """Run the newest token of each sequence; everything older is in the cache."""
        slots = self.tensor([self.cache.append(seq.seq_id) for seq in batch])
        token_ids = self.tensor([seq.output_token_ids[-1] for seq in batch])
        positions = self.tensor([seq.num_tokens - 1 for seq in batch])
        return self.model.forward(token_ids, positions, self.attend_decode(batch, slots))

    def attend_prefill(self, batch: list[Sequence], query_starts: Int[Tensor, " B+1"]) -> Attend:
        """Write the fresh K and V, then attend over them: they are all there is, no need to read them back."""
        slots = self.tensor(list(itertools.chain.from_iterable(self.prompt_slots(seq) for seq in batch)))
        attend_fresh = super().attend_prefill(batch, query_starts)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, k, v, slots)
            return attend_fresh(layer, q, k, v)

        return attend

    def release(self, seq: Sequence) -> None:
        """Give back the sequence's slots."""
        self.cache.free(seq.seq_id)

    def drop_batch(self) -> None:
        """Abort all members, and free what a sequence took that had not joined the batch yet."""
        super().drop_batch()
        for seq_id in self.cache.seq_ids:
            self.cache.free(seq_id)

    def stats(self) -> dict[str, int]:
        """Return the counters; a block that is reserved in part counts as used."""
        used = -(-self.cache.used_slots // self.options.block_size)
        total = -(-self.cache.num_slots // self.options.block_size)
        return super().stats() | {"num_blocks": total, "used_blocks": used, "free_blocks": total - used}

    # -- what the next rung changes

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the bookkeeping, ``cache``, and the memory, ``kv``."""
        num_slots = num_blocks * block_size
        self.kv = allocate_kv(self.model, (1, num_slots))  # first: it refuses what is too large
        self.cache = Arena(num_slots, self.options.max_model_len, self.options.reservation)

    def slots_per_sequence(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many slots a sequence of such a request can have at most."""
        return self.cache.limit

    def can_admit(self, seq: Sequence) -> bool:
        """Return whether a range is free that is long enough."""
        room = len(seq.prompt_token_ids), seq.max_output_tokens
        return super().can_admit(seq) and self.cache.can_admit(*room)

    def admit(self, seq: Sequence) -> None:
        """Reserve a range. To ``oracle`` and ``pow2`` the request's ``max_tokens`` is the output's true length."""
        self.cache.allocate(seq.seq_id, len(seq.prompt_token_ids), seq.max_output_tokens)

    def prompt_slots(self, seq: Sequence) -> list[int]:
        """Return the slots of the prompt's tokens."""
        own = self.cache.ranges[seq.seq_id]
        return list(range(own.start, own.start + own.num_tokens))

    def write(self, layer: int, k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], slots: Int[Tensor, " T"]) -> None:
        """Write the keys and values of new tokens into their slots."""
        for pool, new in zip(self.kv[layer], (k, v), strict=True):
            pool.view(-1, *new.shape[1:]).index_copy_(0, slots, new)

    def attend_decode(self, batch: list[Sequence], slots: Int[Tensor, " B"]) -> Attend:
        """Write the new token's K and V, then attend over the arena itself.

        All ranges of one size are rows of the arena seen as ``[rows, size, K, D]``, so no row has to be copied
        together: queries go to the rows of their sequences, and rows of others have length 0. There is one call
        for each size, one in all under the ``max`` policy.
        """
        windows = self.model.config.layer_windows
        views = self._rows_by_size(batch)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, k, v, slots)
            out = torch.empty_like(q)
            for view in views:
                k_rows, v_rows = (view.of(arena) for arena in self.kv[layer])
                row_q = q.new_zeros(len(view.seq_lens), *q.shape[1:]).index_copy_(0, view.rows, q[view.members])
                window, tier = windows[layer], self.model.tier
                row_out = contiguous_attention(row_q, k_rows, v_rows, view.seq_lens, window=window, tier=tier)
                out[view.members] = row_out[view.rows]
            return out

        return attend

    def _rows_by_size(self, batch: list[Sequence]) -> list["RowView"]:
        own = [self.cache.ranges[seq.seq_id] for seq in batch]
        views = []
        for size in sorted({each.length for each in own}):
            members = [i for i, each in enumerate(own) if each.length == size]
            rows = [own[i].start // size for i in members]
            first, seq_lens = min(rows), [0] * (max(rows) - min(rows) + 1)
            for i, row in zip(members, rows, strict=True):
                seq_lens[row - first] = own[i].num_tokens
            offsets = self.tensor([row - first for row in rows])
            views.append(RowView(size, first, self.tensor(members), offsets, self.tensor(seq_lens, torch.int32)))
        return views


@dataclass(frozen=True)
class RowView:
    """The part of the arena that holds a batch's ranges of one size, seen as rows.

    ``members`` are places in the batch and ``rows`` their rows, counted from ``first_row``; ``seq_lens`` has a
    number for every row, 0 where it is no member's.
    """

    size: int
    first_row: int
    members: Int[Tensor, " members"]
    rows: Int[Tensor, " members"]
    seq_lens: Int[Tensor, " rows"]

    def of(self, arena: Float[Tensor, "1 slots K D"]) -> Float[Tensor, "rows size K D"]:
        """Return the rows of one layer's keys or values, without a copy."""
        start = self.first_row * self.size
        end = start + len(self.seq_lens) * self.size
        return arena[0, start:end].view(len(self.seq_lens), self.size, *arena.shape[2:])


def allocate_kv(model: DecoderModel, slots_shape: tuple[int, int]) -> Float[Tensor, "layers 2 N S K D"]:
    """Take memory for keys and values of all layers in one piece, so that one launch can move a block of all layers.

    Raises:
        UserError: The machine has not that much memory.
    """
    config = model.config
    shape = (config.num_layers, 2, *slots_shape, config.num_kv_heads, config.head_dim)
    try:
        return torch.empty(shape, dtype=model.dtype, device=model.device)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        num_slots = slots_shape[0] * slots_shape[1]
        gib = num_slots * config.kv_bytes_per_token(model.dtype) / 2**30
        raise UserError(
            f"a cache of {num_slots:,} slots needs {gib:.1f} GiB, more than {model.device} has free; lower num_blocks"
        ) from error
