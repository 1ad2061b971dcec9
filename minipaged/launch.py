"""What the launchers of all kernels share: the checks of their arguments and the tile sizes.

A tile is the piece of a tensor that one program holds at a time. Tile sizes are chosen from a table, not tried out
while the program runs: trying out would make the first calls slow and cannot happen inside a CUDA graph.
"""

import os
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from minipaged.errors import UserError
from minipaged.shapes import Tensor

LOG2_E = 1.4426950408889634
"""Kernels compute ``exp2(x * LOG2_E)`` for ``exp(x)``: GPUs have an instruction for powers of two only."""

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
"""With larger heads the running sums of one tile no longer fit in the registers."""


@dataclass(frozen=True)
class Tiles:
    """How an attention kernel is cut: rows of queries, keys per step, warps per program, steps in flight.

    ``max_registers`` of a thread are allowed; None leaves the number to the assembler, which likes to spill a few of
    them to memory where that lets one program more share a processor.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the launch."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


# The tables go by head size: a row serves sizes up to its key. Two things limit a tile. Shared memory: a stage holds
# one tile of K and one of V, 2 x keys x head_dim x bytes, 32 KB for 64 keys of 128 half-precision entries. Registers:
# the running sums, queries x head_dim in fp32, stay in them all the time. More queries per tile read K and V less
# often; in decode there are few, and all is about having enough reads in flight: at heads of 128, four small programs
# on a processor, of two warps and three stages each, beat fewer with more stages.
DECODE_TILES = {64: Tiles(16, 64, 4, 3, 168), 128: Tiles(16, 32, 2, 3), 256: Tiles(16, 32, 8, 3, 128)}
# Where several programs share a row: as many keys, since these decide the bits. Left alone, the assembler arranges
# this kernel so that a lone row of 1,024 tokens takes half as long again.
SPLIT_TILES = {64: Tiles(16, 64, 4, 3, 168), 128: Tiles(16, 32, 2, 3, 192), 256: Tiles(16, 32, 8, 3, 128)}
PREFILL_TILES = {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 32, 8, 3), 256: Tiles(64, 16, 8, 2)}
# From 9.0 on, the data-centre GPUs multiply matrices straight out of shared memory, of which they have 227 KB for a
# program. All others bring the operands into registers first, and may have no more than 99 KB.
PREFILL_TILES_FROM_9_0 = {64: Tiles(128, 64, 8, 3), 128: Tiles(64, 64, 4, 3), 256: Tiles(64, 32, 8, 2)}
# A shared prefix has as many rows as there are heads and sequences, and the keys of DECODE_TILES: see `prefix_tiles`.
PREFIX_TILES = {64: Tiles(128, 64, 8, 3), 128: Tiles(64, 32, 4, 3), 256: Tiles(64, 32, 8, 2)}
# fp32 is there to check the rest: matrix units do not multiply it exactly, so ordinary ones do, from small tiles.
DECODE_TILES_FP32 = Tiles(16, 32, 4, 1)
PREFILL_TILES_FP32 = Tiles(32, 32, 4, 1)

FEW_PROGRAMS = 2 * 132
"""Fewer programs than this leave processors of a large GPU idle: an H100 has 132, and each has room for some."""

PROGRAMS_AT_ONCE = 4 * 132
"""So many programs of decode such a GPU runs at the same time; more wait until one of these has ended."""


def prefill_tiles(q: Tensor) -> Tiles:
    """Return the tiles for attention of many query tokens. They depend on nothing but device, dtype and head size.

    Invariants:
        Not on lengths or the number of sequences: tile edges decide in which order numbers are added, so a token's
        bits would change with its neighbours.
    """
    if q.dtype == torch.float32:
        return PREFILL_TILES_FP32
    is_large = (9, 0) <= compute_capability(q.device) < (12, 0)
    return _for_head_dim(PREFILL_TILES_FROM_9_0 if is_large else PREFILL_TILES, q)


def heads_per_tile(tiles: Tiles, group: int) -> int:
    """Return how many query heads lie side by side in a tile of query tokens: the group of a KV head, or one.

    A short prompt fills a tile better with the heads of a group side by side. A large group that divides the tile
    badly would waste rows instead.
    """
    return group if group <= tiles.queries // 2 else 1


def decode_tiles(q: Tensor, group: int) -> Tiles:
    """Return the tiles for one query token per sequence, whose ``group`` heads of a KV head are the rows of a tile.

    Matrix instructions want at least 16 rows. The invariant is that of `prefill_tiles`.
    """
    return _decode_tiles(DECODE_TILES, q, group)


def split_tiles(q: Tensor, group: int) -> Tiles:
    """Return the tiles for decode where several programs share a row: the keys and rows of `decode_tiles`.

    The number of registers is given, not left to the assembler, so any decode kernel may take them.
    """
    return _decode_tiles(SPLIT_TILES, q, group)


def _decode_tiles(table: dict[int, Tiles], q: Tensor, group: int) -> Tiles:
    tiles = DECODE_TILES_FP32 if q.dtype == torch.float32 else _for_head_dim(table, q)
    rows = padded(group, minimum=tiles.queries)
    if rows > tiles.queries:  # sums for more rows need more registers, and then more threads, to hold them
        tiles = replace(tiles, num_warps=8 if rows > 32 else tiles.num_warps, max_registers=255)
    return replace(tiles, queries=rows)


def prefix_tiles(q: Tensor, group: int) -> Tiles:
    """Return the tiles for a prefix that many sequences share: the heads of a KV head of several sequences are rows.

    Invariants:
        As many keys as `decode_tiles`, so that the same numbers are added in the same order. The rest may differ.
    """
    if q.dtype == torch.float32:
        return decode_tiles(q, group)
    tiles = _for_head_dim(PREFIX_TILES, q)
    return replace(tiles, queries=padded(group, minimum=tiles.queries))


def programs_per_row(num_rows: int, num_pieces: int) -> int:
    """Return how many programs share a decode row of one KV head. If more than one, its pieces are folded afterwards.

    | rows | sequences at 8 KV heads | programs per row |
    |---|---|---|
    | fewer than FEW_PROGRAMS | 1 to 32 | as many as there are pieces, or as run at once: 66 to 2 |
    | a few more than run at once | 67 to 90 | 8: small programs, so that the last ones keep nobody waiting long |
    | all others | | 1: there is enough to do, and nothing to fold |

    Args:
        num_rows: Pairs of sequence and KV head.
        num_pieces: Pieces of a sequence that fills its block table.

    Invariants:
        Known from shapes alone, so a CUDA graph can hold it. The bits are the same for every number.

    Example:
        >>> [programs_per_row(8 * num_seqs, num_pieces=70) for num_seqs in (1, 32, 33, 67, 91, 256)]
        [66, 2, 1, 8, 1, 1]
    """
    if num_rows < FEW_PROGRAMS:
        return max(1, min(num_pieces, PROGRAMS_AT_ONCE // num_rows))
    is_little_more = PROGRAMS_AT_ONCE < num_rows < PROGRAMS_AT_ONCE * 11 // 8
    return min(num_pieces, 8) if is_little_more else 1


def _for_head_dim(table: dict[int, Tiles], q: Tensor) -> Tiles:
    return next(tiles for limit, tiles in table.items() if q.shape[-1] <= limit)


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability. The interpreter on a CPU takes the tiles of a 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which reads this variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


CAN_START_EARLY = True
"""False starts no launch early: a bench does that to see what it is worth."""


def early_start(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch whose kernel calls `foundation.kernels.wait_for_inputs`.

    On GPUs from 9.0 on, programs of such a launch may begin while the last ones of the launch before it are still at
    work, and wait for its end only then (programmatic dependent launch). At a few microseconds per launch, a third of
    the time is otherwise the gap between two of them.
    """
    starts_early = CAN_START_EARLY and compute_capability(device) >= (9, 0) and not is_interpreted()
    return {"STARTS_EARLY": True, "launch_pdl": True} if starts_early else {"STARTS_EARLY": False}


