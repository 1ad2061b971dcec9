"""The parameters of a request: how its tokens are chosen and when its sequences stop, and nothing else.

Later rungs subclass `SamplingParams` for what they add, such as several samples or a priority.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeGuard

from minipaged.errors import UserError
from minipaged.foundation.philox import SEED_LIMIT

MAX_LOGPROBS = 20

_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_USED_WITH_DO_SAMPLE = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when its sequences stop.

    The first five fields default to None: the model's own value from its generation_config, else the neutral
    one (`resolve` fills them in). Everything is checked on construction.

    Args:
        temperature: Divides the logits; 0 always takes the best token.
        top_k: Keep the k best tokens; 0 or -1, or more than the vocabulary, keeps all.
        top_p: Keep the smallest set of best tokens whose probabilities sum to top_p or more; at least one.
        min_p: Keep tokens with at least min_p times the best token's probability.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens seen in the
            prompt or the output.
        presence_penalty: Subtracted from the logit of a token that is in the output.
        frequency_penalty: Subtracted from a token's logit once for every time it is in the output.
        seed: The noise's key; None draws one, and the result reports it.
        max_tokens: Most tokens to generate; None goes on up to the limit of the model.
        min_tokens: Before so many tokens are generated no end token can be chosen (stop_token_ids included)
            and no stop string ends the sequence.
        stop: A string or several; the text ends before the first that appears in the output.
        stop_token_ids: Token ids that end the sequence, as the model's own end tokens do; they add no text.
        include_stop_str_in_output: Let the text end behind the stop string.
        ignore_eos: The model's own end tokens do not end the sequence; stop_token_ids still do.
        logprobs: None reports nothing; k reports the chosen token's log-probability and the k best ones, of
            the raw distribution: before temperature, penalties and filters.

    Raises:
        UserError: A value has the wrong type or is out of range; the message names the field and the range.

    Invariants:
        Frozen. ``stop`` and ``stop_token_ids`` are tuples.

    Example:
        >>> SamplingParams(temperature=0).resolve({"temperature": 0.7, "top_p": 0.9}).temperature
        0.0
        >>> SamplingParams().resolve({"temperature": 0.7}).temperature
        0.7
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_number("temperature", "0 or more", lambda value: value >= 0)
        self._check_int("top_k", "-1 or 0 for no limit, or 1 and more", lambda value: value >= -1)
        self._check_number("top_p", "above 0 and at most 1", lambda value: 0 < value <= 1)
        self._check_number("min_p", "between 0 and 1", lambda value: 0 <= value <= 1)
        self._check_number("repetition_penalty", "above 0 and at most 1000", lambda value: 0 < value <= 1000)
        self._check_number("presence_penalty", "between -2 and 2", lambda value: -2 <= value <= 2, optional=False)
        self._check_number("frequency_penalty", "between -2 and 2", lambda value: -2 <= value <= 2, optional=False)
        self._check_int("seed", "from 0 to 2**64 - 1", lambda value: 0 <= value < SEED_LIMIT)
        self._check_int("max_tokens", "1 or more, or None for no limit", lambda value: value >= 1)
        self._check_int("min_tokens", "0 or more", lambda value: value >= 0, optional=False)
        self._check_int("logprobs", f"from 0 to {MAX_LOGPROBS}", lambda value: 0 <= value <= MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens must be at most max_tokens = {self.max_tokens}, not {self.min_tokens}")
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be True or False, not {getattr(self, name)!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self._as_tuple("stop", "strings")
        if not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop must be non-empty strings, not {self.stop!r}")
        stop_token_ids = self._as_tuple("stop_token_ids", "token ids")
        if not all(_is_int(token_id) and token_id >= 0 for token_id in stop_token_ids):
            raise UserError(f"stop_token_ids must be integers of 0 or more, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)

    def resolve(self, generation_config: Mapping[str, Any]) -> Self:
        """Fill the fields left at None: from the model's generation_config, else with the neutral value.

        A generation_config with ``do_sample: false`` describes a greedy model: its temperature, top_k, top_p
        and min_p are not used, as in transformers, and the default temperature is 0. Without the key its
        values count as they stand. A value in the request, an explicit 0 too, always wins.

        Raises:
            UserError: The generation_config holds a value out of range for a field that the request leaves
                open.
        """
        defaults: dict[str, Any] = dict(_NEUTRAL)
        is_greedy_model = generation_config.get("do_sample") is False
        if is_greedy_model:
            defaults["temperature"] = 0.0
        for name in _NEUTRAL:
            value = generation_config.get(name)
            if value is not None and not (is_greedy_model and name in _USED_WITH_DO_SAMPLE):
                defaults[name] = value
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        try:
            return replace(self, **missing) if missing else self
        except UserError as error:
            raise UserError(f"the model's generation_config cannot be used: {error}") from None

    def _check_number(
        self, name: str, allowed: str, is_allowed: Callable[[float], bool], optional: bool = True
    ) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise UserError(f"{name} must be a number {allowed}, not {value!r}")
        # NaN fails every comparison, infinity does not; an integer may be too large for a float.
        if not is_allowed(value) or value > sys.float_info.max:
            raise UserError(f"{name} must be a finite number {allowed}, not {value!r}")
        object.__setattr__(self, name, float(value))

    def _check_int(self, name: str, allowed: str, is_allowed: Callable[[int], bool], optional: bool = True) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or not is_allowed(value):
            raise UserError(f"{name} must be an integer {allowed}, not {value!r}")

    def _as_tuple(self, name: str, content: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        if value is None:
            return ()
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            raise UserError(f"{name} must be a sequence of {content}, not {value!r}")
        return tuple(value)


def _is_int(value: object) -> TypeGuard[int]:
    # True and False are ints to Python; as a number in a request they are a mistake.
    return isinstance(value, int) and not isinstance(value, bool)
