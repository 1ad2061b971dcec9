"""`expand_rows` in plain PyTorch."""

import torch

from minipaged.shapes import Int, Tensor

PADDING_SLOT = -1
"""Rows that stand for nobody write nowhere."""


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
    """Look everything up by seat; see `ops.expand_rows`."""
    token_ids, positions, slots, block_tables, seq_lens, output_indices = out
    seats, tokens, places, indices = sent[:, :size]
    is_somebody = seats != len(tables) - 1
    token_ids[:size] = with_chosen(tokens, chosen)
    positions[:size] = places
    own = tables[seats]
    block_tables[:size] = own
    blocks = own.gather(1, (places // block_size)[:, None])[:, 0].long()
    slots[:size] = torch.where(is_somebody, blocks * block_size + places % block_size, PADDING_SLOT)
    seq_lens[:size] = torch.where(is_somebody, places + 1, 0).int()
    output_indices[:size] = indices
    for row_setting, setting in zip(row_settings, settings, strict=True):
        row_setting[:size] = setting[seats]


def with_chosen(tokens: Int[Tensor, " T"], chosen: Int[Tensor, " N"]) -> Int[Tensor, " T"]:
    """Put chosen tokens in the places of the numbers that stand for them.

    A row that has found none goes on with token 0: its step fails when it lands, and not inside the next one.
    """
    return torch.where(tokens < 0, chosen[(-1 - tokens).clamp_(min=0)], tokens).clamp_(min=0)
