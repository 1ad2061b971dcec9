"""The operations above the rungs in plain PyTorch: held to arithmetic written out here, and to what they refuse."""

import pytest
import torch

from minipaged.cases import MAX_ERROR
from minipaged.cases_fast import GATE_UP_CASES, PACKED_CASES, SKINNY_CASES, PackedCase, SkinnyCase
from minipaged.cases_ops import RowCase
from minipaged.errors import UserError
from minipaged.fast.ops import MAX_SKINNY_ROWS, norm_rotate_write, silu_mul_packed, skinny_linear
from minipaged.tiers import use


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", SKINNY_CASES, ids=str)
def test_a_skinny_product_is_the_product_rounded_once(case: SkinnyCase, dtype: torch.dtype):
    x, weight, bias = case.make(dtype)
    exact = torch.einsum("ti,oi->to", x.double(), weight.double()) + (0 if bias is None else bias.double())
    out = skinny_linear(x, weight, bias)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("tier", ["torch", "triton", None])
def test_more_rows_than_a_matrix_instruction_has_are_refused_on_every_tier(tier):
    with pytest.raises(UserError, match="takes up to 16 rows, not 17"):
        skinny_linear(torch.ones(MAX_SKINNY_ROWS + 1, 8), torch.ones(4, 8), tier=tier)


def test_shapes_that_do_not_fit_are_refused_by_name():
    with pytest.raises(UserError, match="skinny_linear: x must have as many columns as the weight"):
        skinny_linear(torch.ones(1, 8), torch.ones(4, 9))
    with pytest.raises(UserError, match="skinny_linear: bias"):
        skinny_linear(torch.ones(1, 8), torch.ones(4, 8), torch.ones(5))
    args = [*PACKED_CASES[0].make_packed(torch.float32)]
    with pytest.raises(UserError, match="norm_rotate_write: qkv must have 144 columns"):
        norm_rotate_write(*args, num_heads=5)
    for place, rule in ((1, "norms"), (4, "cos and sin"), (7, "k_pool and v_pool"), (8, "slot_mapping")):
        wrong = [*args[:place], args[place][..., :0], *args[place + 1 :]]
        with pytest.raises(UserError, match=rule):
            norm_rotate_write(*wrong, num_heads=PACKED_CASES[0].num_heads)


def by_hand(case: PackedCase, token: int, head: int, args: tuple) -> torch.Tensor:
    """Return one normed and turned head of one token in fp64; heads count through q and k."""
    qkv, q_norm, k_norm, eps, cos, sin = args[:6]
    x = qkv[token, head * case.head_dim : (head + 1) * case.head_dim].double()
    weight = q_norm if head < case.num_heads else k_norm
    if weight is not None:
        x = x / (x.square().mean() + eps).sqrt() * weight.double()
    half = case.head_dim // 2
    pairs = torch.view_as_complex(torch.stack((x[:half], x[half:]), dim=-1))
    turned = pairs * torch.complex(cos[token].double(), sin[token].double())
    return torch.cat((turned.real, turned.imag))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_rows_are_normed_turned_and_written_to_their_slots_alone(case: PackedCase, dtype: torch.dtype):
    args = case.make_packed(dtype)
    qkv, k_pool, v_pool, slots = args[0], *args[6:]
    before = qkv.clone()
    q = norm_rotate_write(*args, num_heads=case.num_heads)
    assert torch.equal(qkv, before) and q.dtype == dtype
    tolerance = {"atol": MAX_ERROR[dtype], "rtol": MAX_ERROR[dtype]}
    k_slots, v_slots = (pool.view(-1, *pool.shape[2:]).clone() for pool in (k_pool, v_pool))
    values = qkv.view(case.num_tokens, -1, case.head_dim)[:, case.num_heads + case.num_kv_heads :]
    for token, slot in enumerate(slots.tolist()):
        heads = [by_hand(case, token, head, args) for head in range(case.num_heads + case.num_kv_heads)]
        torch.testing.assert_close(q[token].double(), torch.stack(heads[: case.num_heads]), **tolerance)
        if slot >= 0:
            torch.testing.assert_close(k_slots[slot].double(), torch.stack(heads[case.num_heads :]), **tolerance)
            assert torch.equal(v_slots[slot], values[token])
            k_slots[slot] = v_slots[slot] = float("nan")
    assert k_slots.isnan().all() and v_slots.isnan().all(), "a slot that no token has was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", GATE_UP_CASES, ids=str)
def test_the_first_half_of_a_packed_row_gates_the_second(case: RowCase, dtype: torch.dtype):
    gate_up = case.rows(dtype)
    before, middle = gate_up.clone(), case.width // 2
    gate, up = gate_up[:, :middle].double(), gate_up[:, middle:].double()
    out = silu_mul_packed(gate_up)
    assert out.dtype == dtype and torch.equal(gate_up, before)
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=1e-5, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("tier", ["torch", "triton", None])
def test_rows_without_halves_are_refused_on_every_tier(tier):
    for wrong in (torch.ones(2, 7), torch.ones(8), torch.ones(2, 2, 4)):
        with pytest.raises(UserError, match="silu_mul_packed: gate_up must be rows of even length"):
            silu_mul_packed(wrong, tier=tier)


def test_readers_own_functions_take_the_place_of_all():
    parts = {"skinny_linear": lambda x, weight, bias: "mine", "norm_rotate_write": lambda *args, num_heads: num_heads}
    with use(**parts, silu_mul_packed=lambda gate_up: "gated"):
        assert silu_mul_packed(torch.ones(1, 8)) == "gated"
        assert skinny_linear(torch.ones(1, 8), torch.ones(4, 8)) == "mine"
        assert norm_rotate_write(*PACKED_CASES[0].make_packed(torch.float32), num_heads=4) == 4
