"""The choice of tokens: kernels against PyTorch, row by row, at every kind of filter and every size of its bracket."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from minipaged.foundation.philox import gumbel_noise, seed_tensor
from minipaged.foundation.sampler import kernels
from minipaged.foundation.sampler.cut import kernels as cut
from minipaged.foundation.sampler.ops import sample_tokens
from tests.kernels.helpers import DEVICE, DTYPES, NEEDS_GPU, ON_DEVICE, run_kernel

pytestmark = ON_DEVICE

LARGE = 151_936


@dataclass
class Settings:
    """The arguments of ``sample_tokens`` behind the logits."""

    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    seeds: torch.Tensor
    output_indices: torch.Tensor

    def row(self, index: int) -> "Settings":
        rows: list[Any] = [None if x is None else x[index : index + 1] for x in vars(self).values()]
        return Settings(*rows)


def settings(num_rows: int, **values: Any) -> Settings:
    """Return settings for all rows alike, or a value per row where a list is given; seeds count up."""

    def column(name: str, default: Any, dtype: torch.dtype) -> torch.Tensor | None:
        value = values.get(name, default)
        if value is None:
            return None
        return torch.tensor(value if isinstance(value, list) else [value] * num_rows, dtype=dtype, device=DEVICE)

    temperature = column("temperature", 1.0, torch.float32)
    assert temperature is not None
    return Settings(
        temperature,
        column("top_k", None, torch.int32),
        column("top_p", None, torch.float64),
        column("min_p", None, torch.float64),
        torch.arange(num_rows, device=DEVICE) + values.get("seed", 0),
        torch.arange(num_rows, device=DEVICE) % 7,
    )


def random_settings(num_rows: int, vocab_size: int, seed: int = 0) -> Settings:
    """Return rows that mix greedy ones, plain random ones, and all filters alone and together."""
    generator = random.Random(seed)

    def pick(*choices: float) -> list[float]:
        return [generator.choice(choices) for _ in range(num_rows)]

    mixed = settings(
        num_rows,
        temperature=pick(0, 0.3, 1, 1, 2.5, 1e-6),
        top_k=pick(0, 0, 1, 3, 40, max(vocab_size - 1, 0), vocab_size, vocab_size + 1),
        top_p=pick(1, 1, 0.05, 0.5, 0.9003, 0.9999, 1e-6),
        min_p=pick(0, 0, 0, 0.0503, 0.7),
    )
    return replace(mixed, seeds=seed_tensor([generator.getrandbits(64) for _ in range(num_rows)], DEVICE))


def random_logits(num_rows: int, vocab_size: int, spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(DEVICE, dtype)


def choose(logits: torch.Tensor, given: Settings) -> list[int]:
    return run_kernel(sample_tokens, logits, *vars(given).values()).tolist()


def assert_agrees(logits: torch.Tensor, given: Settings) -> list[int]:
    """Choose in both tiers. They may differ where two sums of score and noise are as close as their rounding."""
    chosen = choose(logits, given)
    expected = sample_tokens(logits, *vars(given).values(), tier="torch").tolist()
    for row in (row for row, pair in enumerate(zip(chosen, expected, strict=True)) if pair[0] != pair[1]):
        noise = gumbel_noise(given.seeds[row : row + 1], given.output_indices[row : row + 1], logits.shape[1], DEVICE)
        both = torch.tensor([chosen[row], expected[row]], device=DEVICE)
        sums = (logits[row].double() / given.temperature[row] + noise[0])[both]
        assert (sums[0] - sums[1]).abs() < 1e-5, (row, chosen[row], expected[row], given.row(row))
    return chosen


SMALL = [(vocab_size, spread) for vocab_size in (1, 2, 7, 300) for spread in (3.0, 0.01, 0.0)]


@pytest.mark.parametrize(("vocab_size", "spread"), [*SMALL, (2048, 0.0), (2048, 3.0), (2049, 0.01), (5001, 3.0)])
def test_mixed_rows_get_the_tokens_of_the_torch_tier(vocab_size: int, spread: float):
    assert_agrees(random_logits(6, vocab_size, spread), random_settings(6, vocab_size, seed=vocab_size))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision_logits_with_many_ties_get_the_tokens_of_the_torch_tier(dtype: torch.dtype):
    assert_agrees(random_logits(8, 3001, 3.0, dtype), random_settings(8, 3001, seed=1))


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return a list that will hold what the launches of the latest call left for each other."""
    kept: list[torch.Tensor] = []
    make_rooms = kernels._make_rooms

    def make_and_keep(*args: Any) -> tuple[torch.Tensor, ...]:
        kept[:] = made = make_rooms(*args)
        return made

    monkeypatch.setattr(kernels, "_make_rooms", make_and_keep)
    return kept


