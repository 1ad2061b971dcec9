"""The tensors that a decode step of a fixed size reads, at addresses that never change: a CUDA graph needs that."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from minipaged.batching.rows import Rows
from minipaged.fast.rows.reference import PADDING_SLOT
from minipaged.prefix.scheduler import SharedRows
from minipaged.shapes import UNUSED_BLOCK, Float, Int, Tensor
from minipaged.transfer import send

MAX_SHARED_GROUPS = 8
"""Groups of rows that read their common beginning together. Each takes programs, also in a step that has fewer."""


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes that decode batches are filled up to.

    Small batches take little time, so they are fitted closely; above 16 a step reads far more than it pads.

    Example:
        >>> batch_sizes(40)
        [1, 2, 4, 8, 16, 32, 40]
    """
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    return [*sizes, *range(16, largest, 16), largest]


@dataclass(frozen=True)
class Sampling:
    """What `sample_tokens` takes beside the logits, a row for each sequence; no filter is None here."""

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    seeds: Int[Tensor, " B"]

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return all of it, in the order of `sample_tokens`."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> "Sampling":
        """Return rows of greedy sequences without filters."""
        return cls(
            temperature=torch.zeros(num_rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(num_rows, dtype=torch.int32, device=device),
            top_p=torch.ones(num_rows, dtype=torch.float64, device=device),
            min_p=torch.zeros(num_rows, dtype=torch.float64, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
        )


class DecodeInputs:
    """The rows of a decode step, up to ``num_rows`` of them.

    Args:
        num_rows: The largest batch.
        width: Entries of a block table.

    Invariants:
        Rows behind those of a batch have length 0 and no slot: attention gives them zeros, and they write nowhere.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.slots = torch.full((num_rows,), PADDING_SLOT, dtype=torch.int64, device=device)
        self.block_tables = torch.full((num_rows, width), UNUSED_BLOCK, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.query_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        # Who reads together: where the groups begin and end, and behind that what they share. One more group has all
        # other rows.
        self._groups = torch.zeros(2 * MAX_SHARED_GROUPS + 3, dtype=torch.int32, device=device)
        self.groups = self._groups[: MAX_SHARED_GROUPS + 2], self._groups[MAX_SHARED_GROUPS + 2 :]

    def set_groups(self, shared: list[SharedRows], size: int) -> None:
        """Say which rows at the front read their common beginning together; all up to ``size`` others read alone.

        Example:
            With room for 8 groups: rows 0 to 2 share 1,024 tokens, 3 and 4 share 2,048, and 3 rows share nothing.

            >>> inputs = DecodeInputs(8, 4, torch.device("cpu"))
            >>> inputs.set_groups([SharedRows(3, 1024), SharedRows(2, 2048)], 8)
            >>> [part.tolist() for part in inputs.groups]
            [[0, 3, 5, 8, 8, 8, 8, 8, 8, 8], [1024, 2048, 0, 0, 0, 0, 0, 0, 0]]
        """
        starts = [0, *itertools.accumulate(group.num_rows for group in shared)]
        lengths = [group.num_tokens for group in shared]
        unused = MAX_SHARED_GROUPS + 1 - len(shared)
        numbers = starts + [size] * unused + lengths + [0] * unused
        self._groups.copy_(send(numbers, torch.int32, self._groups.device))

    @contextmanager
    def without_groups(self) -> Iterator[None]:
        """Let no row share anything for a while. No group has a row then either, so the results mean nothing."""
        groups = self._groups.clone()
        self._groups.zero_()
        try:
            yield
        finally:
            self._groups.copy_(groups)

    def rows(self, size: int) -> Rows:
        """Return the first rows, as views."""
        return Rows(
            token_ids=self.token_ids[:size],
            positions=self.positions[:size],
            slots=self.slots[:size],
            logits_at=None,
            block_tables=self.block_tables[:size],
            query_starts=self.query_starts[: size + 1],
            seq_lens=self.seq_lens[:size],
            max_query_len=1,
        )

    def fill(self, rows: Rows, size: int) -> None:
        """Copy a batch of decode rows to the front and fill up with rows of nobody."""
        num_rows, width = rows.block_tables.shape
        self.block_tables[:num_rows, :width] = rows.block_tables
        empty = {"token_ids": 0, "positions": 0, "slots": PADDING_SLOT, "seq_lens": 0}
        for name, nothing in empty.items():
            getattr(self, name)[:num_rows] = getattr(rows, name)
            getattr(self, name)[num_rows:size] = nothing
