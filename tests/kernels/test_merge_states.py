"""Attention over two sets of keys, merged: right in every dtype, and a side without keys leaves no trace."""

import pytest
import torch

from minipaged.batching import reference
from minipaged.batching.ops import merge_states
from tests.kernels.helpers import DEVICE, DTYPES, ON_DEVICE, assert_agrees, guarded_outputs, run_kernel

pytest.importorskip("triton")
pytestmark = ON_DEVICE

SHAPES = [(1, 1, 1), (5, 4, 16), (3, 9, 64), (2, 12, 80), (2, 32, 128), (1, 3, 256)]
"""Tokens, heads and head sizes."""


def make_states(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return both sides: natural logarithms far and near, with some -inf beside NaN on either side and on both."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for place in (0, 1):
        out = torch.randn(shape, generator=generator)
        lse = torch.randn(shape[:2], generator=generator) * 20
        is_empty = torch.arange(lse.numel()).view(lse.shape) % 7 // (place + 1) == 1  # places 1; 2 and 3
        is_empty |= torch.arange(lse.numel()).view(lse.shape) % 7 == 5  # both
        out[is_empty], lse[is_empty] = float("nan"), float("-inf")
        sides += [out.to(DEVICE, dtype), lse.to(DEVICE)]
    return tuple(sides)


def exact(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    shares = torch.stack((lse_a, lse_b)).double().softmax(0).nan_to_num(0)[..., None]
    return (torch.stack((out_a, out_b)).double().nan_to_num(0) * shares).sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_merge_states_agrees_with_the_exact_mean(shape: tuple[int, ...], dtype: torch.dtype):
    states = make_states(shape, dtype)
    with guarded_outputs(shape[2]):
        out, lse = merge_states(*states, tier="triton")
    expected, expected_lse = reference.merge_states(*states)
    assert_agrees(out, expected, exact(*states))
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sides_may_be_swapped_and_an_empty_one_leaves_the_other_s_bits(dtype: torch.dtype):
    out_a, lse_a, out_b, lse_b = (x.nan_to_num(0.5, neginf=0.5) for x in make_states((5, 4, 16), dtype))
    forwards = run_kernel(merge_states, out_a, lse_a, out_b, lse_b)
    backwards = run_kernel(merge_states, out_b, lse_b, out_a, lse_a)
    assert all(torch.equal(one, other) for one, other in zip(forwards, backwards, strict=True))
    nothing = torch.full_like(out_a, float("nan")), torch.full_like(lse_a, float("-inf"))
    out, lse = run_kernel(merge_states, out_a, lse_a, *nothing)
    assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
    out, lse = run_kernel(merge_states, *nothing, *nothing)
    assert not out.any() and torch.equal(lse, nothing[1])


def test_no_tokens_launch_nothing():
    out, lse = torch.empty(0, 4, 16, device=DEVICE), torch.empty(0, 4, device=DEVICE)
    assert run_kernel(merge_states, out, lse, out, lse)[0].shape == (0, 4, 16)
