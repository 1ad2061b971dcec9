"""Choosing tokens: extreme values, penalties, the distribution, seeds and log-probabilities."""

import dataclasses
import json
import math
import random
from typing import Any

import pytest
import torch

from minipaged.foundation.philox import child_seed
from minipaged.foundation.sampling import InvalidLogitsError, sample
from tests.fake_sequences import choose, random_logits, sequence

GAP = [[0.0, 20.0, 0.0, -20.0, 0.0, 0.0, 0.0, -math.inf]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-45, 1e-6, 1e-4])
def test_a_tiny_temperature_takes_the_best_token(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.tensor(GAP, dtype=dtype)
    for top_p in (1e-6, 1, 0.5):
        for top_k in (-1, 0, 1, 5, 9, 9999999, 10**30):
            assert choose(logits, sequence(temperature=temperature, top_p=top_p, top_k=top_k)) == [1]


@pytest.mark.parametrize("temperature", [2, 1e4, 1e38, 1e300])
def test_a_huge_temperature_gives_a_valid_token(temperature: float) -> None:
    for dtype in (torch.float16, torch.float32):
        logits = torch.tensor(GAP, dtype=dtype)
        chosen = {choose(logits, sequence(seed, temperature=temperature))[0] for seed in range(200)}
        assert chosen <= set(range(7))
        assert temperature == 2 or len(chosen) == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits_make_no_nan(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[-largest, largest, largest, -math.inf, 0.0]], dtype=dtype)
    for params in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 1e-6}):
        chosen = {choose(logits, sequence(seed, **params))[0] for seed in range(30)}
        assert chosen == {1, 2}, params


@pytest.mark.parametrize("top_p", [1e-300, 1e-6, 0.2])
def test_a_top_p_below_the_best_probability_keeps_exactly_the_best_token(top_p: float) -> None:
    logits = random_logits(1, 1000).clamp(max=5)  # several equal best tokens
    best = int(logits[0].max(dim=0).indices)
    logits[0, best + 1 :] -= 0.5
    top_p = min(top_p, logits[0].softmax(-1).max().item() * 0.99)
    assert {choose(logits, sequence(seed, top_p=top_p))[0] for seed in range(50)} == {best}


def test_each_row_of_a_mixed_batch_follows_its_own_values() -> None:
    logits = random_logits(1, 50).repeat(3, 1)
    order = logits[0].argsort(descending=True).tolist()
    seen: list[set[int]] = [set(), set(), set()]
    for seed in range(400):
        rows = [
            sequence(seed, temperature=0),
            sequence(seed, temperature=5, top_k=5),
            sequence(seed, temperature=5),
        ]
        for row, token_id in enumerate(choose(logits, *rows)):
            seen[row].add(token_id)
    assert seen[0] == {order[0]}
    assert seen[1] == set(order[:5])
    assert len(seen[2]) > 30


