"""The kernels above the rungs: a matrix product for few rows, and kernels that do the work of several of the rungs."""

from unittest.mock import patch

import pytest
import torch

from minipaged.cases_fast import GATE_UP_CASES, PACKED_CASES, SKINNY_CASES, PackedCase, SkinnyCase
from minipaged.cases_ops import RowCase
from minipaged.fast import reference
from minipaged.fast.ops import norm_rotate_write, silu_mul_packed, skinny_linear
from minipaged.foundation.ops import rms_norm, rotary, silu_mul
from minipaged.paged.ops import write_slots
from tests.kernels.helpers import DEVICE, DTYPES, HAS_GPU, NEEDS_GPU, ON_DEVICE, assert_agrees, run_kernel
from tests.kernels.test_any_order import last_program_first
from tests.kernels.test_copies import bits

pytest.importorskip("triton")
pytestmark = ON_DEVICE

LARGE_WEIGHTS = [(4096, 1024), (1024, 2048), (1024, 3072), (4096, 4096), (40_000, 1024), (4096, 14_336)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SKINNY_CASES, ids=str)
def test_a_skinny_product_agrees_with_exact_arithmetic(case: SkinnyCase, dtype: torch.dtype):
    x, weight, bias = case.make(dtype, DEVICE)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_agrees(run_kernel(skinny_linear, x, weight, bias), reference.skinny_linear(x, weight, bias), exact)


def check_rows_alone(case: SkinnyCase, dtype: torch.dtype) -> None:
    """Compare each row alone, and the first few of them, with the same rows among all."""
    x, weight, bias = case.make(dtype, DEVICE)
    together = run_kernel(skinny_linear, x, weight, bias)
    for row in range(case.num_rows):
        assert torch.equal(run_kernel(skinny_linear, x[row : row + 1], weight, bias)[0], together[row])
    for count in (2, 7, 8, 9, 15):
        assert torch.equal(run_kernel(skinny_linear, x[:count], weight, bias), together[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_in", [64, 1100])
def test_a_row_has_the_same_bits_alone_and_among_others(num_in: int, dtype: torch.dtype):
    check_rows_alone(SkinnyCase("rows", 16, 24, num_in, has_bias=True), dtype)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=NEEDS_GPU) for dtype in (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize(("num_out", "num_in"), LARGE_WEIGHTS)
def test_a_row_has_the_same_bits_alone_and_among_others_in_real_shapes(num_out: int, num_in: int, dtype: torch.dtype):
    case = SkinnyCase("real", 16, num_out, num_in)
    check_rows_alone(case, dtype)
    x, weight, _ = case.make(dtype, DEVICE)
    out = run_kernel(skinny_linear, x, weight)
    assert_agrees(out, reference.skinny_linear(x, weight, None), x.double() @ weight.double().T)


def test_a_row_of_nan_stays_with_itself():
    x, weight, _ = SkinnyCase("rows", 3, 24, 100).make(torch.float32, DEVICE)
    clean = run_kernel(skinny_linear, x, weight)
    x[1] = float("nan")
    out = run_kernel(skinny_linear, x, weight)
    assert out[1].isnan().all() and torch.equal(out[::2], clean[::2])


def test_a_skinny_product_writes_its_rows_and_nothing_behind_them():
    x, weight, _ = SkinnyCase("rows", 3, 17, 50).make(torch.float32, DEVICE)
    buffer = torch.full((100, 17), 7.0, device=DEVICE)
    with patch.object(torch, "empty", lambda *size, dtype, device: buffer[1:4]):
        skinny_linear(x, weight, tier="triton")
    assert (buffer[1:4] != 7).all() and (buffer[0] == 7).all() and (buffer[4:] == 7).all()


def separate_operations(case: PackedCase, args: tuple) -> torch.Tensor:
    """Do the same with the kernels of the rungs, one after the other."""
    qkv, q_norm, k_norm, eps, cos, sin, k_pool, v_pool, slots = args
    heads = qkv.view(case.num_tokens, -1, case.head_dim)
    q, k, v = (x.contiguous() for x in heads.split((case.num_heads, *[case.num_kv_heads] * 2), dim=1))
    if q_norm is not None and k_norm is not None:
        q = run_kernel(rms_norm, q.view(-1, case.head_dim), q_norm, eps).view(q.shape)
        k = run_kernel(rms_norm, k.view(-1, case.head_dim), k_norm, eps).view(k.shape)
    q, k = run_kernel(rotary, q, k, cos, sin)
    run_kernel(write_slots, k, v, k_pool, v_pool, slots)
    return q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_one_launch_has_the_bits_of_the_separate_kernels(case: PackedCase, dtype: torch.dtype):
    args, other_args = case.make_packed(dtype, DEVICE), case.make_packed(dtype, DEVICE)
    q = run_kernel(norm_rotate_write, *args, num_heads=case.num_heads)
    assert torch.equal(q, separate_operations(case, other_args))
    for one, other in zip(args, other_args, strict=True):  # the pools, and all that must stay as it was
        assert not torch.is_tensor(one) or one.dtype == torch.int64 or torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_norm_rotate_write_agrees_with_exact_arithmetic(case: PackedCase, dtype: torch.dtype):
    args = case.make_packed(dtype, DEVICE)
    exact_args = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args]
    exact_heads = exact_args[0].view(case.num_tokens, -1, case.head_dim)[:, : case.num_heads]
    if case.has_norm:
        factor = (exact_heads.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        exact_heads = exact_heads * factor * exact_args[1]
    first, second = exact_heads.chunk(2, dim=-1)
    cos, sin = (angles[:, None] for angles in exact_args[4:6])
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    q = run_kernel(norm_rotate_write, *case.make_packed(dtype, DEVICE), num_heads=case.num_heads)
    assert_agrees(q, reference.norm_rotate_write(*args, num_heads=case.num_heads), exact)


def test_a_padding_row_of_nan_writes_nowhere_and_changes_no_other():
    case = PackedCase("padding", 4)
    args = case.make_packed(torch.float32, DEVICE)
    clean = run_kernel(norm_rotate_write, *args, num_heads=case.num_heads)
    dirty_args = case.make_packed(torch.float32, DEVICE)
    dirty_args[0][3], dirty_args[8][3] = float("nan"), -1
    before = [pool.clone().view(-1, 2, 16)[args[8][3]] for pool in dirty_args[6:8]]
    q = run_kernel(norm_rotate_write, *dirty_args, num_heads=case.num_heads)
    assert torch.equal(q[:3], clean[:3])
    for pool, old, full in zip(dirty_args[6:8], before, args[6:8], strict=True):
        slots, full_slots = pool.view(-1, 2, 16), full.view(-1, 2, 16)
        assert torch.equal(bits(slots[args[8][3]]), bits(old))
        assert torch.equal(slots[args[8][:3]], full_slots[args[8][:3]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GATE_UP_CASES, ids=str)
def test_packed_halves_have_the_bits_of_separate_ones_and_agree_with_exact_arithmetic(
    case: RowCase, dtype: torch.dtype
):
    gate_up = case.rows(dtype, DEVICE)
    before = gate_up.clone()
    gate, up = (half.contiguous() for half in gate_up.chunk(2, dim=1))
    out = run_kernel(silu_mul_packed, gate_up)
    assert torch.equal(gate_up, before)
    assert torch.equal(out, run_kernel(silu_mul, gate, up))
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    assert_agrees(out, reference.silu_mul_packed(gate_up), exact)


def test_packed_gates_far_from_zero_stay_finite_and_a_row_of_nan_stays_with_itself():
    gates = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4], device=DEVICE)
    rows = torch.cat((gates, torch.ones_like(gates))).repeat(3, 1)
    rows[1] = float("nan")
    out = run_kernel(silu_mul_packed, rows)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 90.0, 1e4]] * 2)
    torch.testing.assert_close(out[::2].cpu(), expected)
    assert out[1].isnan().all()


