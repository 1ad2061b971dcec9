"""What every lesson uses: an exercise that is open, a check that helps, a drawing, and the real chat."""

import os
import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from minipaged.errors import UserError
from minipaged.progress import Progress
from minipaged.tiers import use

DEFAULT = "smollm2"
"""The model that lessons are written for."""

RANDOM = "random"
"""The model that runs where the default model cannot be had."""

MODEL_VARIABLE = "MINIPAGED_LESSON_MODEL"
"""Names another model for all lessons."""

# Lessons start processes after a tokenizer has run in this one, which would print a warning about its threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class NotYet(Exception):
    """Stands where a reader's own code will stand."""


class WrongAnswer(AssertionError):
    """An answer that a check refuses; its message says for which input, what was expected, and where to look."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in a notebook: the lines that lead to it are the check's, not the reader's."""
        return [f"wrong: {self}"]


def exercise(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make a check of a function that compares an answer with the product's own code.

    The check says "not yet" while the answer raises `NotYet`, "right" if it passes, and raises `WrongAnswer` if not.
    Any other error is the reader's own, and is shown as it is.
    """

    @wraps(check)
    def run(answer: Any) -> None:
        name = getattr(answer, "__name__", type(answer).__name__)
        try:
            check(answer)
        except NotYet:
            print(f"not yet: {name}")
        else:
            print(f"right: {name}")

    return run


def expect(actual: Any, expected: Any, given: str, help: str) -> None:
    """Refuse an answer that is not the expected one; tensors may differ by rounding.

    Args:
        actual: What the reader's code returned.
        expected: What the product's own code returns.
        given: The call in words or code: "append to [7, 2] with 8 tokens".
        help: One or two sentences that lead to the mistake.

    Raises:
        WrongAnswer: They differ.
    """
    if not _is_equal(actual, expected):
        raise WrongAnswer(f"{given}\n  expected {expected!r}\n  got      {actual!r}\n{help}")


def _is_equal(actual: Any, expected: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        # A tensor would compare by elements, and has no single truth then.
        return not isinstance(actual, torch.Tensor) and bool(actual == expected)
    if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
        return False
    return torch.allclose(actual.double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def is_notebook() -> bool:
    """Return whether the code runs in a notebook, which can show pictures."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def show(text: object, picture: str | None = None) -> None:
    """Show a drawing: as a picture in a notebook if there is one, as text elsewhere."""
    if picture is not None and is_notebook():
        from IPython.display import display

        # The text goes along, for whatever shows the notebook and draws no SVG.
        display({"image/svg+xml": str(picture), "text/plain": str(text)}, raw=True)
    else:
        print(text)


def lesson_model() -> str:
    """Return the model that lessons run: the default model, or "random" with a sentence where it cannot be had.

    The model "random" is tiny and has no tokenizer: prompts are token ids. ``MINIPAGED_LESSON_MODEL`` names another
    model for all lessons; "random" there needs no network.
    """
    name, why = _find_model()
    if why is not None:
        print(why)
    return name


@cache
def _find_model() -> tuple[str, str | None]:
    """Return the lessons' model, and the sentence that explains any but the default model."""
    if name := os.environ.get(MODEL_VARIABLE):
        return name, f"The lessons run on the model {name!r}, as {MODEL_VARIABLE} says."
    from minipaged.foundation.default_model import ensure_default_model

    try:
        with Progress(sys.stderr) as progress:
            ensure_default_model(progress)
    except UserError as error:
        return RANDOM, f"A tiny random model, which takes token ids, stands in for the default model: {error}."
    return DEFAULT, None


def ask(question: str, rung: str, *options: str, max_tokens: int = 30, **parts: Callable[..., Any]) -> None:
    """Ask the real chat, with the reader's own parts in their places; say "not yet" if one of them is still open.

    A model without a tokenizer takes the bytes of the question for token ids, and answers with a number of tokens.

    Args:
        question: The message.
        rung: The rung of the ladder that answers.
        options: More of the chat's options, such as "--show-blocks" or "--fork", "3".
        max_tokens: Most tokens of the answer.
        parts: What `minipaged.use` takes.

    Raises:
        UserError: An option or a part's name is wrong.
        Exception: Any error of the reader's own code, as it is.
    """
    from minipaged.lessons.asking import answer

    arguments = ["--model", _find_model()[0], "--prompt", question, "--rung", rung]
    arguments += ["--max-tokens", str(max_tokens), "--temperature", "0", *options]
    try:
        with use(**parts):
            answer(arguments)
    except NotYet:
        print("not yet: the chat needs", " and ".join(parts))
