"""The operations of the batching rung in plain PyTorch: by definition, as a whole batch, and next to older ones."""

from dataclasses import replace

import pytest
import torch

from minipaged.batching import ops, reference
from minipaged.cases import MAX_ERROR
from minipaged.cases_batching import (
    RAGGED_CASES,
    RAGGED_PIECE_CASES,
    RaggedCase,
    RaggedInputs,
    make_ragged_inputs,
    prompt_case,
)
from minipaged.cases_ops import COPY_CASES, CopyCase
from minipaged.errors import UserError
from minipaged.foundation import reference as foundation_reference
from minipaged.paged import reference as paged_reference

ALL_CASES = [*RAGGED_CASES, *RAGGED_PIECE_CASES]
WINDOW_OF_4 = RaggedCase("window-of-4", (7,), 1, 1, block_size=4, window=4, num_queries=(7,))


def definition(inputs: RaggedInputs, case: RaggedCase) -> torch.Tensor:
    out = reference.ragged_paged_attention(*inputs.args, scale=case.head_dim**-0.5, window=case.window)
    return out[: inputs.query_starts[-1]]


def attend(inputs: RaggedInputs, window: int | None) -> torch.Tensor:
    return ops.ragged_paged_attention(*inputs.args, window=window, tier="torch")[: inputs.query_starts[-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_both_forms_agree(case: RaggedCase, dtype: torch.dtype):
    inputs = make_ragged_inputs(case, dtype)
    before = [x.clone() for x in inputs.args]
    out = attend(inputs, case.window)
    assert out.dtype == dtype
    torch.testing.assert_close(out, definition(inputs, case), atol=MAX_ERROR[dtype], rtol=0)
    for old, new in zip(before, inputs.args, strict=True):
        assert torch.equal(old.nan_to_num(7), new.nan_to_num(7)), "an input was changed"


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_the_definition_equals_attention_over_dense_rows_in_double_precision(case: RaggedCase):
    inputs = make_ragged_inputs(case)
    out = definition(inputs, case)
    group = case.num_heads // case.num_kv_heads
    for row, (keys, values) in enumerate(zip(*inputs.dense(), strict=True)):
        own = inputs.queries(row)
        for token in range(own.start, own.stop):
            position = case.seq_lens[row] - own.stop + token
            first = 0 if case.window is None else max(0, position - case.window + 1)
            k, v = (x[first : position + 1].double().repeat_interleave(group, 1) for x in (keys, values))
            scores = torch.einsum("hd,lhd->hl", inputs.q[token].double(), k) * case.head_dim**-0.5
            expected = torch.einsum("hl,lhd->hd", scores.softmax(1), v)
            torch.testing.assert_close(out[token].double(), expected, atol=MAX_ERROR[torch.float32], rtol=0)


@pytest.mark.parametrize("window", [None, 9])
def test_a_whole_prompt_equals_causal_attention_and_one_query_equals_paged_attention(window: int | None):
    case = replace(prompt_case(50), window=window)
    inputs = make_ragged_inputs(case)
    k, v = (rows[0, :50] for rows in inputs.dense())
    whole = foundation_reference.causal_attention(inputs.q, k, v, inputs.query_starts, window=window)
    torch.testing.assert_close(definition(inputs, case), whole, atol=MAX_ERROR[torch.float32], rtol=0)
    last = inputs.chunk(49, 50, window)
    decoded = paged_reference.paged_attention(
        last.q, last.k_pool, last.v_pool, last.block_tables, last.seq_lens, scale=case.head_dim**-0.5, window=window
    )
    assert torch.equal(definition(last, case), decoded)


@pytest.mark.parametrize("poison", [float("inf"), float("-inf")])
def test_slots_that_no_sequence_owns_never_reach_the_output(poison: float):
    for case in ALL_CASES:
        clean, dirty = (make_ragged_inputs(case, poison=fill) for fill in (0.0, poison))
        assert torch.equal(attend(clean, case.window), attend(dirty, case.window)), case


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_blocks_that_a_sequence_does_not_need_are_never_looked_up(case: RaggedCase):
    inputs = make_ragged_inputs(case)
    expected = definition(inputs, case), attend(inputs, case.window)
    inputs.block_tables[inputs.block_tables == -1] = 10**6
    assert torch.equal(definition(inputs, case), expected[0])
    assert torch.equal(attend(inputs, case.window), expected[1])


def test_what_stands_beside_a_sequence_without_queries_does_not_matter():
    case = RaggedCase("idle", (20, 9, 7), num_queries=(4, 0, 1))
    inputs = make_ragged_inputs(case)
    expected = attend(inputs, None)
    inputs.block_tables[1] = -1
    for seq_len in (0, 10**6, -3):
        inputs.seq_lens[1] = seq_len
        assert torch.equal(attend(inputs, None), expected)
        assert torch.equal(definition(inputs, case), definition(make_ragged_inputs(case), case))


@pytest.mark.parametrize("form", [attend, lambda inputs, window: definition(inputs, WINDOW_OF_4)])
@pytest.mark.parametrize("chunk_size", [7, 3, 2, 1])
def test_a_window_of_4_over_7_tokens_shows_1_2_3_4_4_4_4_keys(chunk_size: int, form):
    inputs = make_ragged_inputs(replace(WINDOW_OF_4, window=None))
    # Scores are equal, and token j has the value 2 ** j: the sum of the visible values names them all.
    inputs.q.zero_()
    for token in range(7):
        inputs.v_pool[inputs.block_tables[0, token // 4], token % 4] = 2.0**token
    chunks = [inputs.chunk(i, min(i + chunk_size, 7), 4) for i in range(0, 7, chunk_size)]
    means = torch.cat([form(chunk, 4) for chunk in chunks])[:, 0, 0].tolist()
    sums = [round(mean * count) for mean, count in zip(means, (1, 2, 3, 4, 4, 4, 4), strict=True)]
    assert sums == [0b1, 0b11, 0b111, 0b1111, 0b11110, 0b111100, 0b1111000]


@pytest.mark.parametrize("window", [None, 15, 16, 17, 50])
def test_tiles_of_query_rows_join_without_a_seam(window: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(foundation_reference, "MASK_TILE", 16)
    case = RaggedCase("tiles", (150, 120), window=window, num_queries=(70, 33))
    inputs = make_ragged_inputs(case)
    torch.testing.assert_close(attend(inputs, window), definition(inputs, case), atol=MAX_ERROR[torch.float32], rtol=0)


@pytest.mark.parametrize("window", [None, 500])
def test_the_second_half_of_8192_tokens_needs_no_mask_of_half_the_square(window: int | None):
    q = torch.randn(8192, 4, 8, dtype=torch.bfloat16)
    pool = torch.randn(512, 16, 2, 8, dtype=torch.bfloat16)
    tables, lens = torch.arange(512, dtype=torch.int32)[None], torch.tensor([8192], dtype=torch.int32)
    inputs = RaggedInputs(q, pool, pool, tables, lens, torch.tensor([0, 8192], dtype=torch.int32))
    with torch.profiler.profile(profile_memory=True) as profile:
        attend(inputs.chunk(4096, 8192), window)
    allocations = [event.cpu_memory_usage for event in profile.events() or ()]
    assert max(allocations) > 0, "the profiler saw no allocation"
    assert max(allocations) < 4096 * 8192


def test_no_queries_give_no_rows():
    inputs = make_ragged_inputs(RaggedCase("none", (0, 5), num_queries=(0, 0)))
    assert attend(inputs, None).shape == (0, 4, 16)


def test_a_window_below_1_is_refused():
    with pytest.raises(UserError, match="window must be at least 1, not 0"):
        ops.ragged_paged_attention(*make_ragged_inputs(RAGGED_CASES[0]).args, window=0)


def attend_with_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend all queries to all keys, one KV head per query head."""
    scores = torch.einsum("thd,lhd->thl", q, k)
    return torch.einsum("thl,lhd->thd", scores.softmax(2), v), scores.logsumexp(2)


@pytest.mark.parametrize("cut", [1, 10, 19])
def test_merging_two_parts_gives_attention_over_all_keys(cut: int):
    q, k, v = torch.randn(5, 3, 8), torch.randn(20, 3, 8), torch.randn(20, 3, 8)
    whole_out, whole_lse = attend_with_lse(q, k, v)
    out, lse = ops.merge_states(*attend_with_lse(q, k[:cut], v[:cut]), *attend_with_lse(q, k[cut:], v[cut:]))
    torch.testing.assert_close(out, whole_out, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=0)


def test_a_side_without_keys_adds_nothing_even_if_it_holds_nan():
    out, lse = torch.randn(4, 2, 8), torch.randn(4, 2)
    nothing = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for merged in (ops.merge_states(out, lse, *nothing), ops.merge_states(*nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    both_out, both_lse = ops.merge_states(*nothing, *nothing)
    assert torch.equal(both_out, torch.zeros_like(out)) and torch.equal(both_lse, nothing[1])


def test_scores_far_apart_neither_overflow_nor_lose_the_larger_side():
    out, lse = torch.randn(4, 2, 8).bfloat16(), torch.full((4, 2), 300.0)
    merged, merged_lse = ops.merge_states(out, lse, torch.randn(4, 2, 8).bfloat16(), -lse)
    assert merged.dtype == torch.bfloat16 and torch.equal(merged, out) and torch.equal(merged_lse, lse)


BIT_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", BIT_DTYPES, ids=str)
@pytest.mark.parametrize("case", COPY_CASES, ids=str)
def test_blocks_go_to_staging_and_come_back_bit_for_bit(case: CopyCase, dtype: torch.dtype):
    bits = case.make(torch.float32)[0].mul(50).to(torch.uint8)
    pool = bits.view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
    pool = pool.clone()
    ids = torch.tensor(case.block_ids, dtype=torch.int64)
    staging = torch.zeros(*pool.shape[:-4], len(ids), *pool.shape[-3:], dtype=dtype)
    ops.gather_blocks(pool, ids, staging, tier="torch")
    for place, block_id in enumerate(case.block_ids):
        assert torch.equal(as_bytes(staging[..., place, :, :, :]), as_bytes(pool[..., block_id, :, :, :]))
    target = torch.full_like(pool.view(torch.uint8), 7).view(dtype)
    expected = target.clone()
    for block_id in case.block_ids:
        expected[..., block_id, :, :, :] = pool[..., block_id, :, :, :]
    ops.scatter_blocks(target, ids, staging, tier="torch")
    assert torch.equal(as_bytes(target), as_bytes(expected))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def test_staging_of_another_shape_or_dtype_is_refused():
    pool, ids = torch.zeros(4, 4, 1, 2), torch.tensor([1, 2])
    for staging in (torch.zeros(3, 4, 1, 2), torch.zeros(2, 4, 1, 1), torch.zeros(2, 4, 1, 2).half()):
        for op in (ops.gather_blocks, ops.scatter_blocks):
            with pytest.raises(AssertionError):
                op(pool, ids, staging)