def num_kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1, min_p: float = 0) -> int:
    """Return how many tokens of a row at temperature 1 the filters keep, from a sorted row in double precision."""
    scores = (logits - logits.max()).double().sort(descending=True).values
    kept = scores[: top_k or None]
    before = kept.exp().cumsum(0) - kept.exp()
    kept = kept[before < top_p * kept.exp().sum()]
    return int((kept >= math.log(min_p or 1e-300)).sum().item())


def num_cut(logits: torch.Tensor, rooms: list[torch.Tensor], row: int, min_p: float) -> int:
    """Return how many tokens of a row lie up to the last key that the kernels found, and above min_p."""
    num_before, last_key = rooms[3][row, 2].item(), rooms[5][row].item()
    gaps = (logits - logits.max()).abs()
    keys = (gaps.view(torch.int32).long() << (len(logits) - 1).bit_length()) + torch.arange(len(logits), device=DEVICE)
    num_up_to_key = num_before if last_key < 0 else (keys <= last_key).sum().item()
    return int(min(num_up_to_key, (-gaps >= math.log(min_p or 1e-300)).sum().item()))


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"top_k": 3000},
        {"top_k": 500, "top_p": 0.8},
        {"min_p": 0.2},
        {"min_p": 0.05, "top_p": 0.9},
        {"min_p": 0.2, "top_k": 2500},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.03, 0.3, 1.0])
def test_the_last_kept_token_of_many_is_that_of_a_sorted_row(
    spread: float, filters: dict[str, Any], rooms: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    logits, given = random_logits(1, 30_001 if DEVICE.type == "cuda" else 4501, spread), settings(1, **filters)
    if DEVICE.type == "cpu":  # a compiled kernel cannot be changed any more
        monkeypatch.setattr(cut, "search_row", lambda *_: pytest.fail("the last resort was taken"))
    assert_agrees(logits, given)
    assert rooms[3][0, 3].item() <= cut.CAPACITY.value
    expected = num_kept(logits[0], **filters)
    assert num_cut(logits[0], rooms, 0, filters.get("min_p", 0)) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [({"top_k": 1500}, 1500), ({"top_p": 0.5}, 1497), ({"top_k": 2000, "top_p": 0.5}, 1000)],
    ids=str,
)
def test_more_equal_tokens_than_can_be_collected_are_cut_at_the_right_id(
    filters: dict[str, Any], expected: int, rooms: list[torch.Tensor]
):
    logits = torch.zeros(1, 3001, device=DEVICE)
    logits[0, :7] = -100
    [token] = assert_agrees(logits, settings(1, **filters))
    assert 7 <= token < 7 + expected
    assert num_cut(logits[0], rooms, 0, 0) == expected


def test_a_top_k_of_more_than_can_be_collected_may_stand_beside_the_other_filters(rooms: list[torch.Tensor]):
    logits, filters = random_logits(1, 3001, 0.5), {"top_k": 2000, "top_p": 0.9, "min_p": 0.05}
    assert_agrees(logits, settings(1, **filters))
    assert rooms[3][0, 3].item() > cut.CAPACITY.value
    assert num_cut(logits[0], rooms, 0, 0.05) == pytest.approx(num_kept(logits[0], **filters), abs=1)