def check_tensors(op: str, first: Tensor, *others: Tensor) -> None:
    """Check what every kernel takes for granted: one device, one dtype, no gaps between rows.

    Raises:
        UserError: The tensors are where kernels cannot run, or of a dtype that they cannot compute in.
    """
    if first.device.type != "cuda" and not is_interpreted():
        raise UserError(f"{op}: kernels need a CUDA device, not {first.device.type}; or set TRITON_INTERPRET=1")
    if first.dtype not in KERNEL_DTYPES:
        raise UserError(f"{op}: kernels compute in float32, float16 and bfloat16, not {first.dtype}")
    if first.dtype == torch.bfloat16 and is_interpreted():  # its dots would multiply the bits as if they were integers
        raise UserError(f"{op}: Triton's interpreter computes bfloat16 wrongly; use float32 or float16")
    for tensor in (first, *others):
        assert tensor.is_contiguous(), f"{op}: every tensor must be contiguous"
        assert tensor.device == first.device, f"{op}: every tensor must be on {first.device}"
        assert tensor.dtype == first.dtype, f"{op}: every tensor must be {first.dtype}"


def check_indices(op: str, like: Tensor, dtype: torch.dtype, *tensors: Tensor) -> None:
    """Check tensors of lengths, ids or slots: a kernel would read another integer type as nonsense."""
    for tensor in tensors:
        assert tensor.dtype == dtype, f"{op}: indices must be {dtype}, not {tensor.dtype}"
        assert tensor.is_contiguous() and tensor.device == like.device, f"{op}: indices must lie like the rest"


def check_heads(op: str, q: Tensor, k: Tensor) -> None:
    """Check the heads of attention: a whole group of query heads per KV head, and a head size that fits."""
    assert q.shape[-2] % k.shape[-2] == 0 and q.shape[-1] == k.shape[-1], (q.shape, k.shape)
    if q.shape[-1] > MAX_HEAD_DIM:
        raise UserError(f"{op}: head_dim {q.shape[-1]} is too large for the kernels, which take up to {MAX_HEAD_DIM}")


def padded(size: int, minimum: int = 1) -> int:
    """Return the power of two that holds ``size``: every axis of a Triton tile is one.

    Example:
        >>> padded(80), padded(7, minimum=16)
        (128, 16)
    """
    return max(minimum, 1 << (size - 1).bit_length())