def test_logits_are_not_changed_and_an_empty_batch_is_fine() -> None:
    logits = random_logits(2, 40)
    before = logits.clone()
    sample(logits, [sequence(repetition_penalty=2, min_tokens=1, end=[3]), sequence(top_p=0.5, logprobs=2)])
    assert torch.equal(logits, before)
    assert sample(torch.empty(0, 40), []) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_row_without_a_finite_best_logit_raises_and_is_named(bad: float, temperature: float) -> None:
    logits = random_logits(3, 20)
    logits[1] = bad
    with pytest.raises(InvalidLogitsError, match="sequence 1 of the batch") as error:
        sample(logits, [sequence(temperature=temperature)] * 3)
    assert error.value.rows == [1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_single_bad_logit_raises_too(bad: float) -> None:
    logits = random_logits(3, 20)
    logits[2, 7] = bad
    with pytest.raises(InvalidLogitsError) as error:
        sample(logits, [sequence()] * 3)
    assert error.value.rows == [2]


def test_the_repetition_penalty_counts_prompt_and_output() -> None:
    logits = [[2.0, 1.9, 1.8, -5.0]]
    assert choose(logits, sequence(temperature=0, repetition_penalty=1.5, prompt=[0])) == [1]
    assert choose(logits, sequence(temperature=0, repetition_penalty=1.5, prompt=[0], output=[1])) == [2]
    assert choose([[-1.0, -1.2]], sequence(temperature=0, repetition_penalty=1.5, prompt=[0])) == [1]


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = [[2.0, 1.5, 0.0]]
    for name in ("presence_penalty", "frequency_penalty"):
        assert choose(logits, sequence(temperature=0, prompt=[0, 0, 0], **{name: 1})) == [0]
        assert choose(logits, sequence(temperature=0, prompt=[2], output=[0], **{name: 1})) == [1]
    twice = sequence(temperature=0, output=[0, 0, 1], frequency_penalty=0.4)
    assert choose(logits, twice) == [0]
    assert choose(logits, sequence(temperature=0, output=[0, 0, 0, 1], frequency_penalty=0.4)) == [1]
    assert choose(logits, sequence(temperature=0, output=[0, 0, 0, 1], presence_penalty=0.4)) == [0]


def test_an_extreme_repetition_penalty_makes_no_nan() -> None:
    for penalty in (1e-300, 1e-40, 1e3):
        logits = [[3.0, 0.0, -3.0, 1.0]]
        assert choose(logits, sequence(repetition_penalty=penalty, prompt=[0, 1, 2]))[0] in range(4)


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_end_token_is_chosen_before_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 30.0, 40.0, 0.5]])
    for output, expected in (([], {0, 1, 4}), ([1], {0, 1, 4}), ([1, 1], {3}), ([1, 1, 1], {3})):
        sequences = [
            sequence(seed, temperature=temperature, min_tokens=2, output=output, end=[2, 3, 10**9])
            for seed in range(40)
        ]
        assert set(choose(logits.repeat(40, 1), *sequences)) <= expected


def test_a_row_whose_tokens_are_all_banned_raises() -> None:
    with pytest.raises(InvalidLogitsError):
        choose([[0.0, 1.0]], sequence(min_tokens=1, end=[0, 1]))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
@pytest.mark.parametrize("by", ["seed", "output index"])
def test_chosen_tokens_follow_the_softmax(params: dict[str, Any], by: str) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 0.5, 1.2, -0.3])
    count = 4000
    probabilities = (logits.double() / params.get("temperature", 1)).softmax(-1)
    order = probabilities.argsort(descending=True)
    is_kept = torch.ones(6, dtype=torch.bool)
    if "top_k" in params:
        is_kept[order[4:]] = False
    if "top_p" in params:
        is_kept[order[probabilities[order].cumsum(0) - probabilities[order] >= 0.8]] = False
    if "min_p" in params:
        is_kept[probabilities < 0.2 * probabilities.max()] = False
    probabilities = torch.where(is_kept, probabilities, 0)
    probabilities /= probabilities.sum()
    if by == "seed":
        sequences = [sequence(seed, **params) for seed in range(count)]
    else:
        first = sequence(7, **params)
        sequences = [dataclasses.replace(first, output_token_ids=range(index)) for index in range(count)]
    observed = torch.bincount(torch.tensor(choose(logits.repeat(count, 1), *sequences)), minlength=6)
    assert observed[~is_kept].sum() == 0
    expected = probabilities[is_kept] * count
    chi_square = ((observed[is_kept] - expected) ** 2 / expected).sum().item()
    assert len(expected) >= 3
    assert chi_square < 20.5  # the 0.999 quantile at 5 degrees of freedom


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 3},
    {"top_k": 600, "top_p": 0.95, "min_p": 0.01},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0, "logprobs": 20},
    {"logprobs": 3, "presence_penalty": 1},
]


