"""`expand_rows` as a Triton kernel: one launch in the place of some twenty."""

# Options of a launch, such as num_warps, are no parameters of the kernel.
# pyright: reportCallIssue=false

import torch
import triton
import triton.language as tl

from minipaged.foundation.kernels import wait_for_inputs
from minipaged.launch import check_indices, early_start
from minipaged.shapes import Int, Tensor


def expand_rows(
    sent: Int[Tensor, "4 N"],
    tables: Int[Tensor, "N+1 M"],
    settings: tuple[Tensor, ...],
    chosen: Int[Tensor, " N"],
    out: tuple[Tensor, ...],
    row_settings: tuple[Tensor, ...],
    size: int,
    block_size: int,
) -> None:
    """Launch `expand_rows_kernel`; see `ops.expand_rows`."""
    op = "expand_rows"
    token_ids, positions, slots, block_tables, seq_lens, output_indices = out
    check_indices(op, sent, torch.int64, sent, chosen, token_ids, positions, slots, output_indices)
    check_indices(op, sent, torch.int32, tables, block_tables, seq_lens)
    dtypes = (torch.float32, torch.int32, torch.float64, torch.float64, torch.int64)
    for dtype, *pair in zip(dtypes, settings, row_settings, strict=True):
        check_indices(op, sent, dtype, *pair)
    assert tables.shape[1] == block_tables.shape[1] and len(tables) == sent.shape[1] + 1
    if size:
        expand_rows_kernel[(size,)](
            sent, tables, *settings, chosen, *out, *row_settings, sent.shape[1], tables.shape[1],
            SLOTS=block_size, TILE=256, num_warps=2, **early_start(sent.device), enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seats", "width"])
def expand_rows_kernel(
    sent_ptr, tables_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seeds_ptr, chosen_ptr,
    token_ids_ptr, positions_ptr, slots_ptr, block_tables_ptr, seq_lens_ptr, output_indices_ptr,
    row_temperature_ptr, row_top_k_ptr, row_top_p_ptr, row_min_p_ptr, row_seeds_ptr, num_seats, width,
    SLOTS: tl.constexpr, TILE: tl.constexpr, STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """Program i makes row i: the four numbers that were sent of it say where everything else is.

    Loop invariant: the table's entries before ``start`` are copied.
    """
    wait_for_inputs(STARTS_EARLY)
    row = tl.program_id(0)
    seat = tl.load(sent_ptr + row)
    token = tl.load(sent_ptr + num_seats + row)
    position = tl.load(sent_ptr + 2 * num_seats + row)
    is_somebody = seat != num_seats
    token = tl.where(token < 0, tl.load(chosen_ptr - 1 - token, mask=token < 0, other=0), token)
    tl.store(token_ids_ptr + row, tl.maximum(token, 0))
    tl.store(positions_ptr + row, position)
    tl.store(seq_lens_ptr + row, tl.where(is_somebody, position + 1, 0).to(tl.int32))
    tl.store(output_indices_ptr + row, tl.load(sent_ptr + 3 * num_seats + row))

    own_ptr = tables_ptr + seat * width
    block_id = tl.load(own_ptr + position // SLOTS).to(tl.int64)
    tl.store(slots_ptr + row, tl.where(is_somebody, block_id * SLOTS + position % SLOTS, -1))
    out_ptr = block_tables_ptr + row.to(tl.int64) * width
    count = (position // SLOTS + 1).to(tl.int32)
    for start in range(0, count, TILE):
        place = start + tl.arange(0, TILE)
        tl.store(out_ptr + place, tl.load(own_ptr + place, mask=place < count, other=0), mask=place < count)

    tl.store(row_temperature_ptr + row, tl.load(temperature_ptr + seat))
    tl.store(row_top_k_ptr + row, tl.load(top_k_ptr + seat))
    tl.store(row_top_p_ptr + row, tl.load(top_p_ptr + seat))
    tl.store(row_min_p_ptr + row, tl.load(min_p_ptr + seat))
    tl.store(row_seeds_ptr + row, tl.load(seeds_ptr + seat))
