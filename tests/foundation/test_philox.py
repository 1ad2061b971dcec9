"""The random numbers: published vectors, a second implementation, and independence of the batch."""

import math
import random

import pytest
import torch

from minipaged.foundation import philox
from minipaged.foundation.philox import child_seed, gumbel_noise, gumbel_noise_at, philox4x32, seed_tensor

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def philox_in_python_integers(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (product_1 >> 32) ^ c[1] ^ k[0],
            product_1 % 2**32,
            (product_0 >> 32) ^ c[3] ^ k[1],
            product_0 % 2**32,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise_in_python_floats(seed: int, output_index: int, token_id: int) -> float:
    words = philox_in_python_integers([token_id >> 2, output_index, 0, 0], [seed % 2**32, seed >> 32])
    return -math.log(-math.log(((words[token_id & 3] >> 9) + 0.5) / 2**23))


def from_hex(words: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in words.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_published_vectors_come_out(counter: str, key: str, expected: str) -> None:
    words = philox4x32(tuple(from_hex(counter)), tuple(from_hex(key)))
    assert " ".join(f"{word.item():08x}" for word in words) == expected


def test_many_counters_at_once_equal_an_implementation_in_python_integers() -> None:
    generator = random.Random(0)
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    table = [
        [generator.choice(edges) if generator.random() < 0.3 else generator.getrandbits(32) for _ in range(6)]
        for _ in range(500)
    ]
    columns = [torch.tensor(column) for column in zip(*table, strict=True)]
    words = philox4x32(tuple(columns[:4]), tuple(columns[4:]))
    assert torch.stack(words, dim=1).tolist() == [philox_in_python_integers(row[:4], row[4:]) for row in table]


@pytest.mark.parametrize("seed", [0, 1, 42, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_the_noise_of_a_token_is_what_the_module_says(seed: int) -> None:
    output_indices = [0, 7, 2**32 - 1]
    noise = gumbel_noise(seed_tensor([seed] * 3), torch.tensor(output_indices), 11, "cpu")
    expected = [[noise_in_python_floats(seed, index, token_id) for token_id in range(11)] for index in output_indices]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_the_number_in_the_module_docstring_is_right() -> None:
    noise = gumbel_noise(seed_tensor([0]), torch.tensor([0]), 1, "cpu").item()
    assert f"{noise:.5f}" == "0.08482"
    assert "g = 0.08482" in (philox.__doc__ or "")


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 1021, 4099])
def test_a_row_of_noise_does_not_depend_on_the_batch(vocab_size: int) -> None:
    seeds, indices = seed_tensor([5, 2**64 - 5, 5, 9]), torch.tensor([0, 3, 1, 3])
    together = gumbel_noise(seeds, indices, vocab_size, "cpu")
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], indices[row : row + 1], vocab_size, "cpu")
        assert torch.equal(alone[0], together[row])


def test_noise_at_some_tokens_equals_the_noise_of_the_whole_row() -> None:
    seeds, indices = seed_tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    token_ids = torch.randint(5003, (3, 301), generator=torch.Generator().manual_seed(0))
    whole = gumbel_noise(seeds, indices, 5003, "cpu")
    assert torch.equal(gumbel_noise_at(seeds, indices, token_ids), whole.gather(1, token_ids))


def test_noise_is_finite_for_the_smallest_and_the_largest_word() -> None:
    noise = philox._to_gumbel(torch.tensor([[0, 511, 2**31, 2**32 - 1]]))
    assert torch.isfinite(noise).all()
    assert noise[0, 0] == noise[0, 1] == noise.min()
    assert noise[0, 3] == noise.max()


def test_noise_has_the_mean_and_the_variance_of_the_gumbel_distribution() -> None:
    noise = gumbel_noise(seed_tensor(range(20)), torch.arange(20), 10_000, "cpu").double()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_seed_output_index_and_token_each_change_the_noise() -> None:
    seeds = seed_tensor([1, 2, 1 + 2**32, 1])
    noise = gumbel_noise(seeds, torch.tensor([0, 0, 0, 1]), 1000, "cpu")
    assert noise.flatten().unique().numel() > 3990


def test_child_0_keeps_the_seed_and_the_others_get_their_own() -> None:
    for seed in (0, 42, 2**64 - 1):
        seeds = [child_seed(seed, index) for index in range(50)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 50
        assert all(0 <= child < 2**64 for child in seeds)
        words = philox_in_python_integers([3, 0, 0, 1], [seed % 2**32, seed >> 32])
        assert seeds[3] == words[0] + words[1] * 2**32


def test_drawn_seeds_differ_and_survive_a_double() -> None:
    seeds = {philox.draw_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)
