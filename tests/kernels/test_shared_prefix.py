"""Attention of sequences that share a prefix: right, guarded, and in every grouping the bits of plain decode."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from minipaged.batching.ops import ragged_paged_attention
from minipaged.cases_prefix import (
    LARGE_SHARED_CASES,
    SHARED_CASES,
    SharedCase,
    SharedInputs,
    make_shared_inputs,
    shared_case,
)
from minipaged.launch import decode_tiles, prefix_tiles, split_tiles
from minipaged.paged.ops import paged_attention
from minipaged.prefix import kernels, reference
from minipaged.prefix.ops import shared_prefix_attention
from tests.kernels.helpers import (
    DEVICE,
    DTYPES,
    HALF_DTYPES,
    NEEDS_GPU,
    ON_DEVICE,
    assert_agrees,
    exact_attention,
    guarded_outputs,
    run_kernel,
)

pytestmark = ON_DEVICE

CASES = [
    *(pytest.param(case, id=case.name, marks=NEEDS_GPU if len(case.seq_lens) > 40 else []) for case in SHARED_CASES),
    *(pytest.param(case, id=case.name, marks=NEEDS_GPU) for case in LARGE_SHARED_CASES),
]
SMALL = shared_case("small", (1024, (20, 1, 40)), (0, (7, 33)), num_heads=2, num_kv_heads=1)


def attend(inputs: SharedInputs) -> torch.Tensor:
    return run_kernel(shared_prefix_attention, *inputs.args)


def plain(inputs: SharedInputs) -> torch.Tensor:
    return run_kernel(paged_attention, *inputs.plain_args)


def exact(inputs: SharedInputs, case: SharedCase) -> torch.Tensor:
    outs = []
    for q, table, seq_len in zip(inputs.q, inputs.block_tables.long(), case.seq_lens, strict=True):
        token = torch.arange(seq_len, device=q.device)
        slots = table[token // case.block_size] * case.block_size + token % case.block_size
        keys, values = (pool.flatten(0, 1)[slots] for pool in (inputs.k_pool, inputs.v_pool))
        outs.append(exact_attention(q, keys, values, case))
    return torch.stack(outs)


@contextmanager
def splitting(num_programs: int) -> Iterator[None]:
    """Let so many programs share a sequence's own pieces, whatever the launch rule says."""
    with patch.object(kernels, "programs_per_row", lambda num_rows, num_pieces: num_programs):
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_shared_prefix_attention_agrees_with_exact_attention(case: SharedCase, dtype: torch.dtype):
    inputs = make_shared_inputs(case, dtype, DEVICE)
    loop = reference.shared_prefix_attention(*inputs.args, scale=case.head_dim**-0.5)
    with guarded_outputs(case.head_dim):
        out = shared_prefix_attention(*inputs.args, tier="triton")
    assert_agrees(out, loop, exact(inputs, case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_sharing_changes_no_bit_of_plain_decode(case: SharedCase, dtype: torch.dtype):
    inputs = make_shared_inputs(case, dtype, DEVICE)
    expected = plain(inputs)
    for num_programs in (1, 3):
        with splitting(num_programs):
            assert torch.equal(attend(inputs), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_bits_of_a_mixed_batch(dtype: torch.dtype):
    inputs = make_shared_inputs(SMALL, dtype, DEVICE)
    q, k_pool, v_pool, tables, seq_lens = inputs.plain_args
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=DEVICE)
    mixed = run_kernel(ragged_paged_attention, q, k_pool, v_pool, tables, starts, seq_lens)
    assert torch.equal(attend(inputs), mixed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "groups",
    [
        [((1,), 1024), ((3,), 0)],
        [((2, 0), 1024), ((4,), 0), ((1,), 1024)],
        [((3,), 0), ((4,), 0), ((0,), 0), ((1, 2), 1024)],
        [((1, 3, 0), 0)],
    ],
    ids=["alone", "apart", "moved", "ungrouped"],
)
def test_a_sequence_gives_the_same_bits_alone_and_in_any_group(groups: list, dtype: torch.dtype):
    inputs = make_shared_inputs(SMALL, dtype, DEVICE)
    rows = [row for rows, _ in groups for row in rows]
    assert torch.equal(attend(inputs.regrouped(*groups)), attend(inputs)[rows])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_sequence_gives_the_same_bits_in_a_group_of_64(dtype: torch.dtype):
    lengths = (*(1026 + i % 7 for i in range(60)), 1025, 1535, 1536, 1537)
    case = replace(SMALL, seq_lens=lengths, group_sizes=(64,), prefix_lens=(1024,))
    inputs = make_shared_inputs(case, dtype, DEVICE)
    together = attend(inputs)
    for row in (0, 31, 60, 61, 62, 63):
        alone = inputs.regrouped(((row,), 1024))
        assert torch.equal(attend(alone)[0], together[row])
        assert torch.equal(plain(alone)[0], together[row])


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("num_rows", [16, 32, 64, 128])
def test_bits_do_not_depend_on_the_height_of_a_tile(num_rows: int, num_warps: int, dtype: torch.dtype):
    inputs = make_shared_inputs(SMALL, dtype, DEVICE)

    def tiles_of_rows(q: torch.Tensor, group: int):
        return replace(prefix_tiles(q, group), queries=num_rows, num_warps=num_warps)

    with patch.object(kernels, "prefix_tiles", tiles_of_rows):
        assert torch.equal(attend(inputs), plain(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_prefixes_and_shared_rows_take_the_keys_of_decode_tiles_and_whole_groups(head_dim: int, dtype: torch.dtype):
    q = torch.empty(1, 1, head_dim, dtype=dtype)
    for group in (1, 3, 24, 71):
        tiles = prefix_tiles(q, group)
        assert tiles.keys == decode_tiles(q, group).keys
        assert tiles.queries >= group
        assert replace(split_tiles(q, group), num_warps=0, num_stages=0, max_registers=None) == replace(
            decode_tiles(q, group), num_warps=0, num_stages=0, max_registers=None
        )


def test_a_prefix_is_looked_up_in_one_table_of_its_group():
    inputs = make_shared_inputs(SMALL, device=DEVICE)
    expected = attend(inputs)
    inputs.block_tables[1:3, :64] = inputs.block_tables[3, 0]
    assert torch.equal(attend(inputs), expected)


@pytest.mark.parametrize("num_programs", [1, 3])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_slots_that_no_sequence_owns_never_reach_the_output(poison: float, num_programs: int):
    clean, dirty = (make_shared_inputs(SMALL, torch.float16, DEVICE, poison=fill) for fill in (0.0, poison))
    with splitting(num_programs):
        assert torch.equal(attend(clean), attend(dirty))


def test_no_sequences_launch_nothing():
    inputs = make_shared_inputs(SMALL, device=DEVICE)
    assert attend(inputs.regrouped()).shape == (0, 2, 16)
    assert attend(inputs.regrouped(((), 1024))).shape == (0, 2, 16)


def test_a_scale_of_the_caller_is_used():
    inputs = make_shared_inputs(SMALL, device=DEVICE)
    expected = reference.shared_prefix_attention(*inputs.args, scale=0.7)
    out = run_kernel(shared_prefix_attention, *inputs.args, scale=0.7)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