def test_no_rows_launch_nothing():
    assert run_kernel(silu_mul_packed, torch.empty(0, 8, device=DEVICE)).shape == (0, 4)
    assert run_kernel(skinny_linear, torch.empty(0, 8, device=DEVICE), torch.ones(4, 8, device=DEVICE)).shape == (0, 4)
    args = PackedCase("none", 0).make_packed(torch.float32, DEVICE)
    assert run_kernel(norm_rotate_write, *args, num_heads=4).shape == (0, 4, 16)


@pytest.mark.skipif(HAS_GPU, reason="needs a GPU not, but the interpreter")
def test_none_depends_on_the_order_of_programs():
    x, weight, bias = SkinnyCase("rows", 3, 70, 200, has_bias=True).make(torch.float16)
    case = PackedCase("packed", 3, num_heads=9, num_kv_heads=3, head_dim=64)
    args, backwards_args = case.make_packed(torch.float16), case.make_packed(torch.float16)
    gate_up = RowCase("rows", 3, 4100).rows(torch.float16)
    forwards = run_kernel(skinny_linear, x, weight, bias), run_kernel(norm_rotate_write, *args, num_heads=9)
    gated = run_kernel(silu_mul_packed, gate_up)
    with last_program_first():
        assert torch.equal(run_kernel(skinny_linear, x, weight, bias), forwards[0])
        assert torch.equal(run_kernel(norm_rotate_write, *backwards_args, num_heads=9), forwards[1])
        assert torch.equal(run_kernel(silu_mul_packed, gate_up), gated)
    assert torch.equal(bits(args[6]), bits(backwards_args[6])) and torch.equal(bits(args[7]), bits(backwards_args[7]))


@pytest.mark.parametrize("graph", [pytest.param(None, marks=NEEDS_GPU)])
def test_both_replay_in_a_graph_in_a_row_with_new_rows_and_slots(graph: None):
    """The second launch reads what the first wrote, over and over: starting early must not mean reading early."""
    case = PackedCase("graph", 6, num_heads=16, num_kv_heads=8, head_dim=128, num_skipped=1)
    args = case.make_packed(torch.bfloat16, DEVICE)
    weight = (torch.randn(args[0].shape[1], 2048, device=DEVICE) / 45).bfloat16()
    back = (torch.randn(2048, 2048, device=DEVICE) / 45).bfloat16()
    x = torch.randn(6, 2048, device=DEVICE).bfloat16()

    def chain(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            q = norm_rotate_write(skinny_linear(rows, weight), *args[1:], num_heads=16)
            rows = skinny_linear(q.flatten(1), back)
        return rows

    chain(x)
    torch.cuda.synchronize()
    graph_of_chain = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph_of_chain):
        out = chain(x)
    for seed in range(5):
        x.copy_(torch.randn(6, 2048, generator=torch.Generator().manual_seed(seed)))
        args[8].copy_(args[8].roll(1))
        args[6].fill_(float("nan"))
        graph_of_chain.replay()
        torch.cuda.synchronize()
        replayed, pool = out.clone(), args[6].clone()
        args[6].fill_(float("nan"))
        expected = x
        for _ in range(20):
            qkv = skinny_linear(expected, weight)
            torch.cuda.synchronize()
            q = norm_rotate_write(qkv, *args[1:], num_heads=16)
            torch.cuda.synchronize()
            expected = skinny_linear(q.flatten(1), back)
            torch.cuda.synchronize()
        assert torch.equal(replayed, expected) and torch.equal(bits(pool), bits(args[6]))