def test_top_p_counts_the_distribution_that_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], device=DEVICE).log().expand(20, 4).contiguous()
    assert set(choose(logits, settings(20, top_k=2, top_p=0.5))) == {0}  # 4/7 and 3/7
    assert set(choose(logits, settings(20, top_p=0.5))) == {0, 1}


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 9, "top_p": 0.3}], ids=str)
def test_ties_at_the_cut_go_to_the_lower_ids(filters: dict[str, Any]):
    logits = torch.full((30, 300), -60.0, device=DEVICE)
    logits[:, -10:] = 1.5
    assert set(choose(logits, settings(30, **filters))) == {290, 291, 292}


@pytest.mark.parametrize("logits", [[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -0.0, 0.0]])
def test_a_logit_of_minus_0_ties_with_one_of_0(logits: list[float]):
    same = torch.tensor(logits, device=DEVICE).expand(15, 4).contiguous()
    for filters in ({"top_k": 2}, {"top_p": 0.5}):
        assert set(assert_agrees(same, settings(15, **filters))) == {0, 1}
    assert_agrees(same, settings(15))
    assert choose(same[:1], settings(1, temperature=0)) == [0]


def test_greedy_rows_take_the_first_of_the_largest_in_any_tile():
    logits = torch.zeros(3, 5000, device=DEVICE)
    logits[0, [77, 1234, 4999]] = 3
    logits[1, [2048, 4096]] = 3
    logits[2, 1::2] = -0.0
    assert choose(logits, settings(3, temperature=0)) == [77, 2048, 0]
    assert choose(logits, settings(3, temperature=0, top_k=5, top_p=0.5)) == [77, 2048, 0]


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # by NumPy, under the interpreter
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-45, 1e-6, 1e-4])
def test_a_tiny_temperature_takes_the_largest_logit(temperature: float, filters: dict[str, Any]):
    logits = random_logits(4, 300, 3.0)
    logits[:, 123] = 20
    assert choose(logits, settings(4, temperature=temperature, **filters)) == [123] * 4


def test_a_tiny_top_p_keeps_the_best_token_and_a_top_k_above_the_vocabulary_all():
    logits = random_logits(4, 300, 0.01)
    assert choose(logits, settings(4, top_p=1e-9)) == logits.argmax(-1).tolist()
    free = choose(logits, settings(4))
    assert choose(logits, settings(4, top_k=301)) == choose(logits, settings(4, top_k=10**9)) == free
    assert choose(logits, settings(4, top_k=0, top_p=1.0, min_p=0.0)) == free != logits.argmax(-1).tolist()


def test_a_row_that_has_no_best_token_gives_minus_1_and_leaves_the_others_alone():
    logits = random_logits(5, 2100, 3.0)
    logits[1, 5], logits[2, 2099], logits[3] = math.nan, math.inf, -math.inf
    for filters in ({}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0}):
        given = settings(5, **filters)
        chosen = assert_agrees(logits, given)
        assert chosen[1:4] == [-1, -1, -1]
        assert [chosen[0], chosen[4]] == [choose(logits[i : i + 1], given.row(i))[0] for i in (0, 4)]


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9999}, {"min_p": 1e-9}], ids=str)
def test_a_banned_token_is_never_chosen(filters: dict[str, Any]):
    logits = torch.full((20, 300), -math.inf, device=DEVICE)
    logits[:, 250], logits[:, 7] = -3.0, -3.5
    assert set(choose(logits, settings(20, **filters))) == {7, 250}


@pytest.mark.parametrize("filters", [{}, {"temperature": 0}, {"top_k": 1}, {"top_k": 9, "top_p": 0.5}, {"min_p": 0.1}])
def test_the_only_token_that_is_not_banned_is_chosen_wherever_it_is(filters: dict[str, Any]):
    logits = torch.full((4, 4097), -math.inf, device=DEVICE)
    only = [0, 2047, 2048, 4096]
    logits[range(4), only] = torch.tensor([-3.4e38, -5.0, 0.0, 3.4e38], device=DEVICE)
    assert choose(logits, settings(4, **filters)) == only