@pytest.mark.parametrize("vocab_size", [50, 1021, 9973])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bit_equal_alone_and_in_any_batch(vocab_size: int, dtype: torch.dtype) -> None:
    logits = random_logits(len(MIXED), vocab_size).to(dtype)
    sequences = [sequence(100 + row, output=range(row), **params) for row, params in enumerate(MIXED)]
    alone = [sample(logits[row : row + 1], [seq])[0] for row, seq in enumerate(sequences)]
    assert sample(logits, sequences) == alone
    order = list(range(len(MIXED)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        for chosen in (order, order[:4], order[4:]):
            assert sample(logits[chosen], [sequences[row] for row in chosen]) == [alone[row] for row in chosen]


def run_16_steps(seeds: list[int], watched: int) -> list[int]:
    """Generate 16 tokens from logits that depend on each sequence's own last token only."""
    table = random_logits(64, 64)
    sequences = [sequence(seed, prompt=[1], temperature=0.8) for seed in seeds]
    for _ in range(16):
        last = [(seq.prompt_token_ids + seq.output_token_ids)[-1] for seq in sequences]
        for seq, token_id in zip(sequences, choose(table[last], *sequences), strict=True):
            seq.output_token_ids.append(token_id)
    return sequences[watched].output_token_ids


def test_a_seeded_sequence_is_the_same_next_to_seeded_and_unseeded_neighbours() -> None:
    alone = run_16_steps([42], 0)
    for repeat in range(5):
        unseeded = 1000 + repeat
        assert run_16_steps([42, unseeded], 0) == alone
        assert run_16_steps([42, 7], 0) == alone
        assert run_16_steps([unseeded, 42], 1) == alone
    assert len({tuple(run_16_steps([seed], 0)) for seed in range(20)}) == 20


def test_children_of_one_seed_differ_and_come_again() -> None:
    seeds = [child_seed(42, index) for index in range(3)]
    children = [run_16_steps(seeds, index) for index in range(3)]
    assert children[0] == run_16_steps([42], 0)
    assert len({tuple(child) for child in children}) == 3
    assert [run_16_steps([5, *seeds], index + 1) for index in range(3)] == children


RAW = [-0.4402, -1.4402, -2.4402, -3.4402]


@pytest.mark.parametrize("temperature", [1, 0.5, 0, 1e-6])
@pytest.mark.parametrize("top_p", [1, 0.5])
@pytest.mark.parametrize(
    "penalties", [{}, {"repetition_penalty": 3.0, "presence_penalty": 2}, {"min_tokens": 3, "end": [0]}]
)
def test_logprobs_are_those_of_the_raw_distribution(
    temperature: float, top_p: float, penalties: dict[str, Any]
) -> None:
    seq = sequence(temperature=temperature, top_p=top_p, logprobs=3, output=[1], **penalties)
    token = sample(torch.tensor([[1.0, 0.0, -1.0, -2.0]]), [seq])[0]
    assert token.logprob is not None
    assert token.logprob.token_id == token.token_id
    assert token.logprob.logprob == pytest.approx(RAW[token.token_id], abs=1e-4)
    assert [token_id for token_id, _ in token.logprob.top] == [0, 1, 2]
    assert [value for _, value in token.logprob.top] == pytest.approx(RAW[:3], abs=1e-4)


def test_the_number_of_alternatives_is_what_each_row_asked_for() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, -2.0]]).repeat(4, 1)
    tokens = sample(logits, [sequence(temperature=0, logprobs=k) for k in (None, 0, 2, 20)])
    assert tokens[0].logprob is None
    assert [len(token.logprob.top) for token in tokens[1:] if token.logprob] == [0, 2, 4]
    assert all(token.logprob.logprob == pytest.approx(RAW[0], abs=1e-4) for token in tokens[1:] if token.logprob)


def test_alternatives_with_equal_values_come_by_rising_id() -> None:
    token = sample(torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]), [sequence(logprobs=4)])[0]
    assert token.logprob is not None
    assert [token_id for token_id, _ in token.logprob.top] == [1, 3, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logprobs_of_impossible_tokens_are_finite_numbers_for_json(dtype: torch.dtype) -> None:
    token = sample(torch.tensor([[50.0, -math.inf, 0.0]], dtype=dtype), [sequence(temperature=0, logprobs=3)])[0]
    json.dumps(dataclasses.asdict(token), allow_nan=False)
    assert token.logprob is not None
    assert token.logprob.top[-1] == (1, -9999.0)
