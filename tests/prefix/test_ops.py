"""The operation of the prefix rung in plain PyTorch: its fast form is plain decode, however sequences are grouped."""

import pytest
import torch

from minipaged.cases import MAX_ERROR
from minipaged.cases_prefix import (
    LARGE_SHARED_CASES,
    SHARED_CASES,
    SharedCase,
    SharedInputs,
    make_shared_inputs,
    shared_case,
)
from minipaged.prefix import ops, reference

CASES = (
    *SHARED_CASES,
    shared_case("prefixes-of-any-length", (3, (1, 2)), (0, (9,)), (17, (1,)), (32, (30, 1, 5)), block_size=1),
    shared_case("prefix-up-to-the-middle-of-a-block", (18, (14, 15, 40)), block_size=16),
)
GROUPED = CASES[-2]


def definition(inputs: SharedInputs) -> torch.Tensor:
    return reference.shared_prefix_attention(*inputs.args, scale=inputs.q.shape[2] ** -0.5)


def attend(inputs: SharedInputs) -> torch.Tensor:
    return ops.shared_prefix_attention(*inputs.args, tier="torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE_SHARED_CASES[:2]], ids=str)
def test_both_forms_agree(case: SharedCase, dtype: torch.dtype):
    inputs = make_shared_inputs(case, dtype)
    before = [x.clone() for x in inputs.args]
    out = attend(inputs)
    assert out.dtype == dtype
    torch.testing.assert_close(out, definition(inputs), atol=MAX_ERROR[dtype], rtol=0)
    for old, new in zip(before, inputs.args, strict=True):
        assert torch.equal(old.nan_to_num(7), new.nan_to_num(7)), "an input was changed"


@pytest.mark.parametrize("poison", [float("inf"), float("-inf")])
def test_slots_that_no_sequence_owns_never_reach_the_output(poison: float):
    for case in CASES[:8]:
        clean, dirty = (make_shared_inputs(case, poison=fill) for fill in (0.0, poison))
        assert torch.equal(attend(clean), attend(dirty)), case


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.seq_lens], ids=str)
def test_blocks_that_a_sequence_does_not_have_are_never_looked_up(case: SharedCase):
    inputs = make_shared_inputs(case)
    expected = attend(inputs)
    inputs.block_tables[inputs.block_tables == -1] = 10**6
    assert torch.equal(attend(inputs), expected)


def test_a_prefix_is_looked_up_in_one_table_of_its_group():
    inputs = make_shared_inputs(GROUPED)
    expected = attend(inputs)
    inputs.block_tables[1, :3] = inputs.block_tables[5:7, :32] = 10**6
    assert torch.equal(attend(inputs), expected)


@pytest.mark.parametrize(
    "groups",
    [
        [((3,), 0), ((6,), 0)],
        [((4,), 32), ((5, 6), 32)],
        [((6, 4, 5), 11), ((2, 3), 0)],
        [((0, 2, 6, 1, 5), 0)],
    ],
    ids=["alone", "apart", "shorter", "ungrouped"],
)
def test_how_sequences_are_grouped_does_not_matter(groups: list[tuple[tuple[int, ...], int]]):
    inputs = make_shared_inputs(GROUPED)
    rows = [row for rows, _ in groups for row in rows]
    out = attend(inputs.regrouped(*groups))
    torch.testing.assert_close(out, attend(inputs)[rows], atol=MAX_ERROR[torch.float32], rtol=0)


def test_no_sequences_give_no_rows():
    inputs = make_shared_inputs(GROUPED)
    assert attend(inputs.regrouped()).shape == (0, 4, 16)
    assert attend(inputs.regrouped(((), 1024))).shape == (0, 4, 16)


def test_a_scale_of_the_caller_is_used():
    inputs = make_shared_inputs(GROUPED)
    expected = reference.shared_prefix_attention(*inputs.args, scale=0.7)
    out = ops.shared_prefix_attention(*inputs.args, scale=0.7)
    torch.testing.assert_close(out, expected, atol=MAX_ERROR[torch.float32], rtol=0)


@pytest.mark.parametrize("place", [4, 5], ids=["seq_lens", "group_starts"])
def test_one_length_or_start_too_few_is_refused(place: int):
    args = list(make_shared_inputs(GROUPED).args)
    args[place] = args[place][1:]
    with pytest.raises(AssertionError):
        ops.shared_prefix_attention(*args)
