"""Rung 5's engine: rung 4's over a cache that remembers, with attention that reads a shared beginning once."""

import itertools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from minipaged.batching.cache import BatchingCache
from minipaged.batching.generate import Engine as BatchingEngine
from minipaged.batching.generate import EngineOptions as BatchingOptions
from minipaged.batching.generate import Read
from minipaged.batching.group import Group
from minipaged.batching.plan import Plan
from minipaged.batching.preemption import Preemption
from minipaged.batching.rows import Rows
from minipaged.batching.scheduler import Scheduler
from minipaged.errors import UserError
from minipaged.foundation.sampling import SampledToken
from minipaged.foundation.sampling_params import SamplingParams as FoundationParams
from minipaged.foundation.sequence import Result, Sequence, StepOutput
from minipaged.prefix.cache import PrefixCache
from minipaged.prefix.eviction import make_policy
from minipaged.prefix.hash_chain import HashChain
from minipaged.prefix.index import PrefixIndex
from minipaged.prefix.metrics import Metrics
from minipaged.prefix.ops import shared_prefix_attention
from minipaged.prefix.params import SamplingParams
from minipaged.prefix.radix_tree import RadixTree
from minipaged.prefix.scheduler import PrefixPlan, PrefixScheduler, SharedRows
from minipaged.shapes import Tensor
from minipaged.sharing.beam import Beam

PREFIX_CACHES = ("hash", "radix")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(BatchingOptions):
    """Rung 4's options, and those of the prefix cache.

    Args:
        prefix_cache: "hash" finds whole blocks by their digests, "radix" the longest beginning in a tree; None
            computes every prompt. The contiguous cache has none.
        eviction_policy: Which cached block is given up first; see `EVICTION_POLICIES`.
        weights_identity: Names the weights, so that keys of other weights differ.
    """

    prefix_cache: Literal["hash", "radix"] | None = "hash"
    eviction_policy: str = "lru"
    weights_identity: str = ""


