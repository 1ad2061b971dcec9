"""Rung 2's engine: rung 1's, with blocks in the place of rows."""

import torch

from minipaged.contiguous.generate import Engine as ContiguousEngine
from minipaged.contiguous.generate import allocate_kv
from minipaged.foundation.generate import Engine as FoundationEngine
from minipaged.foundation.model import Attend
from minipaged.foundation.sampling_params import SamplingParams
from minipaged.foundation.sequence import Sequence
from minipaged.paged.cache import PagedCache
from minipaged.paged.ops import paged_attention, write_slots
from minipaged.shapes import UNUSED_BLOCK, Int, Tensor


class Engine(ContiguousEngine):
    """Static batches over a block pool.

    Prefill and decode are rung 1's. This rung changes where a token's slot comes from, and what decode reads.
    """

    rung = "paged"

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make the pool's bookkeeping, ``cache``, and its memory, ``kv``."""
        self.kv = allocate_kv(self.model, (num_blocks, block_size))  # first: it refuses what is too large
        self.cache = self.make_bookkeeping(num_blocks, block_size)

    def make_bookkeeping(self, num_blocks: int, block_size: int) -> PagedCache:
        """Make the pool and the tables."""
        return PagedCache(num_blocks, block_size)

    def slots_per_sequence(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the slots of the whole pool: a lone sequence may have them all."""
        return self.cache.pool.num_blocks * self.cache.pool.block_size

    def can_admit(self, seq: Sequence) -> bool:
        """Return whether the blocks that the sequence may need are neither taken nor promised."""
        return FoundationEngine.can_admit(self, seq) and self.cache.can_admit(
            len(seq.prompt_token_ids), _max_slots(seq)
        )

    def admit(self, seq: Sequence) -> None:
        """Take the prompt's blocks."""
        self.cache.allocate(seq.seq_id, len(seq.prompt_token_ids), _max_slots(seq))

    def prompt_slots(self, seq: Sequence) -> list[int]:
        """Return the slots of the prompt's tokens: the slot mapping."""
        return self.cache.tables[seq.seq_id].slots(0, len(seq.prompt_token_ids))

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write the keys and values of new tokens into their slots."""
        k_pool, v_pool = self.kv[layer]
        write_slots(k, v, k_pool, v_pool, slots, tier=self.model.tier)

    def attend_decode(self, batch: list[Sequence], slots: Int[Tensor, " B"]) -> Attend:
        """Write the new token's K and V, then attend through the block tables."""
        windows = self.model.config.layer_windows
        tables = [self.cache.tables[seq.seq_id] for seq in batch]
        width = max(len(table.block_ids) for table in tables)
        padded = [table.block_ids + [UNUSED_BLOCK] * (width - len(table.block_ids)) for table in tables]
        block_tables = self.tensor(padded, torch.int32)  # [B, M]
        seq_lens = self.tensor([table.num_tokens for table in tables], torch.int32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.write(layer, k, v, slots)
            k_pool, v_pool = self.kv[layer]
            window, tier = windows[layer], self.model.tier
            return paged_attention(q, k_pool, v_pool, block_tables, seq_lens, window=window, tier=tier)

        return attend

    def stats(self) -> dict[str, int]:
        """Return the counters of the pool."""
        pool = self.cache.pool
        used = pool.num_blocks - pool.num_free
        return FoundationEngine.stats(self) | {
            "num_blocks": pool.num_blocks,
            "used_blocks": used,
            "free_blocks": pool.num_free,
        }


def _max_slots(seq: Sequence) -> int:
    """Return the slots that a sequence fills at most: its last token needs none."""
    return len(seq.prompt_token_ids) + seq.max_output_tokens - 1
