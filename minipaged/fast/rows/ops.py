"""What the rows of a decode step are made of, as an operation on resident tensors."""

from minipaged.fast.rows import reference
from minipaged.shapes import Float, Int, Tensor
from minipaged.tiers import Tier, run_op

Settings = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""temperature (fp32), top_k (int32), top_p, min_p (fp64) and seeds (int64), a row for each sequence."""


def expand_rows(
    sent: Int[Tensor, "4 N"],
    tables: Int[Tensor, "N+1 M"],
    temperature: Float[Tensor, " N+1"],
    top_k: Int[Tensor, " N+1"],
    top_p: Float[Tensor, " N+1"],
    min_p: Float[Tensor, " N+1"],
    seeds: Int[Tensor, " N+1"],
    chosen: Int[Tensor, " N"],
    token_ids: Int[Tensor, " N"],
    positions: Int[Tensor, " N"],
    slots: Int[Tensor, " N"],
    block_tables: Int[Tensor, "N M"],
    seq_lens: Int[Tensor, " N"],
    output_indices: Int[Tensor, " N"],
    row_temperature: Float[Tensor, " N"],
    row_top_k: Int[Tensor, " N"],
    row_top_p: Float[Tensor, " N"],
    row_min_p: Float[Tensor, " N"],
    row_seeds: Int[Tensor, " N"],
    *,
    size: int,
    block_size: int,
    tier: Tier = None,
) -> None:
    """Make the first ``size`` rows of a decode step from what was sent, in place.

    Args:
        sent: Seat, token, position and output index of each row, int64. A negative token ``-1 - i`` is the i-th of
            ``chosen``; one that is negative too has not been found, and 0 takes its place. The last seat is nobody's.
        tables: The block table of each seat, int32.
        temperature: Of each seat, as all to ``seeds``: what `sample_tokens` takes.
        chosen: The tokens that the step before has chosen.
        token_ids: Written, as all that follow: here the token of each row.
        positions: Its place in its sequence.
        slots: Where its key and value go; -1 for nobody's rows.
        block_tables: The row's block table, as far as the position; behind that it stays as it was.
        seq_lens: Tokens of the sequence with this one, int32; 0 for nobody's rows.
        output_indices: As sent.
        row_temperature: The settings of the row's seat, as all to ``row_seeds``.

    Invariants:
        Nothing depends on what the host knows when this is called, so a CUDA graph can hold it.

    Example:
        Blocks of 4. The sequence in seat 1 has 5 tokens and blocks 7 and 2; its newest token was just chosen as 42.

        >>> import torch
        >>> def rows(dtype, n=2): return torch.zeros(n, dtype=dtype)
        >>> f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
        >>> sent = torch.tensor([[1, 2], [-1, 0], [4, 0], [3, 0]])
        >>> tables = torch.tensor([[0, 0], [7, 2], [-1, -1]]).int()
        >>> settings = [rows(dtype, 3) for dtype in (f32, i32, f64, f64, i64)]
        >>> out = [rows(dtype) for dtype in (i64, i64, i64)] + [torch.zeros(2, 2).int(), rows(i32), rows(i64)]
        >>> of_rows = [rows(dtype) for dtype in (f32, i32, f64, f64, i64)]
        >>> expand_rows(sent, tables, *settings, torch.tensor([42, 0]), *out, *of_rows, size=2, block_size=4)
        >>> out[0].tolist(), out[2].tolist(), out[4].tolist()
        ([42, 0], [8, -1], [5, 0])
    """
    settings = (temperature, top_k, top_p, min_p, seeds)
    row_settings = (row_temperature, row_top_k, row_top_p, row_min_p, row_seeds)
    run_op(
        "expand_rows",
        tier,
        sent.device,
        reference.expand_rows,
        "minipaged.fast.rows.kernels:expand_rows",
        sent,
        tables,
        settings,
        chosen,
        (token_ids, positions, slots, block_tables, seq_lens, output_indices),
        row_settings,
        size,
        block_size,
    )
