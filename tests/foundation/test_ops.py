"""Each operation against its definition, and the two PyTorch forms of attention against each other."""

from itertools import pairwise

import pytest
import torch

from minipaged.cases import MAX_ERROR, AttentionCase
from minipaged.cases_ops import PREFILL_CASES, make_prefill_inputs
from minipaged.errors import UserError
from minipaged.foundation import ops, reference
from minipaged.tiers import use


def attention_inputs(name: str) -> tuple[torch.Tensor, ...]:
    """Return the inputs of one case in fp32."""
    return make_prefill_inputs(next(case for case in PREFILL_CASES if case.name == name), torch.float32)


@pytest.mark.parametrize("dtype", MAX_ERROR, ids=str)
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_both_forms_of_causal_attention_agree(case: AttentionCase, dtype: torch.dtype) -> None:
    inputs = make_prefill_inputs(case, dtype)
    copies = [x.clone() for x in inputs]
    by_definition = reference.causal_attention(*inputs, window=case.window)
    fused = ops.causal_attention(*inputs, window=case.window, tier="torch")
    assert fused.dtype == by_definition.dtype == dtype
    torch.testing.assert_close(fused, by_definition, rtol=0, atol=MAX_ERROR[dtype])
    assert all(torch.equal(x, copy) for x, copy in zip(inputs, copies, strict=True)), "an input was changed"


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_causal_attention_equals_its_formula_token_by_token(case: AttentionCase) -> None:
    q, k, v, starts = make_prefill_inputs(case, torch.float32)
    out = reference.causal_attention(q, k, v, starts, scale=0.3, window=case.window)
    group = case.num_heads // case.num_kv_heads
    for row in range(0, q.shape[0], 3):
        start = max(int(s) for s in starts if s <= row)
        first = start if case.window is None else max(start, row - case.window + 1)
        for head in (0, case.num_heads - 1):
            scores = k[first : row + 1, head // group] @ q[row, head] * 0.3
            expected = scores.softmax(0) @ v[first : row + 1, head // group]
            torch.testing.assert_close(out[row, head], expected, rtol=0, atol=MAX_ERROR[torch.float32])


def test_rows_are_bit_equal_alone_and_in_a_batch() -> None:
    q, k, v, starts = attention_inputs("ragged")
    together = reference.causal_attention(q, k, v, starts)
    for start, end in pairwise(starts.tolist()):
        alone = torch.tensor([0, end - start], dtype=torch.int32)
        rows = slice(start, end)
        assert torch.equal(reference.causal_attention(q[rows], k[rows], v[rows], alone), together[rows])


@pytest.mark.parametrize("form", [reference.causal_attention, ops.causal_attention])
def test_a_window_of_4_over_7_tokens_shows_1_2_3_4_4_4_4_keys(form) -> None:
    # With equal scores each visible key weighs 1 / (number of visible keys), and the values are one-hot.
    q = torch.zeros(7, 1, 8)
    v = torch.eye(7, 8)[:, None]
    out = form(q, torch.ones(7, 1, 8), v, torch.tensor([0, 7], dtype=torch.int32), window=4)[:, 0, :7]
    assert (out > 1e-6).sum(dim=1).tolist() == [1, 2, 3, 4, 4, 4, 4]
    visible = [[j for j in range(7) if out[i, j] > 1e-6] for i in range(7)]
    assert visible == [[j for j in range(7) if i - 3 <= j <= i] for i in range(7)]


def test_tiles_of_a_long_window_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs("window-across-tiles")
    monkeypatch.setattr(reference, "MASK_TILE", 16)
    for window in (1, 15, 16, 17, 50):
        fused = reference.causal_attention_sdpa(*inputs, window=window)
        torch.testing.assert_close(
            fused, reference.causal_attention(*inputs, window=window), rtol=0, atol=MAX_ERROR[torch.float32]
        )


def test_a_prompt_of_8192_tokens_needs_no_square_of_scores() -> None:
    length, num_heads = 8192, 2
    x = torch.randn(length, num_heads, 8, dtype=torch.bfloat16)
    starts = torch.tensor([0, length], dtype=torch.int32)
    with torch.profiler.profile(profile_memory=True) as profile:
        reference.causal_attention_sdpa(x, x, x, starts)
        reference.causal_attention_sdpa(x, x, x, starts, window=512)
    allocations = [event.cpu_memory_usage for event in profile.events()]
    assert max(allocations) > 0, "the profiler saw no allocation"
    assert max(allocations) < length * length


def test_rms_norm_gives_rows_of_root_mean_square_1_times_the_weight() -> None:
    x = torch.randn(5, 24) * torch.tensor([1e-3, 1.0, 10.0, 1e3, 1.0])[:, None]
    weight = torch.randn(24)
    expected = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), expected)
    assert torch.equal(ops.rms_norm(torch.zeros(2, 24), weight, 1e-6), torch.zeros(2, 24))


