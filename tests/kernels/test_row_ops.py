"""The decoder's operations on single rows: norm, rotary, gate."""

import pytest
import torch

from minipaged.cases import AttentionCase
from minipaged.cases_ops import ROTARY_CASES, ROW_CASES, RowCase, make_angles, make_heads
from minipaged.foundation import reference
from minipaged.foundation.ops import rms_norm, rotary, silu_mul
from tests.kernels.helpers import DEVICE, DTYPES, ON_DEVICE, assert_agrees, guarded_outputs, run_kernel

pytest.importorskip("triton")
pytestmark = ON_DEVICE

EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_rms_norm_agrees_with_exact_arithmetic(case: RowCase, dtype: torch.dtype):
    x, weight = case.rows(dtype, DEVICE), case.rows(dtype, DEVICE, seed=1)[-1] * 100
    out = run_kernel(rms_norm, x, weight, EPS)
    assert_agrees(out, reference.rms_norm(x, weight, EPS), exact_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_rms_norm_adds_the_residual_to_the_bit_and_norms_the_rounded_sum(case: RowCase, dtype: torch.dtype):
    x, residual = case.rows(dtype, DEVICE), case.rows(dtype, DEVICE, seed=1)
    weight = torch.ones(case.width, dtype=dtype, device=DEVICE)
    out, new_residual = run_kernel(rms_norm, x, weight, EPS, residual=residual)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(out, run_kernel(rms_norm, new_residual, weight, EPS))


def test_a_row_is_normed_to_the_same_bits_alone_and_among_others():
    x = RowCase("many", 40, 64).rows(torch.float32, DEVICE)
    weight = torch.ones(64, device=DEVICE)
    together = run_kernel(rms_norm, x, weight, EPS)
    for row in (0, 17, 39):
        assert torch.equal(run_kernel(rms_norm, x[row : row + 1], weight, EPS)[0], together[row])


def test_a_row_of_zeros_gives_zeros():
    zeros = torch.zeros(2, 64, device=DEVICE)
    assert not run_kernel(rms_norm, zeros, torch.ones(64, device=DEVICE), EPS).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROTARY_CASES, ids=str)
def test_rotary_turns_queries_and_keys_to_the_bits_of_the_reference(case: AttentionCase, dtype: torch.dtype):
    q, k, _ = make_heads(case, 3, dtype, DEVICE)
    angles = make_angles(3, case.head_dim, DEVICE)
    before = q.clone(), k.clone()
    with guarded_outputs(case.head_dim):
        turned = rotary(q, k, *angles, tier="triton")
    for out, expected in zip(turned, reference.rotary(q, k, *angles), strict=True):
        assert torch.equal(out, expected)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_silu_mul_agrees_with_exact_arithmetic(case: RowCase, dtype: torch.dtype):
    gate, up = case.rows(dtype, DEVICE), case.rows(dtype, DEVICE, seed=1)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert_agrees(run_kernel(silu_mul, gate, up), reference.silu_mul(gate, up), exact)


def test_silu_of_very_negative_and_very_positive_gates_is_finite():
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]], device=DEVICE)
    out = run_kernel(silu_mul, gate, torch.ones_like(gate))
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e4]]))


def test_no_rows_launch_nothing():
    none = torch.empty(0, 64, device=DEVICE)
    assert run_kernel(silu_mul, none, none).shape == (0, 64)
    assert run_kernel(rms_norm, none, torch.ones(64, device=DEVICE), EPS).shape == (0, 64)
