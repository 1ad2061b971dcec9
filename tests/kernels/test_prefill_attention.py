"""Attention over whole prompts that lie side by side: right, guarded, and the same in any company."""

import pytest
import torch

from minipaged.cases import AttentionCase
from minipaged.cases_ops import PREFILL_CASES, make_prefill_inputs
from minipaged.foundation import reference
from minipaged.foundation.ops import causal_attention
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

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def exact(inputs: Inputs, case: AttentionCase) -> torch.Tensor:
    q, k, v, starts = inputs
    out = torch.zeros(q.shape, dtype=torch.float64)
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        for token in range(start, end):
            out[token] = exact_attention(q[token], k[start : token + 1], v[start : token + 1], case)
    return out


def prefill(inputs: Inputs, window: int | None = None) -> torch.Tensor:
    return run_kernel(causal_attention, *inputs, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_causal_attention_agrees_with_exact_attention(case: AttentionCase, dtype: torch.dtype):
    inputs = make_prefill_inputs(case, dtype, DEVICE)
    with guarded_outputs(case.head_dim):
        out = causal_attention(*inputs, window=case.window, tier="triton")
    loop = reference.causal_attention(*inputs, window=case.window)
    assert_agrees(out, loop, exact(inputs, case))


def test_fp32_products_are_exact_and_not_rounded_to_tf32():
    case = AttentionCase("128 keys", (128,), num_heads=2, num_kv_heads=1, head_dim=64)
    inputs = make_prefill_inputs(case, torch.float32, DEVICE)
    assert (prefill(inputs).double().cpu() - exact(inputs, case)).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("window", [None, 21])
def test_a_prompt_gives_the_same_bits_alone_and_anywhere_in_a_batch_of_64(window: int | None, dtype: torch.dtype):
    lengths = (*(29 * i % 60 + 1 for i in range(63)), 150)
    case = AttentionCase("batch-of-64", lengths, num_heads=2, num_kv_heads=1)
    q, k, v, starts = make_prefill_inputs(case, dtype, DEVICE)
    together = prefill((q, k, v, starts), window)
    for row in (0, 31, 62, 63):
        own = slice(int(starts[row]), int(starts[row + 1]))
        alone = (q[own].clone(), k[own].clone(), v[own].clone(), starts.new_tensor([0, case.seq_lens[row]]))
        assert torch.equal(prefill(alone, window), together[own])


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, for what the neighbour itself computes
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_neighbour_full_of_nan_or_inf_is_not_seen(poison: float):
    case = AttentionCase("three", (9, 40, 33))
    inputs = make_prefill_inputs(case, torch.float16, DEVICE)
    clean = prefill(inputs)
    for tensor in inputs[:3]:
        tensor[9:49] = poison
    dirty = prefill(inputs)
    for own in (slice(0, 9), slice(49, 82)):
        assert torch.equal(clean[own], dirty[own])


def test_each_token_sees_the_window_s_newest_tokens_and_itself():
    v = (2.0 ** torch.arange(7, device=DEVICE)).view(7, 1, 1).expand(7, 1, 16).contiguous()
    starts = torch.tensor([0, 7], dtype=torch.int32, device=DEVICE)
    means = prefill((torch.zeros_like(v), v, v, starts), window=4)[:, 0, 0].tolist()
    sums = [round(mean * count) for mean, count in zip(means, (1, 2, 3, 4, 4, 4, 4), strict=True)]
    assert sums == [0b1, 0b11, 0b111, 0b1111, 0b11110, 0b111100, 0b1111000]


def test_no_tokens_launch_nothing():
    q, k, v, starts = make_prefill_inputs(AttentionCase("empty", (0, 0)), torch.float32, DEVICE)
    assert prefill((q, k, v, starts)).shape == (0, 4, 16)