def test_rms_norm_with_a_residual_norms_the_rounded_sum_and_returns_it() -> None:
    x, residual = torch.randn(2, 6, 32).bfloat16()
    before = x.clone(), residual.clone()
    weight = torch.randn(32).bfloat16()
    normed, total = ops.rms_norm(x, weight, 1e-5, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_squares_in_fp32() -> None:
    # 300 squared is beyond fp16's 65,504: a norm computed in fp16 would divide by infinity and give zeros.
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_rotary_turns_the_pairs_i_and_i_plus_half() -> None:
    q, k = torch.randn(5, 3, 8), torch.randn(5, 1, 8)
    angles = torch.randn(5, 4)
    turned_q, turned_k = ops.rotary(q, k, angles.cos(), angles.sin())
    for x, turned in ((q, turned_q), (k, turned_k)):
        as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 4), angles)[:, None]
        torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), dim=-1))


def test_rotary_makes_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    frequencies = 1e4 ** -(torch.arange(8) / 8)

    def score(q_position: int, k_position: int) -> torch.Tensor:
        (turned_q, _), (_, turned_k) = (
            ops.rotary(q, k, (p * frequencies).cos()[None], (p * frequencies).sin()[None])
            for p in (q_position, k_position)
        )
        return (turned_q * turned_k).sum()

    torch.testing.assert_close(score(12, 5), score(107, 100), rtol=0, atol=1e-4)
    assert (score(12, 5) - score(12, 6)).abs() > 1e-3


def test_silu_mul_gates_in_fp32_and_returns_the_input_dtype() -> None:
    gate, up = torch.randn(2, 7, 12).bfloat16()
    exact = gate.double() * gate.double().sigmoid() * up.double()
    out = ops.silu_mul(gate, up)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


def test_every_operation_refuses_arguments_that_do_not_fit() -> None:
    x = torch.randn(2, 4, 8)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(UserError, match="rms_norm: weight must have 8 entries"):
        ops.rms_norm(x[0], torch.ones(1), 1e-6)
    with pytest.raises(UserError, match="rms_norm: residual"):
        ops.rms_norm(x[0], torch.ones(8), 1e-6, residual=x[0, :1])
    with pytest.raises(UserError, match=r"rotary: cos and sin must be \(2, 4\)"):
        ops.rotary(x, x, torch.ones(2, 8), torch.ones(2, 8))
    with pytest.raises(UserError, match="silu_mul"):
        ops.silu_mul(x[0], x[0, :1])
    with pytest.raises(UserError, match="multiple of KV heads"):
        ops.causal_attention(x, x[:, :3], x[:, :3], starts)
    with pytest.raises(UserError, match="window must be at least 1"):
        ops.causal_attention(x, x, x, starts, window=0)


def test_a_tier_that_does_not_exist_is_refused() -> None:
    x = torch.randn(1, 8)
    with pytest.raises(UserError, match="'cuda'"):
        ops.silu_mul(x, x, tier="cuda")  # type: ignore[arg-type]


def test_a_readers_function_takes_the_place_of_each_operation() -> None:
    x = torch.randn(2, 4, 8)
    angles = torch.randn(2, 4)
    starts = torch.tensor([0, 2], dtype=torch.int32)
    calls = []

    def spy(name: str):
        def record(*args, **kwargs):
            assert "tier" not in kwargs
            assert name != "causal_attention" or kwargs["scale"] == 8**-0.5
            calls.append(name)
            return getattr(reference, name)(*args, **kwargs)

        return record

    names = ["rms_norm", "rotary", "silu_mul", "causal_attention"]
    with use(**{name: spy(name) for name in names}):
        ops.rms_norm(x[0], torch.ones(8), 1e-6, residual=x[1])
        ops.rotary(x, x, angles, angles)
        ops.silu_mul(x, x)
        ops.causal_attention(x, x, x, starts, window=1)
    assert calls == names
