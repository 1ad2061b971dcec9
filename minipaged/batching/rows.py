"""The tensors of one forward pass: rows of tokens, each row a piece of one sequence."""

import itertools
from array import array
from dataclasses import dataclass, replace

import torch

from minipaged.batching.arena_cache import ArenaCache
from minipaged.batching.cache import BatchingCache
from minipaged.batching.ops import ragged_paged_attention
from minipaged.batching.plan import Chunk
from minipaged.shapes import UNUSED_BLOCK, Float, Int, Tensor
from minipaged.tiers import Tier


@dataclass(frozen=True)
class Rows:
    """What the model and attention have to know of a step's chunks.

    ``logits_at`` are the tokens whose logits choose a next one, None where that is all of them. ``max_query_len`` is
    set where it is known that no sequence has more tokens here.
    """

    token_ids: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    slots: Int[Tensor, " T"]
    logits_at: Int[Tensor, " R"] | None
    block_tables: Int[Tensor, "B M"]
    query_starts: Int[Tensor, " B+1"]
    seq_lens: Int[Tensor, " B"]
    max_query_len: int | None = None

    @classmethod
    def of(cls, chunks: list[Chunk], cache: BatchingCache | ArenaCache, device: torch.device) -> "Rows":
        """Put the numbers of all chunks on the device.

        Cost:
            One number per token and per entry of a block table, collected in arrays of C.
        """
        token_ids, positions, slots, tables = array("q"), array("q"), array("q"), array("i")
        block_ids = [cache.block_ids(chunk.member.seq_id) for chunk in chunks]
        width = max(map(len, block_ids))
        unused = array("i", [UNUSED_BLOCK])
        for chunk, own in zip(chunks, block_ids, strict=True):
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.stop))
            slots.extend(chunk.slots)
            tables.extend(own)
            tables.extend(unused * (width - len(own)))
        ends = list(itertools.accumulate(chunk.stop - chunk.start for chunk in chunks))
        at = array("q", (end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.is_sampled))

        def tensor(values: array) -> Tensor:
            dtype = torch.int64 if values.typecode == "q" else torch.int32
            if not values:
                return torch.empty(0, dtype=dtype, device=device)
            host = torch.frombuffer(values, dtype=dtype)
            if device.type == "cuda":  # from memory that the GPU reads by itself, nobody has to wait for it
                return host.pin_memory().to(device, non_blocking=True)
            return host.clone()

        return cls(
            token_ids=tensor(token_ids),
            positions=tensor(positions),
            slots=tensor(slots),
            logits_at=None if len(at) == ends[-1] else tensor(at),
            block_tables=tensor(tables).view(len(chunks), width),
            query_starts=tensor(array("i", [0, *ends])),
            seq_lens=tensor(array("i", (chunk.stop for chunk in chunks))),
        )

    def before(self, num_rows: int) -> "Rows":
        """Return what `attend` needs of the first rows, which have one token each."""
        return replace(
            self,
            block_tables=self.block_tables[:num_rows],
            query_starts=self.query_starts[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
        )

    def behind(self, num_rows: int) -> "Rows":
        """Return what `attend` needs of the rows behind the first ones, which have one token each."""
        return replace(
            self,
            block_tables=self.block_tables[num_rows:].clone(),  # aligned again, as kernels are compiled for
            query_starts=self.query_starts[num_rows:] - num_rows,
            seq_lens=self.seq_lens[num_rows:].clone(),
        )

    def attend(
        self,
        q: Float[Tensor, "T H D"],
        k_pool: Float[Tensor, "N S K D"],
        v_pool: Float[Tensor, "N S K D"],
        window: int | None,
        tier: Tier,
    ) -> Float[Tensor, "T H D"]:
        """Let every token attend to those of its sequence that it sees. Keys and values are written before."""
        tables = (self.block_tables, self.query_starts, self.seq_lens)
        most = self.max_query_len
        return ragged_paged_attention(q, k_pool, v_pool, *tables, window=window, max_query_len=most, tier=tier)
