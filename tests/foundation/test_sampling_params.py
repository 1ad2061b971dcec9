"""The parameters of a request: what is refused, and where defaults come from."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest

from minipaged.errors import UserError
from minipaged.foundation.sampling import SamplingParams
from tests.fake_sequences import Sequence, choose

NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}

REFUSED = [
    ("temperature", [-0.1, -1, math.nan, math.inf, "1", True, [1.0], 10**400], "0 or more"),
    ("top_k", [-2, -5, 5.0, "5", True, math.nan], "-1 or 0 for no limit"),
    ("top_p", [0, 0.0, -0.1, 1.0001, 2, math.nan, math.inf, "0.5", True], "above 0 and at most 1"),
    ("min_p", [-0.1, 1.1, math.nan, False], "between 0 and 1"),
    ("repetition_penalty", [0, -1, math.nan, math.inf, True, "x"], "above 0"),
    ("presence_penalty", [-2.1, 2.1, math.nan, None, True], "between -2 and 2"),
    ("frequency_penalty", [-2.1, 2.1, math.inf, None, "0"], "between -2 and 2"),
    ("seed", [-1, 2**64, 1.0, "1", True], "from 0 to 2**64 - 1"),
    ("max_tokens", [0, -1, 1.5, "5", True], "1 or more"),
    ("min_tokens", [-1, 1.0, None, True, 257], ""),
    ("logprobs", [-1, 21, True, 1.0], "from 0 to 20"),
    ("stop", ["", ["a", ""], [1], 5, b"a", {"a": 1}], "strings"),
    ("stop_token_ids", [[-1], [1.5], ["1"], [True], 3, "12"], ""),
    ("include_stop_str_in_output", [1, None, "yes"], "True or False"),
    ("ignore_eos", [0, None], "True or False"),
]


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [(name, value, text) for name, values, text in REFUSED for value in values]
)
def test_a_value_out_of_range_is_refused_with_the_field_and_the_range(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(UserError) as error:
        SamplingParams(**{name: value})
    assert str(error.value).startswith(name)
    assert allowed in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, 1e-6, 1, 2.0, 1e30]),
        ("top_k", [-1, 0, 1, 9999999, 10**30]),
        ("top_p", [1e-6, 1, 1.0]),
        ("min_p", [0, 1]),
        ("repetition_penalty", [1e-3, 1, 1.3]),
        ("presence_penalty", [-2, 2, 0.5]),
        ("frequency_penalty", [-2, 2]),
        ("seed", [0, 2**53, 2**63, 2**64 - 1, None]),
        ("max_tokens", [1, None, 10**9]),
        ("min_tokens", [0, 256]),
        ("logprobs", [None, 0, 20]),
    ],
)
def test_the_ends_of_each_range_are_accepted(name: str, values: list[Any]) -> None:
    for value in values:
        params = SamplingParams(**{name: value}).resolve({})
        assert value is None or getattr(params, name) == value


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    with pytest.raises(UserError, match="min_tokens must be at most max_tokens = 3, not 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    assert SamplingParams(min_tokens=10_000, max_tokens=None).min_tokens == 10_000


def test_params_are_frozen_keyword_only_and_hold_tuples() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[1, 2])
    assert (params.stop, params.stop_token_ids) == (("x",), (1, 2))
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    hash(params)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_defaults_come_from_the_request_then_the_generation_config_then_neutral(name: str) -> None:
    from_model = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.1}
    assert getattr(SamplingParams().resolve(from_model), name) == from_model[name]
    assert getattr(SamplingParams().resolve({}), name) == NEUTRAL[name]
    assert getattr(SamplingParams().resolve({name: None}), name) == NEUTRAL[name]
    assert getattr(SamplingParams(**{name: NEUTRAL[name]}).resolve(from_model), name) == NEUTRAL[name]


def test_an_explicit_temperature_0_wins_over_the_model() -> None:
    assert SamplingParams(temperature=0).resolve({"temperature": 0.7, "do_sample": True}).temperature == 0


def test_a_model_that_says_do_sample_false_is_greedy_unless_asked() -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_k": 50, "repetition_penalty": 1.2}
    params = SamplingParams().resolve(config)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0, 0, 1.2)
    assert SamplingParams(temperature=0.5).resolve(config).temperature == 0.5


def test_a_bad_generation_config_is_refused_by_name_and_only_when_it_is_used() -> None:
    with pytest.raises(UserError, match="generation_config cannot be used: top_p must be"):
        SamplingParams().resolve({"top_p": 1.5})
    assert SamplingParams(top_p=0.5).resolve({"top_p": 1.5}).top_p == 0.5


def test_resolving_keeps_a_subclass_and_its_fields() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Params(SamplingParams):
        n: int = 1

    resolved = Params(n=3, stop="x").resolve({"top_k": 7})
    assert (type(resolved), resolved.n, resolved.top_k, resolved.stop) == (Params, 3, 7, ("x",))


def test_unresolved_params_are_named_instead_of_guessed() -> None:
    with pytest.raises(TypeError, match="repetition_penalty is None"):
        choose([[1.0, 0.0]], Sequence(SamplingParams()))
