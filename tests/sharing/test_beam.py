"""The rules of beam search, on numbers alone."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from minipaged.sharing.beam import Beam, BeamSearch


def rows(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def run(search: BeamSearch, next_logprobs: Callable[[tuple[int, ...]], list[float]]) -> list[Beam]:
    """Search to the end with a function in the place of a model, and check each step's answer."""
    before: list[tuple[int, ...]] = [()]
    while not search.done:
        survivors = search.advance(torch.tensor([next_logprobs(token_ids) for token_ids in before]))
        before = [(*before[parent], token_id) for parent, token_id in survivors]
        assert before == [beam.token_ids for beam in search.live]
        sums = [beam.cumulative_logprob for beam in search.live]
        assert sums == sorted(sums, reverse=True) and len(sums) <= search.beam_width
    return search.best(search.beam_width)


def table_model(vocab_size: int, seed: int) -> Callable[[tuple[int, ...]], list[float]]:
    """Return log-probabilities that depend on all tokens so far."""

    def next_logprobs(token_ids: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *token_ids)) % 2**31)
        return torch.randn(vocab_size, generator=generator).log_softmax(-1).tolist()

    return next_logprobs


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("end_token_ids", [set(), {0}, {1, 3}])
def test_a_search_as_wide_as_everything_finds_the_best_of_everything(end_token_ids: set[int], length_penalty: float):
    vocab_size, max_tokens = 4, 4
    model = table_model(vocab_size, seed=7)
    every = []
    for length in range(1, max_tokens + 1):
        for token_ids in itertools.product(range(vocab_size), repeat=length):
            ends = token_ids[-1] in end_token_ids or length == max_tokens
            if ends and not end_token_ids & set(token_ids[:-1]):
                total = sum(model(token_ids[:i])[token_id] for i, token_id in enumerate(token_ids))
                every.append((total / length**length_penalty, token_ids))
    every.sort(reverse=True)
    search = BeamSearch(vocab_size**max_tokens, max_tokens, end_token_ids, length_penalty, "never")
    found = run(search, model)
    assert [beam.token_ids for beam in found] == [token_ids for _, token_ids in every]
    assert [beam.score for beam in found] == pytest.approx([score for score, _ in every])


@pytest.mark.parametrize("beam_width", [1, 2, 5])
def test_a_width_of_one_is_greedy_and_a_wider_search_never_ends_with_less(beam_width: int):
    worse, better = (
        sum(run(BeamSearch(width, 6, {0}, 0.0, "never"), table_model(9, seed))[0].score for seed in range(20))
        for width in (1, beam_width)
    )
    assert better >= worse - 1e-6
    model = table_model(9, seed=3)
    greedy: tuple[int, ...] = ()
    while len(greedy) < 6 and 0 not in greedy:
        greedy += (max(range(9), key=model(greedy).__getitem__),)
    assert run(BeamSearch(1, 6, {0}), model)[0].token_ids == greedy


def test_the_first_step_takes_all_beams_from_one_row():
    search = BeamSearch(3, 5, {0})
    assert search.advance(rows([0.05, 0.15, 0.2, 0.25, 0.35])) == [(0, 4), (0, 3), (0, 2)]
    assert [beam.cumulative_logprob for beam in search.live] == pytest.approx([math.log(p) for p in (0.35, 0.25, 0.2)])


def test_a_beam_that_ends_is_kept_only_among_the_best_candidates_of_its_step():
    kept, forgotten = BeamSearch(2, 5, {0}), BeamSearch(2, 5, {0})
    assert kept.advance(rows([0.25, 0.5, 0.15, 0.1])) == [(0, 1), (0, 2)]
    assert [beam.token_ids for beam in kept.finished] == [(0,)]
    assert forgotten.advance(rows([0.2, 0.5, 0.25, 0.05])) == [(0, 1), (0, 2)]
    assert forgotten.finished == []


def test_enough_beams_live_on_when_all_of_the_best_end():
    search = BeamSearch(2, 5, {0, 1, 2})
    search.advance(rows([0.01, 0.01, 0.01, 0.5, 0.47]))
    survivors = search.advance(rows([0.3, 0.3, 0.3, 0.06, 0.04], [0.3, 0.3, 0.3, 0.05, 0.05]))
    assert survivors == [(0, 3), (1, 3)]
    assert len(search.finished) == 2


def test_kept_beams_are_the_best_of_all_steps():
    search = BeamSearch(2, 9, {0}, length_penalty=0.0, early_stopping="never")
    search.advance(rows([0.3, 0.4, 0.3]))
    assert [beam.token_ids for beam in search.finished] == [(0,)]
    search.advance(rows([0.9, 0.05, 0.05], [0.9, 0.05, 0.05]))
    assert [beam.token_ids for beam in search.finished] == [(1, 0), (0,)], "0.36, 0.3; (2, 0) with 0.27 is out"
    assert [beam.token_ids for beam in search.best(1)] == [(1, 0)]