class Engine(BatchingEngine):
    """Continuous batching with a prefix cache.

    Changes of rung 4: the books under the scheduler find blocks again, and attention reads the beginning that several
    rows share once for all of them.
    """

    rung = "prefix"
    options_type = EngineOptions
    options: EngineOptions

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        """Make what rung 4 makes, and a counter."""
        self.num_shared_launches = 0
        super().make_cache(num_blocks, block_size)

    def make_bookkeeping(self, num_blocks: int, block_size: int) -> BatchingCache:
        """Make a pool that remembers what its blocks hold."""
        if self.options.prefix_cache is None:
            return super().make_bookkeeping(num_blocks, block_size)
        policy = make_policy(self.options.eviction_policy)
        return PrefixCache(num_blocks, block_size, self.window, self._make_index(block_size), policy)

    def _make_index(self, block_size: int) -> PrefixIndex:
        if self.options.prefix_cache == "radix":
            return RadixTree(block_size)
        if self.options.prefix_cache != "hash":
            raise UserError(f"prefix_cache must be hash, radix or None, not {self.options.prefix_cache!r}")
        config = self.model.config  # rotary settings are a part of it
        return HashChain(repr((config, self.options.weights_identity, self.model.dtype, block_size)), block_size)

    def make_scheduler(self, preemption: Preemption) -> Scheduler:
        """Make the scheduler that goes with the cache."""
        if not isinstance(self.cache, PrefixCache):
            return super().make_scheduler(preemption)
        options = self.options
        return PrefixScheduler(self.cache, options.max_num_seqs, options.max_num_batched_tokens, preemption)

    def scheduling(self, params: FoundationParams) -> dict[str, Any]:
        """Return what the scheduler has to know of a request's parameters."""
        known = super().scheduling(params)
        if isinstance(self.scheduler, PrefixScheduler) and isinstance(params, SamplingParams):
            known["cache_salt"] = params.cache_salt or ""
        return known

    # -- attention

    def read_rows(self, plan: Plan, rows: Rows) -> Read:
        """Attend as rung 4 does, but let rows with a common beginning read that together."""
        read_alone = super().read_rows(plan, rows)
        if not isinstance(plan, PrefixPlan) or not plan.shared:
            return read_alone
        num_shared = sum(group.num_rows for group in plan.shared)
        read_shared = self.read_shared(rows.before(num_shared), self._group_tensors(plan.shared))
        others = rows.behind(num_shared)
        windows, tier = self.model.config.layer_windows, self.model.tier

        def read(layer: int, q: Tensor) -> Tensor:
            if windows[layer] is not None:  # this layer does not look at the beginning
                return read_alone(layer, q)
            self.num_shared_launches += 1
            out = torch.empty_like(q)
            out[:num_shared] = read_shared(layer, q[:num_shared])
            if num_shared < len(q):
                out[num_shared:] = others.attend(q[num_shared:], *self.kv[layer], window=None, tier=tier)
            return out

        return read

    def read_shared(self, rows: Rows, groups: tuple[Tensor, Tensor]) -> Read:
        """Return the attention of decode rows that stand in groups, in layers that look at the beginning.

        Args:
            rows: The rows, those of a group side by side.
            groups: ``group_starts`` and ``prefix_lens`` of `shared_prefix_attention`.
        """
        arguments, tier = (rows.block_tables, rows.seq_lens, *groups), self.model.tier

        def read(layer: int, q: Tensor) -> Tensor:
            k_pool, v_pool = self.kv[layer]
            return shared_prefix_attention(q, k_pool, v_pool, *arguments, tier=tier)

        return read

    def _group_tensors(self, shared: list[SharedRows]) -> tuple[Tensor, Tensor]:
        starts = [0, *itertools.accumulate(group.num_rows for group in shared)]
        return self.tensor(starts, torch.int32), self.tensor([group.num_tokens for group in shared], torch.int32)

    def drop_batch(self) -> None:
        """Abort what a failed step may have touched, and keep nothing that it was about to write."""
        if isinstance(self.cache, PrefixCache):
            self.cache.distrust()
        super().drop_batch()

    # -- what a request is told

    def append(self, seq: Sequence, sampled: SampledToken) -> StepOutput:
        """Give one sequence its token."""
        output = super().append(seq, sampled)
        if output.result is None:
            return output
        return replace(output, result=_with_counts(output.result, self._counts(seq.request_id)))

    def _beam_result(self, seq: Sequence, index: int, beam: Beam) -> Result:
        return _with_counts(super()._beam_result(seq, index, beam), self._counts(seq.request_id))

    def abort(self, request_id: int, index: int | None = None) -> list[Result]:
        """Drop a request or one of its samples, and return what it had."""
        counts = self._counts(request_id)
        return [_with_counts(result, counts) for result in super().abort(request_id, index)]

    def _counts(self, request_id: int) -> dict[str, int]:
        """Return what a request has had of the cache so far."""
        group = self.group_of(request_id)
        return {name: getattr(group, name, 0) for name in ("num_hit_tokens", "num_evictions")}

    def group_of(self, request_id: int) -> Group | None:
        """Return the scheduler's record of a request, None where it has none any more."""
        return self.scheduler.groups.get(request_id)

    def stats(self) -> dict[str, int]:
        """Return the counters of the cache, and how often a shared beginning was read once for several rows."""
        counters = super().stats() | {"shared_prefix_launches": self.num_shared_launches}
        if isinstance(self.cache, PrefixCache):
            pool = self.cache.pool
            counters |= {
                "cached_blocks": pool.num_cached,
                "hit_tokens": self.cache.num_hit_tokens,
                "evictions": pool.num_evictions,
            }
        return counters


def _with_counts(result: Result, counts: dict[str, int]) -> Result:
    """Return a result that also says what its request had of the cache."""
    return (
        result
        if isinstance(result.metrics, Metrics)
        else replace(result, metrics=Metrics(**vars(result.metrics), **counts))
    )
