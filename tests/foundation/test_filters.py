"""top_k, top_p and min_p, alone, together and in one batch with everything else, against an oracle."""

import random
from typing import Any

import pytest
import torch

from minipaged.foundation import filters
from tests.fake_sequences import Sequence, choose, oracle, random_logits, sequence


def random_sequence(generator: random.Random, vocab_size: int) -> Sequence:
    def pick(*values: Any) -> Any:
        return generator.choice(values)

    output = [generator.randrange(vocab_size) for _ in range(generator.randrange(6))]
    return sequence(
        seed=generator.getrandbits(64),
        prompt=[generator.randrange(vocab_size) for _ in range(3)],
        output=output * 2,
        end=[generator.randrange(vocab_size) for _ in range(2)],
        temperature=pick(0, 0.3, 1, 1, 2.5),
        top_k=pick(-1, 0, 1, 3, 40, vocab_size - 1, vocab_size, vocab_size + 1),
        top_p=pick(1, 1, 0.05, 0.5, 0.9003, 0.9999),
        min_p=pick(0, 0, 0.0503, 0.7),
        repetition_penalty=pick(1, 1, 1.3, 0.7),
        presence_penalty=pick(0, 0, 1.1, -1.1),
        frequency_penalty=pick(0, 0, 0.6),
        min_tokens=pick(0, 4),
    )


@pytest.mark.parametrize("vocab_size", [2, 7, 300, 3001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_equals_the_oracle_row_by_row(vocab_size: int, dtype: torch.dtype) -> None:
    generator = random.Random(vocab_size)
    for round_number in range(6):
        logits = random_logits(16, vocab_size, round_number).to(dtype)
        sequences = [random_sequence(generator, vocab_size) for _ in range(16)]
        for seq in sequences:  # two end tokens of a vocabulary of two leave nothing to choose
            seq.end_token_ids = frozenset(list(seq.end_token_ids)[: vocab_size - 1])
        expected = [oracle(row, seq) for row, seq in zip(logits, sequences, strict=True)]
        assert choose(logits, *sequences) == expected


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 9, "top_p": 0.3}])
def test_ties_at_the_boundary_go_to_the_lower_ids(params: dict[str, Any]) -> None:
    for vocab_size in (10, 700):  # above 512 tokens are looked up in two goes
        logits = torch.full((1, vocab_size), -60.0)
        logits[0, -10:] = 1.5
        first = vocab_size - 10
        expected = set(range(first, first + 3))
        assert {choose(logits, sequence(seed, **params))[0] for seed in range(300)} == expected


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [77, 1234, 4999]] = 3
    assert choose(logits, sequence(temperature=0), sequence(temperature=0)) == [77, 0]
    assert choose(logits.bfloat16(), sequence(temperature=0), sequence(temperature=0)) == [77, 0]


@pytest.mark.parametrize("params", [{}, {"top_k": 5}])
def test_equal_sums_of_score_and_noise_go_to_the_lowest_id(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([[0.0, 1.0, 4.0, 2.0, 5.0, 3.0]])
    monkeypatch.setattr(filters, "gumbel_noise", lambda *_: 5 - logits)
    assert choose(logits, sequence(**params)) == [1 if params else 0]


def test_min_p_1_keeps_all_tokens_equal_to_the_best() -> None:
    logits = [[2.0, 1.9, 2.0, 2.0]]
    assert {choose(logits, sequence(seed, min_p=1))[0] for seed in range(100)} == {0, 2, 3}


def test_top_p_counts_the_distribution_that_top_k_left() -> None:
    # Probabilities 0.4, 0.3, 0.2, 0.1; the best two alone are 4/7 and 3/7, so 0.5 keeps one of them.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert {choose(logits, sequence(seed, top_k=2, top_p=0.5))[0] for seed in range(100)} == {0}
    assert {choose(logits, sequence(seed, top_p=0.5))[0] for seed in range(100)} == {0, 1}


def test_filters_come_after_the_temperature() -> None:
    logits = torch.tensor([[0.6, 0.4]]).log()
    assert {choose(logits, sequence(seed, top_p=0.55))[0] for seed in range(100)} == {0}
    assert {choose(logits, sequence(seed, top_p=0.55, temperature=3))[0] for seed in range(100)} == {0, 1}


def test_a_flat_row_needs_more_than_the_first_candidates_and_gets_them() -> None:
    logits = random_logits(1, 20_000) * 0.01
    seq = sequence(top_p=0.9)
    for seq.seed in range(5):
        assert choose(logits, seq) == [oracle(logits[0], seq)]
    assert len({choose(logits, sequence(seed, top_p=0.9))[0] for seed in range(20)}) == 20


@pytest.mark.parametrize("top_k", [511, 512, 513, 8192, 8193])
def test_a_top_k_about_the_number_of_candidates_equals_the_oracle(top_k: int) -> None:
    logits = random_logits(1, 9000) * 0.01
    for params in ({"top_p": 1}, {"top_p": 0.999}):
        seq = sequence(top_k=top_k, **params)
        for seq.seed in range(3):
            assert choose(logits, seq) == [oracle(logits[0], seq)]
