"""The choice of tokens as an operation: PyTorch's side of it, its refusals, and how `sample` reaches it."""

import random
from typing import Any

import pytest
import torch

from minipaged.errors import UserError
from minipaged.foundation.philox import seed_tensor
from minipaged.foundation.sampler.ops import sample_tokens
from minipaged.tiers import use
from tests.fake_sequences import choose, oracle, random_logits, sequence

ZERO = torch.zeros(2, dtype=torch.int64)
ONE = torch.ones(2)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1000])
def test_every_row_gets_the_token_of_the_oracle(vocab_size: int) -> None:
    generator = random.Random(vocab_size)
    logits = random_logits(40, vocab_size)
    rows = [
        sequence(
            seed=generator.getrandbits(64),
            output=[0] * generator.randrange(5),
            temperature=generator.choice([0, 0.3, 1, 2.5]),
            top_k=generator.choice([0, 1, 3, vocab_size, vocab_size + 1]),
            top_p=generator.choice([1, 0.05, 0.5, 0.9003]),
            min_p=generator.choice([0, 0.0503, 0.7]),
        )
        for _ in range(40)
    ]
    chosen = sample_tokens(
        logits,
        torch.tensor([float(row.params.temperature or 0) for row in rows]),
        torch.tensor([row.params.top_k for row in rows], dtype=torch.int32),
        torch.tensor([row.params.top_p for row in rows], dtype=torch.float64),
        torch.tensor([row.params.min_p for row in rows], dtype=torch.float64),
        seed_tensor([row.seed for row in rows]),
        torch.tensor([len(row.output_token_ids) for row in rows]),
    )
    assert chosen.tolist() == [oracle(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]


def test_a_limit_that_is_left_out_is_no_limit() -> None:
    logits = random_logits(2, 50)
    none = sample_tokens(logits, ONE, None, None, None, ZERO, ZERO)
    given = (torch.zeros(2, dtype=torch.int32), ONE.double(), 0 * ONE.double())
    assert torch.equal(sample_tokens(logits, ONE, *given, ZERO, ZERO), none)


def test_a_logit_of_minus_0_ties_with_one_of_0() -> None:
    for logits in ([-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -0.0, 0.0]):
        assert {choose([logits], sequence(seed, top_k=2))[0] for seed in range(60)} == {0, 1}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, (None, None, None)),
        ({"top_k": 11, "min_p": 0.0}, (None, None, None)),
        ({"top_k": 3}, ([0, 0, 3], [1, 1, 1], [0, 0, 0])),
        ({"top_p": 0.3}, ([0, 0, 0], [1, 1, 0.3], [0, 0, 0])),
        ({"min_p": 0.3}, ([0, 0, 0], [1, 1, 1], [0, 0, 0.3])),
    ],
)
def test_all_filters_are_given_or_none_and_greedy_rows_have_none(filters: dict[str, Any], expected: Any) -> None:
    seen: list[Any] = []

    def note(logits: torch.Tensor, temperature: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append((temperature.tolist(), *[None if limit is None else limit.tolist() for limit in rest[:3]]))
        return torch.zeros(len(logits), dtype=torch.int64)

    with use(sample_tokens=note):
        choose(random_logits(3, 11), sequence(), sequence(temperature=0, top_k=2, top_p=0.5), sequence(**filters))
    assert seen == [([1, 0, 1], *expected)]


@pytest.mark.parametrize(
    ("logits", "temperature", "message"),
    [
        (torch.zeros(2, 3), torch.ones(3), "every setting must have 2 entries, one per row"),
        (torch.zeros(2, 0), ONE, "the vocabulary must have 1 to 4194304 tokens"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(logits: Any, temperature: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"sample_tokens: {message}"):
        sample_tokens(logits, temperature, None, None, None, ZERO, ZERO)


def test_a_readers_function_chooses_in_the_place_of_the_sampler() -> None:
    def last(logits: torch.Tensor, *settings: Any) -> torch.Tensor:
        assert len(settings) == 6
        return torch.full((len(logits),), logits.shape[1] - 1)

    with use(sample_tokens=last):
        assert choose(random_logits(3, 11), sequence(), sequence(temperature=0), sequence(top_k=2)) == [10, 10, 10]