def test_min_p_1_keeps_all_tokens_equal_to_the_best():
    logits = torch.tensor([[2.0, 1.9, 2.0, 2.0]], device=DEVICE).expand(30, 4).contiguous()
    assert set(choose(logits, settings(30, min_p=1))) == {0, 2, 3}


def test_a_row_gets_the_same_token_alone_and_among_others():
    logits, given = random_logits(9, 4500, 1.0), random_settings(9, 4500, seed=3)
    before = logits.clone()
    together = choose(logits, given)
    assert together == [choose(logits[i : i + 1], given.row(i))[0] for i in range(9)]
    order = [4, 0, 8]
    assert [together[i] for i in order] == choose(logits[order], Settings(*(x[order] for x in vars(given).values())))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_rows", [1, 64, pytest.param(256, marks=NEEDS_GPU)])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_a_row_gets_the_same_token_at_every_batch_size(
    filters: dict[str, Any], num_rows: int, monkeypatch: pytest.MonkeyPatch
):
    """Half of the rows are the same one; fewer programs at a time make these take their tiles one after the other."""
    monkeypatch.setattr(kernels, "FEW_PROGRAMS", 16)
    logits, given = random_logits(num_rows, 2100, 1.0), settings(num_rows, **filters)
    one, alone = random_logits(1, 2100, 1.0), settings(1, seed=11, **filters)
    logits[::2], given.seeds[::2], given.output_indices[::2] = one[0], alone.seeds[0], alone.output_indices[0]
    assert set(choose(logits, given)[::2]) == set(choose(one, alone))


def test_no_rows_launch_nothing():
    assert choose(torch.empty(0, 50, device=DEVICE), settings(0, top_k=5)) == []


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}], ids=str)
def test_tokens_come_as_often_as_their_probabilities_say(filters: dict[str, Any]):
    num_rows = 20_000 if DEVICE.type == "cuda" else 120
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = torch.cat((probabilities.log(), torch.full((1,), -40.0))).to(DEVICE).expand(num_rows, 5).contiguous()
    counts = torch.tensor(choose(logits, settings(num_rows, seed=1000, **filters))).bincount(minlength=4)
    expected = probabilities * num_rows
    assert ((counts - expected) ** 2 / expected).sum() < 11.3, "so much comes by chance once in a hundred seeds"


# -- large vocabularies, on a GPU


@pytest.mark.parametrize("spread", [pytest.param(spread, marks=NEEDS_GPU) for spread in (3.0, 1.0, 0.1)])
@pytest.mark.parametrize("num_rows", [1, 64, 256])
@pytest.mark.parametrize("vocab_size", [LARGE, 262_144])
def test_a_real_vocabulary_gets_the_tokens_of_the_torch_tier(vocab_size: int, num_rows: int, spread: float):
    logits, given = random_logits(num_rows, vocab_size, spread), random_settings(num_rows, vocab_size, seed=num_rows)
    together = assert_agrees(logits, given)
    for row in {0, num_rows // 2, num_rows - 1}:
        assert choose(logits[row : row + 1], given.row(row)) == [together[row]]


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=NEEDS_GPU)])
def test_a_captured_choice_reads_new_settings_and_logits_at_every_replay(dtype: torch.dtype):
    logits, given = random_logits(8, LARGE, 2.0, dtype), random_settings(8, LARGE, seed=5)
    choose(logits, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample_tokens(logits, *vars(given).values(), tier="triton")
    for seed in (6, 7):
        logits.copy_(random_logits(8, LARGE, 2.0, dtype).roll(seed, dims=1))
        for own, new in zip(vars(given).values(), vars(random_settings(8, LARGE, seed)).values(), strict=True):
            own.copy_(new)
        graph.replay()
        assert chosen.tolist() == choose(logits, given)