def test_the_length_penalty_counts_the_end_token_and_divides_the_sum():
    search = BeamSearch(1, 9, {0}, length_penalty=2.0)
    search.advance(rows([0.2, 0.8]))
    search.advance(rows([0.6, 0.4]))
    assert search.finished[0].cumulative_logprob == pytest.approx(math.log(0.48))
    assert search.finished[0].score == pytest.approx(math.log(0.48) / 4)


# Two beams have finished with -1.0, and the best that lives has the sum `live` after one token.
@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "live", "expected"),
    [
        (True, 1.0, -1.5, True),
        (False, 1.0, -1.5, True),  # if it ended now: -1.5 / 1
        ("never", 1.0, -1.5, False),  # at ten tokens: -0.15
        ("never", 1.0, -10.5, True),  # at ten tokens: -1.05
        ("never", 0.0, -1.5, True),  # the length changes nothing
        ("never", -1.0, -1.5, True),  # longer is worse, so now is best
        (True, 1.0, -0.5, True),
        (False, 1.0, -0.5, False),
        ("never", -1.0, -0.5, False),  # not -5, which it would be at ten tokens
    ],
)
def test_when_a_search_is_done(early_stopping, length_penalty: float, live: float, expected: bool):
    search = BeamSearch(2, 10, {0, 1}, length_penalty, early_stopping)
    search.finished, search.live = [Beam((0,), -1.0, -1.0), Beam((1,), -1.0, -1.0)], [Beam((2,), live)]
    search.num_tokens = 1
    assert search.done is expected


def test_a_width_of_one_is_done_with_the_first_that_ends():
    search = BeamSearch(1, 10, {0}, 1.0, "never")
    search.advance(torch.tensor([[-1.0, -1.5]]))
    assert search.done and [beam.token_ids for beam in search.best(1)] == [(0,)]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_no_search_is_done_before_its_width_has_finished(early_stopping):
    search = BeamSearch(2, 10, {0}, 1.0, early_stopping)
    search.advance(torch.tensor([[-1.0, -50.0, -60.0]]))
    assert len(search.finished) == 1 and not search.done


def test_a_living_beam_that_would_beat_the_worst_kept_one_goes_on():
    search = BeamSearch(2, 10, {0}, 0.0, False)
    search.advance(torch.tensor([[-1.0, -1.1, -5.0]]))
    search.advance(torch.tensor([[-3.0, -0.5, -9.0], [-9.0, -9.0, -9.0]]))  # -4.1 ends; -1.6 lives
    assert [beam.score for beam in search.finished] == pytest.approx([-1.0, -4.1]) and not search.done
    search.advance(torch.tensor([[-0.1, -9.0, -9.0], [-9.0, -9.0, -9.0]]))  # -1.7 ends; -10.6 lives
    assert [beam.score for beam in search.finished] == pytest.approx([-1.0, -1.7]) and search.done


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_everything_ends_at_the_longest_length(early_stopping):
    search = BeamSearch(2, 1, {0}, 1.0, early_stopping)
    assert search.advance(rows([0.3, 0.1, 0.4, 0.2])) == []
    assert search.done and [beam.token_ids for beam in search.best(2)] == [(2,), (0,)]


def test_banned_tokens_are_never_taken_even_when_too_few_are_left():
    search = BeamSearch(3, 3, {0})
    banned = [float("-inf"), -0.5, float("-inf"), -1.5]
    assert search.advance(torch.tensor([banned])) == [(0, 1), (0, 3)]
    assert search.advance(torch.tensor([banned, banned])) == [(0, 1), (0, 3), (1, 1)]
    search.advance(torch.tensor([banned] * 3))
    assert search.done and len(search.best(3)) == 3


def test_a_vocabulary_of_end_tokens_gives_as_many_beams_as_it_can():
    search = BeamSearch(3, 5, {0, 1})
    assert search.advance(rows([0.6, 0.4])) == []
    assert search.done and [beam.token_ids for beam in search.best(3)] == [(0,), (1,)]


def test_of_equal_candidates_the_lower_parent_and_token_comes_first():
    search = BeamSearch(3, 5, ())
    assert search.advance(torch.full((1, 8), -1.0)) == [(0, 0), (0, 1), (0, 2)]
    assert search.advance(torch.full((3, 8), -1.0)) == [(0, 0), (0, 1), (0, 2)]


def test_a_step_takes_one_row_for_each_living_beam_and_none_after_the_end():
    search = BeamSearch(2, 2, ())
    with pytest.raises(AssertionError):
        search.advance(torch.zeros(2, 4))
    search.advance(torch.zeros(1, 4))
    search.advance(torch.zeros(2, 4))
    with pytest.raises(AssertionError):
        search.advance(torch.zeros(2, 4))


def test_the_numbers_given_stay_as_they_are():
    logprobs = rows([0.3, 0.1, 0.4, 0.2])
    before = logprobs.clone()
    BeamSearch(2, 5, {0}).advance(logprobs)
    assert torch.equal(logprobs, before)
