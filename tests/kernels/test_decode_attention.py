"""Attention of one token per sequence, over blocks and over dense rows: right, guarded, and the same in any company."""

import pytest
import torch

from minipaged.cases import ATTENTION_CASES, AttentionCase, PagedInputs, make_paged_inputs
from minipaged.cases_ops import CUT_LENGTHS, PIECE_CASES
from minipaged.contiguous.ops import contiguous_attention
from minipaged.paged import reference
from minipaged.paged.ops import paged_attention
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    ON_DEVICE,
    assert_agrees,
    exact_attention,
    guarded_outputs,
    run_kernel,
)

pytest.importorskip("triton")
pytestmark = ON_DEVICE


def paged(inputs: PagedInputs, case: AttentionCase) -> torch.Tensor:
    return run_kernel(paged_attention, *inputs.args, window=case.window)


def contiguous(inputs: PagedInputs, case: AttentionCase) -> torch.Tensor:
    return run_kernel(contiguous_attention, inputs.q, *inputs.dense(), inputs.seq_lens, window=case.window)


def exact(inputs: PagedInputs, case: AttentionCase) -> torch.Tensor:
    rows = zip(inputs.q, *inputs.dense(), inputs.seq_lens.tolist(), strict=True)
    return torch.stack([exact_attention(q, k[:length], v[:length], case) for q, k, v, length in rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*ATTENTION_CASES, *PIECE_CASES], ids=str)
def test_paged_attention_agrees_with_exact_attention(case: AttentionCase, dtype: torch.dtype):
    inputs = make_paged_inputs(case, dtype, DEVICE)
    loop = reference.paged_attention(*inputs.args, scale=case.head_dim**-0.5, window=case.window)
    with guarded_outputs(case.head_dim):
        out = paged_attention(*inputs.args, window=case.window, tier="triton")
    assert_agrees(out, loop, exact(inputs, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*ATTENTION_CASES, *PIECE_CASES], ids=str)
def test_paging_changes_no_bit_of_contiguous_attention(case: AttentionCase, dtype: torch.dtype):
    inputs = make_paged_inputs(case, dtype, DEVICE)
    assert torch.equal(contiguous(inputs, case), paged(inputs, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_slots_that_no_sequence_owns_never_reach_the_output(poison: float, dtype: torch.dtype):
    case = AttentionCase("partial blocks and an empty row", (17, 0, 5, 32), window=9)
    clean = make_paged_inputs(case, dtype, DEVICE, poison=0.0)
    dirty = make_paged_inputs(case, dtype, DEVICE, poison=poison)
    for attend in (paged, contiguous):
        assert torch.equal(attend(clean, case), attend(dirty, case))
        assert not attend(dirty, case)[1].any(), "a row with no visible key gives zeros"


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("attend", [paged, contiguous])
def test_a_decoding_sequence_gives_the_same_bits_alone_and_anywhere_in_a_batch_of_64(attend, dtype: torch.dtype):
    lengths = (*(37 * i % 90 + 1 for i in range(55)), *CUT_LENGTHS)
    case = AttentionCase("batch-of-64", lengths, num_heads=2, num_kv_heads=1)
    inputs = make_paged_inputs(case, dtype, DEVICE)
    together = attend(inputs, case)
    for row in (0, 31, *range(54, 64)):
        assert torch.equal(attend(inputs.rows(row), case)[0], together[row])
    moved = [63, *range(20, 40), 0]
    assert torch.equal(attend(inputs.rows(*moved), case), together[moved])


def test_a_cut_stands_in_the_middle_of_each_group_of_lengths_that_are_tested():
    from minipaged.contiguous.kernels import num_pieces

    for below, cut, above in zip(*(CUT_LENGTHS[i::3] for i in range(3)), strict=True):
        assert num_pieces(below) == num_pieces(cut) == num_pieces(above) - 1


def test_no_window_touches_more_pieces_than_there_is_room_for():
    from minipaged.contiguous.kernels import max_pieces, num_pieces

    for window in (1, 2, 128, 129, 130, 512, 897, 1024, 1025, 1538):
        seen = [num_pieces(first + window) - num_pieces(first + 1) + 1 for first in range(4000)]
        assert max(seen) <= max_pieces(10**6, window) <= max(seen) + 1
    assert max_pieces(129, window=10**6) == max_pieces(129, window=None) == 2


def test_the_window_lets_exactly_its_newest_tokens_through():
    case = AttentionCase("window", tuple(range(1, 8)), num_heads=1, num_kv_heads=1, block_size=4, window=4)
    inputs = make_paged_inputs(case, device=DEVICE)
    # Scores are equal, and token j has the value 2 ** j: the sum of the visible values names them all.
    inputs.q.zero_()
    for row, length in enumerate(case.seq_lens):
        for token in range(length):
            inputs.v_pool[inputs.block_tables[row, token // 4], token % 4] = 2.0**token
    for attend in (paged, contiguous):
        means = attend(inputs, case)[:, 0, 0]
        visible = [min(length, 4) for length in case.seq_lens]
        sums = [round(mean * count) for mean, count in zip(means.tolist(), visible, strict=True)]
        assert sums == [0b1, 0b11, 0b111, 0b1111, 0b11110, 0b111100, 0b1111000]


def test_blocks_behind_the_window_may_be_gone_from_the_table():
    case = AttentionCase("freed", (30,), block_size=4, window=5)
    inputs = make_paged_inputs(case, device=DEVICE)
    whole = paged(inputs, case)
    inputs.block_tables[0, : (30 - 5) // 4] = -1
    assert torch.equal(paged(inputs, case), whole)


def test_a_batch_without_sequences_launches_nothing():
    q, k_pool, v_pool, tables, seq_lens = make_paged_inputs(AttentionCase("two", (3, 4)), device=DEVICE).args
    out = run_kernel(paged_attention, q[:0], k_pool, v_pool, tables[:0], seq_lens[:0])
    assert out.shape == (0, 4, 16)


def test_a_scale_of_the_caller_is_used():
    case = AttentionCase("one", (9,))
    inputs = make_paged_inputs(case, device=DEVICE)
    k, v = inputs.dense()
    expected = exact_attention(inputs.q[0], k[0, :9], v[0, :9], case, scale=0.7)
    out = run_kernel(paged_attention, *inputs.args, scale=0.7)
    torch.testing.assert_close(out[0].double().cpu(), expected, atol=1e-5, rtol=0)
