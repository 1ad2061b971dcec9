"""A block pool that remembers what its unused blocks hold."""

from collections.abc import Callable, Iterable

from minipaged.errors import AccountingError
from minipaged.prefix.eviction import EvictionPolicy
from minipaged.sharing.ref_pool import RefCountedBlockPool
from minipaged.tiers import declare_part

declare_part(
    "caching_block_pool", "class with the methods of CachingBlockPool; read when an LLM with a prefix cache is made"
)


class CachingBlockPool(RefCountedBlockPool):
    """A block pool in which a block may be free and still worth something.

    Changes of rung 3: a block can be marked as cached. When the last user of a cached block leaves, the block is not
    queued but handed to the eviction policy. It counts as free all the same: it is taken when the queue is empty, and
    then its content is forgotten. Until then `share` brings it back with its content.

    Args:
        policy: Orders the cached blocks that nobody uses.
        forget: Called with a block that is evicted; returns every block that is not worth keeping any more because
            of that, the block itself among them.

    Invariants:
        A block is in use (it has references), or queued, or with the policy. Only cached blocks are with the policy.
        Those count in ``num_free``, but `is_free` and ``free_block_ids`` know the queue alone.

    Example:
        >>> from minipaged.prefix.eviction import LRU
        >>> pool = CachingBlockPool(num_blocks=2, block_size=4, policy=LRU(), forget=lambda block_id: [block_id])
        >>> block_id = pool.allocate()
        >>> pool.mark_cached(block_id)
        >>> pool.free(block_id)
        >>> pool.num_free, pool.num_idle
        (2, 1)
        >>> pool.allocate(), pool.allocate(), pool.num_evictions
        (1, 0, 1)
    """

    def __init__(
        self, num_blocks: int, block_size: int, policy: EvictionPolicy, forget: Callable[[int], Iterable[int]]
    ):
        super().__init__(num_blocks, block_size)
        self.policy = policy
        self.num_evictions = 0
        self._forget = forget
        self._is_cached = bytearray(num_blocks)
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        """Return how many blocks can be allocated: those that are queued and those that can be evicted."""
        return len(self._free) + len(self.policy)

    @property
    def num_idle(self) -> int:
        """Return how many cached blocks nobody uses."""
        return len(self.policy)

    def is_cached(self, block_id: int) -> bool:
        """Return whether the block's content can be found again."""
        return bool(self._is_cached[block_id])

    def is_idle(self, block_id: int) -> bool:
        """Return whether nobody uses the block, but its content can be found again."""
        return self.is_cached(block_id) and not self.num_references(block_id)

    def mark_cached(self, block_id: int) -> None:
        """Note that the content of a block in use can be found."""
        assert self.num_references(block_id) and not self._is_cached[block_id]
        self._is_cached[block_id] = True
        self.num_cached += 1

    def unmark_cached(self, block_id: int) -> None:
        """Note that nobody will look for the block's content any more."""
        self._unmark(block_id, is_with_policy=self.num_references(block_id) == 0)

    def _unmark(self, block_id: int, is_with_policy: bool) -> None:
        assert self._is_cached[block_id]
        self._is_cached[block_id] = False
        self.num_cached -= 1
        if is_with_policy:
            self.policy.remove(block_id)
        if self.num_references(block_id) == 0:
            self._is_free[block_id] = True
            self._free.append(block_id)

    def allocate(self) -> int:
        """Take a queued block; where there is none, evict one first."""
        if not self._free and len(self.policy):
            evicted = self.policy.evict()
            for gone in self._forget(evicted):
                self.num_evictions += 1
                self._unmark(gone, is_with_policy=gone != evicted and not self.num_references(gone))
        return super().allocate()

    def touch(self, block_id: int) -> None:
        """Let an idle block count as one that has just lost its last user."""
        if self.is_idle(block_id):
            self.policy.remove(block_id)
            self.policy.add(block_id)

    def share(self, block_id: int) -> None:
        """Add a reference; a cached block that nobody uses comes back into use."""
        self._check_id(block_id)
        if self._is_cached[block_id] and self.num_references(block_id) == 0:
            self.policy.remove(block_id)
            self._num_references[block_id] = 1
        else:
            super().share(block_id)

    def free(self, block_id: int) -> None:
        """Take a reference away; with the last one a cached block goes to the policy and any other to the queue."""
        self._check_id(block_id)
        if not self._is_cached[block_id] or self._num_references[block_id] > 1:
            super().free(block_id)
        elif self._num_references[block_id] == 0:
            raise AccountingError(f"block {block_id} is freed a second time")
        else:
            self._num_references[block_id] = 0
            self.policy.add(block_id)

    def check(self) -> None:
        """Assert the invariants."""
        assert len(set(self._free)) == len(self._free), "a block stands twice in the free queue"
        assert sum(self._is_free) == len(self._free) and all(self._is_free[block_id] for block_id in self._free)
        num_idle = 0
        for block_id, count in enumerate(self._num_references):
            is_idle = count == 0 and not self._is_free[block_id]
            assert count >= 0 and not (count and self._is_free[block_id]), f"block {block_id} is free and in use"
            assert self._is_cached[block_id] or not is_idle, f"block {block_id} is lost"
            assert not (self._is_cached[block_id] and self._is_free[block_id]), f"block {block_id} is queued and cached"
            num_idle += is_idle
        assert num_idle == len(self.policy) and sum(self._is_cached) == self.num_cached
