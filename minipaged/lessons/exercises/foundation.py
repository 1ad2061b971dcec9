"""Checks of lesson 00: the repeated work, two operations of the decoder, and what a matrix product costs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged.cases import AttentionCase
from minipaged.cases_ops import make_prefill_inputs
from minipaged.foundation import ops, reference
from minipaged.foundation.generate import Engine, EngineOptions
from minipaged.foundation.model import Linear
from minipaged.foundation.sampling_params import SamplingParams
from minipaged.lessons.kit import WrongAnswer, exercise, expect
from minipaged.shapes import Float, Tensor


class CountingModel:
    """Stands in for a model: it counts the rows of every pass, and all its logits are 0."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=4, layer_windows=())
        self.device, self.tier = torch.device("cpu"), "torch"
        self.num_rows = 0

    def forward(self, token_ids: Tensor, positions: Tensor, attend: object, logits_at: Tensor) -> Float[Tensor, "R V"]:
        """Count the tokens and return logits for the rows that are asked for."""
        self.num_rows += len(token_ids)
        return torch.zeros(len(logits_at), self.config.vocab_size)


def count_rows(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Return how many rows the real engine of rung 0 sends through its model for one request."""
    model: Any = CountingModel()
    engine = Engine(model, EngineOptions(max_model_len=1000))
    engine.add_request([1] * num_prompt_tokens, SamplingParams(temperature=0, max_tokens=num_output_tokens))
    while engine.has_unfinished():
        engine.step()
    return model.num_rows


@exercise
def check_rows(answer: Callable[[int, int], int]) -> None:
    """Compare with rows counted in the real engine."""
    for num_prompt, num_output in ((5, 1), (3, 4), (5, 16), (1, 1), (100, 100)):
        expect(
            answer(num_prompt, num_output),
            count_rows(num_prompt, num_output),
            f"a prompt of {num_prompt} tokens and an answer of {num_output}",
            "The first step runs the prompt. Each later step runs one row more than the step before it. The last "
            "token of the answer is chosen in the last step, so it is never run itself.",
        )


@exercise
def check_rms_norm(answer: Callable[..., Any]) -> None:
    """Compare with the product's `rms_norm`, with and without a residual, in fp32 and fp16."""
    by_hand = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0])
    _expect_norm(answer, "x = [[3, 4]], weight = [1, 10], eps = 0, no residual", *by_hand, 0.0)
    zeros = torch.zeros(1, 4)
    expect(
        answer(zeros, torch.ones(4), 1e-6, residual=None), zeros, "a row of zeros, eps = 1e-6", "Add eps to the mean."
    )
    small, hint = torch.tensor([[0.01, 0.02]]), "Add eps to the mean of the squares, before the root is taken."
    expected = ops.rms_norm(small, by_hand[1], 0.01, tier="torch")
    expect(answer(small, by_hand[1], 0.01, residual=None), expected, "x = [[0.01, 0.02]], eps = 0.01", hint)
    x, residual = torch.tensor([[1.0, 2.0], [0.5, -4.0]]), torch.tensor([[2.0, 2.0], [1.0, 1.0]])
    before = x.clone(), residual.clone()
    _expect_norm(answer, f"x = {x.tolist()}, residual = {residual.tolist()}", x, by_hand[1], 1e-5, residual)
    is_unchanged = torch.equal(x, before[0]) and torch.equal(residual, before[1])
    expect(is_unchanged, True, "x and residual stay as they were", "Write x = x + residual, not x += residual.")
    half = torch.tensor([[300.0, -300.0]], dtype=torch.float16)
    normed = answer(half, torch.ones(2, dtype=torch.float16), 1e-6, residual=None)
    given, hint = "x = [[300, -300]] in float16", "300 x 300 is too large for float16: compute in fp32."
    expect(normed, torch.tensor([[1.0, -1.0]]), given, hint)
    expect(normed.dtype, torch.float16, given, "Return the dtype of x.")


