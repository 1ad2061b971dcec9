"""Attention of mixed prefill and decode rows: right, guarded, and the same bits in any company and any chunking."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from minipaged.batching import kernels, reference
from minipaged.batching.ops import ragged_paged_attention
from minipaged.cases_batching import (
    RAGGED_CASES,
    RAGGED_PIECE_CASES,
    RaggedCase,
    RaggedInputs,
    make_ragged_inputs,
    prompt_case,
)
from minipaged.cases_ops import COARSE_CUT, CUT_LENGTHS, FIRST_CUT, NEXT_CUT
from minipaged.foundation.ops import causal_attention
from minipaged.launch import PROGRAMS_AT_ONCE, programs_per_row
from minipaged.paged.ops import paged_attention
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    HAS_GPU,
    ON_DEVICE,
    assert_agrees,
    exact_attention,
    guarded_outputs,
    run_kernel,
)

pytestmark = ON_DEVICE

ALL_CASES = [*RAGGED_CASES, *RAGGED_PIECE_CASES]
SMALL = RaggedCase("small", (), num_heads=2, num_kv_heads=1)


def attend(inputs: RaggedInputs, window: int | None = None) -> torch.Tensor:
    return run_kernel(ragged_paged_attention, *inputs.args, window=window)[: inputs.query_starts[-1]]


def exact(inputs: RaggedInputs, case: RaggedCase) -> torch.Tensor:
    out = torch.zeros(inputs.q.shape, dtype=torch.float64)
    for row, (keys, values) in enumerate(zip(*inputs.dense(), strict=True)):
        own = inputs.queries(row)
        for token in range(own.start, own.stop):
            length = case.seq_lens[row] - own.stop + token + 1
            out[token] = exact_attention(inputs.q[token], keys[:length], values[:length], case)
    return out[: inputs.query_starts[-1]]


@contextmanager
def splitting(num_programs: int) -> Iterator[None]:
    """Let so many programs share the pieces of a decode row, whatever the launch rule says."""
    with patch.object(kernels, "programs_per_row", lambda num_rows, num_pieces: num_programs):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_ragged_paged_attention_agrees_with_exact_attention(case: RaggedCase, dtype: torch.dtype):
    inputs = make_ragged_inputs(case, dtype, DEVICE)
    loop = reference.ragged_paged_attention(*inputs.args, scale=case.head_dim**-0.5, window=case.window)
    with guarded_outputs(case.head_dim):
        out = ragged_paged_attention(*inputs.args, window=case.window, tier="triton")
    num_queries = sum(case.num_queries)
    assert_agrees(out[:num_queries], loop[:num_queries], exact(inputs, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in ALL_CASES if 1 in case.num_queries], ids=str)
def test_a_decode_row_has_the_bits_of_paged_attention(case: RaggedCase, dtype: torch.dtype):
    inputs = make_ragged_inputs(case, dtype, DEVICE)
    rows = inputs.rows(*(row for row, count in enumerate(case.num_queries) if count == 1))
    q, k_pool, v_pool, tables, _, seq_lens = rows.args
    decoded = run_kernel(paged_attention, q, k_pool, v_pool, tables, seq_lens, window=case.window)
    assert torch.equal(attend(rows, case.window), decoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
def test_a_whole_prompt_has_the_bits_of_causal_attention(window: int | None, dtype: torch.dtype):
    case = replace(SMALL, seq_lens=(150, 2, 40), num_queries=(150, 2, 40))
    inputs = make_ragged_inputs(case, dtype, DEVICE)
    dense = inputs.dense()
    k, v = (torch.cat([rows[b, :length] for b, length in enumerate(case.seq_lens)]) for rows in dense)
    whole = run_kernel(causal_attention, inputs.q, k, v, inputs.query_starts, window=window)
    assert torch.equal(attend(inputs, window), whole)


def chunk_sizes(length: int) -> list[list[int]]:
    """Return ways to cut a prompt into pieces of two or more tokens: even ones, odd ones, and across tile edges."""
    cuts = []
    for size in (2, 3, 16, 33, 64, 65):
        pieces = [size] * (length // size)
        pieces[-1] += length % size
        cuts.append(pieces)
    return [*cuts, [2, length - 4, 2], [length // 2, 3, length - length // 2 - 3]]


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("cut", range(8))
def test_any_chunking_of_a_prompt_gives_the_same_bits(cut: int, window: int | None, dtype: torch.dtype):
    length = 700 if HAS_GPU else 140
    inputs = make_ragged_inputs(prompt_case(length, replace(SMALL, block_size=5)), dtype, DEVICE)
    whole = attend(inputs, window)
    begin = 0
    for size in chunk_sizes(length)[cut]:
        chunk = inputs.chunk(begin, begin + size, window)
        assert torch.equal(attend(chunk, window), whole[begin : begin + size]), (begin, size)
        begin += size
    assert begin == length


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cut", [FIRST_CUT, COARSE_CUT, NEXT_CUT], ids=str)
def test_chunks_that_meet_at_a_cut_of_decode_have_the_bits_of_one_chunk(cut: tuple[int, ...], dtype: torch.dtype):
    begin, end = cut[0] - 2, cut[-1] + 2
    inputs = make_ragged_inputs(prompt_case(end, replace(SMALL, block_size=5)), dtype, DEVICE)
    whole = attend(inputs.chunk(begin, end))
    for middle in cut:
        parts = [attend(inputs.chunk(*part)) for part in ((begin, middle), (middle, end))]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 21])
def test_a_sequence_gives_the_same_bits_alone_and_anywhere_in_a_batch_of_64(window: int | None, dtype: torch.dtype):
    scale = 10 if HAS_GPU else 1
    lengths = (*((29 * i % 31 + 4) * scale for i in range(55)), *CUT_LENGTHS)
    counts = (*((1, 2, 3, 1, length)[i % 5] for i, length in enumerate(lengths[:55])), *(1 for _ in CUT_LENGTHS))
    case = replace(SMALL, seq_lens=lengths, num_queries=counts, window=window)
    inputs = make_ragged_inputs(case, dtype, DEVICE)
    together = attend(inputs, window)
    for row in (0, 1, 2, 4, 31, *range(54, 64)):
        assert torch.equal(attend(inputs.rows(row), window), together[inputs.queries(row)])
    moved = [63, 9, 1, 7, 0]
    expected = torch.cat([together[inputs.queries(row)] for row in moved])
    assert torch.equal(attend(inputs.rows(*moved), window), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", RAGGED_PIECE_CASES, ids=str)
def test_any_number_of_programs_for_a_row_gives_the_same_bits(case: RaggedCase, dtype: torch.dtype):
    inputs = make_ragged_inputs(case, dtype, DEVICE)
    with splitting(1):
        expected = attend(inputs, case.window)
    for num_programs in (2, 3, 9):
        with splitting(num_programs):
            assert torch.equal(attend(inputs, case.window), expected)


def test_several_programs_share_a_row_if_rows_are_few_or_the_last_ones_would_run_alone():
    assert programs_per_row(num_rows=8, num_pieces=2) == 2
    assert programs_per_row(num_rows=8, num_pieces=1) == 1
    assert programs_per_row(num_rows=8, num_pieces=10**4) == PROGRAMS_AT_ONCE // 8
    assert programs_per_row(num_rows=PROGRAMS_AT_ONCE, num_pieces=32) == 1
    assert programs_per_row(num_rows=PROGRAMS_AT_ONCE + 1, num_pieces=32) == 8
    assert programs_per_row(num_rows=PROGRAMS_AT_ONCE + 1, num_pieces=1) == 1
    assert programs_per_row(num_rows=2 * PROGRAMS_AT_ONCE, num_pieces=32) == 1


@pytest.mark.parametrize("num_programs", [1, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_slots_that_no_sequence_owns_never_reach_the_output(poison: float, num_programs: int):
    case = RaggedCase("poison", (45, 0, 30, 17, 9), block_size=4, window=9, num_queries=(20, 0, 1, 2, 9))
    clean, dirty = (make_ragged_inputs(case, torch.float16, DEVICE, poison=fill) for fill in (0.0, poison))
    with splitting(num_programs):
        assert torch.equal(attend(clean, case.window), attend(dirty, case.window))


@pytest.mark.parametrize("num_programs", [1, 2])
def test_what_stands_beside_a_sequence_without_queries_does_not_matter(num_programs: int):
    inputs = make_ragged_inputs(RaggedCase("idle", (20, 9, 7), num_queries=(4, 0, 1)), device=DEVICE)
    with splitting(num_programs):
        expected = attend(inputs)
        inputs.block_tables[1] = -1
        for seq_len in (0, 10**6, -3):
            inputs.seq_lens[1] = seq_len
            assert torch.equal(attend(inputs), expected)


@pytest.mark.parametrize("chunk_size", [7, 3, 1])
def test_a_window_of_4_over_7_tokens_shows_1_2_3_4_4_4_4_keys(chunk_size: int):
    inputs = make_ragged_inputs(prompt_case(7, replace(SMALL, block_size=4)), device=DEVICE)
    # Scores are equal, and token j has the value 2 ** j: the sum of the visible values names them all.
    inputs.q.zero_()
    for token in range(7):
        inputs.v_pool[inputs.block_tables[0, token // 4], token % 4] = 2.0**token
    chunks = [inputs.chunk(i, min(i + chunk_size, 7), 4) for i in range(0, 7, chunk_size)]
    means = torch.cat([attend(chunk, 4) for chunk in chunks])[:, 0, 0].tolist()
    sums = [round(mean * count) for mean, count in zip(means, (1, 2, 3, 4, 4, 4, 4), strict=True)]
    assert sums == [0b1, 0b11, 0b111, 0b1111, 0b11110, 0b111100, 0b1111000]


def test_no_queries_launch_nothing():
    inputs = make_ragged_inputs(RaggedCase("none", (0, 5), num_queries=(0, 0)), device=DEVICE)
    assert attend(inputs).shape == (0, 4, 16)


def test_padding_without_sequences_launches_nothing():
    q, k_pool, v_pool, tables, starts, lens = make_ragged_inputs(RAGGED_CASES[5], device=DEVICE).args
    out = run_kernel(ragged_paged_attention, q, k_pool, v_pool, tables[:0], starts[:1], lens[:0])
    assert out.shape == q.shape


def test_a_scale_of_the_caller_is_used():
    case = RaggedCase("scaled", (9, 12), num_queries=(1, 4))
    inputs = make_ragged_inputs(case, device=DEVICE)
    expected = reference.ragged_paged_attention(*inputs.args, scale=0.7, window=None)
    out = run_kernel(ragged_paged_attention, *inputs.args, scale=0.7)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
