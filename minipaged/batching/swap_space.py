"""Where the blocks of a swapped request wait: CPU memory, taken when they come and given back when they leave."""

from pathlib import Path

import torch

from minipaged.batching.ops import gather_blocks, scatter_blocks
from minipaged.batching.plan import Swap
from minipaged.batching.preemption import Policy, Preemption
from minipaged.foundation.model import DecoderModel
from minipaged.shapes import Float, Tensor
from minipaged.tiers import Tier
from minipaged.transfer import send

# What "auto" weighs, as orders of magnitude: which of the two is quicker rarely hangs on a factor of two.
FLOPS = {"cuda": 4e14, "cpu": 1e11}
"""Multiplications and additions a second in a prefill: a data-centre GPU in 16 bits, a few CPU cores."""
BYTES_PER_SECOND = {"cuda": 50e9, "cpu": 5e9}
"""Over the bus to a GPU; within the memory of a CPU."""


class SwapSpace:
    """Hold the blocks of swapped requests.

    Args:
        kv: The memory of the cache, whose blocks come and go.
        tier: Which implementation moves them.

    Invariants:
        A request's blocks lie in the order of the places that `BatchingCache.swap_out` gave them. They come back
        bit for bit.
    """

    def __init__(self, kv: Float[Tensor, "layers 2 N S K D"], tier: Tier):
        self.kv = kv
        self.tier: Tier = tier
        self._staging: dict[int, Tensor] = {}  # by request, [layers, 2, P, S, K, D]
        self._leaving: list[tuple[torch.cuda.Event, Tensor]] = []  # memory that a kernel may still read or write

    def holds(self, request_id: int) -> bool:
        """Return whether the request's blocks are here."""
        return request_id in self._staging

    def take(self, swap: Swap) -> None:
        """Copy a request's blocks out of the cache, for all layers in one launch."""
        shape = (*self.kv.shape[:2], len(swap.pairs), *self.kv.shape[3:])
        staging = torch.empty(shape, dtype=self.kv.dtype, pin_memory=self.kv.is_cuda)  # a kernel can write there
        gather_blocks(self.kv, self._ids(swap), staging, tier=self.tier)
        self._staging[swap.request_id] = staging

    def bring_back(self, swap: Swap) -> None:
        """Copy a request's blocks back into the cache, to where they are wanted now."""
        staging = self._staging.pop(swap.request_id)
        places = [place for place, _ in swap.pairs]
        if places != list(range(staging.shape[2])):  # a sample was aborted meanwhile
            self._wait_for_kernels()
            chosen = staging.index_select(2, torch.tensor(places, dtype=torch.int64))
            staging = chosen.pin_memory() if self.kv.is_cuda else chosen
        scatter_blocks(self.kv, self._ids(swap), staging, tier=self.tier)
        self._let_go(staging)

    def drop(self, request_id: int) -> None:
        """Forget a request's blocks, if they are here."""
        if request_id in self._staging:
            self._let_go(self._staging.pop(request_id))

    def _let_go(self, staging: Tensor) -> None:
        """Keep memory until the kernels that were started have ended: PyTorch does not know that they use it."""
        self._leaving = [(event, each) for event, each in self._leaving if not event.query()]
        if self.kv.is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._leaving.append((event, staging))

    def preemption(self, policy: Policy, model: DecoderModel) -> Preemption:
        """Return the policy, with what moving and computing cost here and how much this space may hold.

        Computing a token takes two operations per weight. A block moves twice, out and in. The space may grow to the
        size of the cache, but not beyond a quarter of the memory that is free now: pinned memory comes in powers of
        two, so it may take up to twice as much.
        """
        num_blocks = self.kv.shape[2]
        block_bytes = self.kv.nbytes // num_blocks
        kind = self.kv.device.type
        free_bytes = _free_bytes()
        most = num_blocks if free_bytes is None else min(num_blocks, free_bytes // 4 // block_bytes)
        num_weights = sum(weight.numel() for weight in model.weights.values())
        return Preemption(
            policy,
            seconds_per_token=2 * num_weights / FLOPS.get(kind, FLOPS["cpu"]),
            seconds_per_block=2 * block_bytes / BYTES_PER_SECOND.get(kind, BYTES_PER_SECOND["cpu"]),
            max_swapped_blocks=most,
        )

    def _ids(self, swap: Swap) -> Tensor:
        ids = [block_id for _, block_id in swap.pairs]
        return send(ids, torch.int64, self.kv.device)

    def _wait_for_kernels(self) -> None:
        if self.kv.is_cuda:
            torch.cuda.synchronize(self.kv.device)


def _free_bytes() -> int | None:
    """Return the memory that this process may still take, None where the system does not tell."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    free = int(next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:")).split()[1]) * 1024
    try:  # a container may have less than its machine
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return free if limit == "max" else min(free, max(0, int(limit) - int(used)))