def _expect_norm(
    answer: Callable[..., Any], given: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> None:
    actual = answer(x, weight, eps, residual=residual)
    hint = "The root mean square of [3, 4] is ((9 + 16) / 2) ** 0.5. Divide by that of each row, then times the weight."
    if residual is None:
        expect(actual, ops.rms_norm(x, weight, eps, tier="torch"), given, hint)
        return
    if not isinstance(actual, tuple) or len(actual) != 2:
        raise WrongAnswer(f"{given}\nWith a residual two tensors are returned: the normed rows, and x + residual.")
    normed, total = ops.rms_norm(x, weight, eps, residual=residual, tier="torch")
    expect(actual[1], total, f"{given}: the second tensor", "It is x + residual, before the norm.")
    expect(actual[0], normed, f"{given}: the first tensor", "The norm is taken of the sum. " + hint)


ATTENTION_INPUTS = (
    (
        AttentionCase("one head, one sequence of 3 tokens", (3,), 1, 1, 2),
        "Token 0 sees itself alone, token 2 all three.",
    ),
    (AttentionCase("sequences of 2 and 1 tokens", (2, 1), 1, 1, 2), "A sequence must not see the one before it."),
    (
        AttentionCase("4 query heads on 2 KV heads", (4,), 4, 2, 4),
        "Query heads 0 and 1 read KV head 0, 2 and 3 head 1.",
    ),
    (AttentionCase("sequences of 5, 1 and 7 tokens, 9 on 3 heads", (5, 1, 7), 9, 3, 8), "Go sequence by sequence."),
    (AttentionCase("7 tokens and a window of 4", (7,), 2, 1, 4, window=4), "Key j is visible when i - 4 < j <= i."),
)
"""Inputs of `check_causal_attention`, from easy to whole, each with what to look at where it fails."""


@exercise
def check_causal_attention(answer: Callable[..., Tensor]) -> None:
    """Compare with the product's loop over sequences, the smallest inputs first."""
    for case, hint in ATTENTION_INPUTS:
        inputs = make_prefill_inputs(case, torch.float32)
        scale = case.head_dim**-0.5
        actual = answer(*inputs, scale=scale, window=case.window)
        expected = reference.causal_attention(*inputs, scale=scale, window=case.window)
        expect_rows(actual, expected, case.name, hint)
    q, k, v, starts = make_prefill_inputs(ATTENTION_INPUTS[0][0], torch.float32)
    expected = reference.causal_attention(q, k, v, starts, scale=0.3)
    expect_rows(
        answer(q, k, v, starts, scale=0.3, window=None), expected, "scale = 0.3", "Use the scale that is given."
    )
    q, k, v, starts = make_prefill_inputs(LOW_PRECISION, torch.bfloat16)
    expected = reference.causal_attention(q * 8, k, v, starts, scale=0.3)
    expect_low_precision(answer(q * 8, k, v, starts, scale=0.3, window=None), expected)


LOW_PRECISION = AttentionCase("sequences of 33 and 17 tokens, 4 on 2 heads", (33, 17), 4, 2, 16)


def expect_low_precision(actual: Any, expected: Float[Tensor, "T H D"]) -> None:
    """Refuse attention in bfloat16 that differs by more than the rounding of its result.

    Take queries times 8 for it: the scores are then large for the 8 bits of a number in bfloat16.

    Raises:
        WrongAnswer: The dtype or the shape is another one, or a number is too far off.
    """
    expect(getattr(actual, "dtype", None), torch.bfloat16, "q in bfloat16", "Return the dtype of q.")
    expect(actual.shape, expected.shape, "q in bfloat16: the shape of the result", "It is that of q.")
    worst = float((actual.float() - expected.float()).abs().max())
    if not worst < 0.02:  # NaN is refused too
        raise WrongAnswer(
            f"q, k and v in bfloat16, large scores\n  the largest difference to the reference is {worst:.3g}\n"
            "Convert q, k and v with .float() before the scores are computed: bfloat16 has 8 bits of precision."
        )


def expect_rows(actual: Any, expected: Float[Tensor, "T H D"], given: str, hint: str) -> None:
    """Refuse attention that differs anywhere, and name the first row and head where it does.

    Raises:
        WrongAnswer: The shape or a number differs.
    """
    if not isinstance(actual, Tensor) or actual.shape != expected.shape:
        got = tuple(actual.shape) if isinstance(actual, Tensor) else type(actual).__name__
        raise WrongAnswer(f"{given}\n  expected a tensor of shape {tuple(expected.shape)}, got {got}\n{hint}")
    for row in range(expected.shape[0]):
        for head in range(expected.shape[1]):
            place = f"{given}: row {row}, query head {head}"
            expect(actual[row, head], expected[row, head], place, hint)


class Products(TorchDispatchMode):
    """Count the arithmetic of matrix products, and the numbers that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at it."""
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.linear.default):
            x, weight = args[:2]
            self.flops += 2 * out.numel() * x.shape[-1]
            self.moved += x.numel() + weight.numel() + out.numel()
        return out


@exercise
def check_intensity(answer: Callable[..., float]) -> None:
    """Compare with a count of the model's own matrix product, on a device where nothing is computed."""
    for num_rows, num_in, num_out in ((1, 4, 4), (2, 4, 4), (3, 5, 7), (1, 4096, 4096), (256, 576, 1536)):
        weight = torch.empty(num_out, num_in, device="meta")
        with torch.no_grad(), Products() as counted:
            Linear(weight, bias=None)(torch.empty(num_rows, num_in, device="meta"))
        for size in (2, 4):
            value = answer(num_rows, num_in, num_out, size)
            expect(
                round(value, 6) if isinstance(value, int | float) else value,
                round(counted.flops / (counted.moved * size), 6),
                f"num_rows = {num_rows}, num_in = {num_in}, num_out = {num_out}, bytes_per_number = {size}",
                "Each number of the result is num_in times a multiplication and an addition. The rows and the matrix "
                "are read, and the result is written.",
            )
