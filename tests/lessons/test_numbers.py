"""Every number that a lesson's text tells is printed above it, or listed as given; and no timing is told."""

import pytest

from minipaged.lessons.reading import Cell, Lesson
from tests.lessons.notebooks import each_lesson, outputs_above, read_notebook
from tests.lessons.prose import is_shown, numbers_in, numbers_shown, plain, timings_in


def complaints_about(cell: Cell, shown: set[str]) -> list[str]:
    """Return what is wrong with the numbers of a Markdown cell below these outputs."""
    given = {plain(number).lstrip("-−") for number in cell.given}
    told, timings = numbers_in(cell.source), timings_in(cell.source)
    needed = {number for number in told if not is_shown(number, shown)} | set(timings)
    complaints = [f"{number} is not in any output above" for number in needed - given - set(timings)]
    complaints += [f"{number} is a timing, which differs from machine to machine" for number in set(timings) - given]
    complaints += [f"{number} need not be given: an output above shows it" for number in (given - needed) & set(told)]
    return complaints + [f"{number} need not be given: the text does not tell it" for number in given - set(told)]


@each_lesson
def test_every_number_in_the_text_is_shown_above_or_given(lesson: Lesson):
    complaints = []
    above = list(outputs_above(read_notebook(lesson)))
    assert len(above) == len(lesson.cells), f"python -m minipaged.lessons build {lesson.number}"
    for cell, outputs in zip(lesson.cells, above, strict=True):
        if not cell.is_code:
            found = complaints_about(cell, numbers_shown(outputs))
            complaints += [f"{cell.source.splitlines()[0][:50]!r}: {'; '.join(sorted(found))}"] if found else []
    assert not complaints, "\n".join(complaints)


def text(source: str, *given: str) -> Cell:
    return Cell(is_code=False, source=source, given=given)


@pytest.mark.parametrize(
    ("cell", "shown", "complaints"),
    [
        (text("It takes 2,048 slots."), "2048 slots", []),
        (text("It takes 2048 slots."), "2,048 slots", []),
        (text("It takes 2,048 slots."), "2047 slots", ["2048 is not in any output above"]),
        (text("It takes 2,048 slots.", "2,048"), "", []),
        (text("It takes 2,048 slots.", "2,048"), "2048", ["2048 need not be given: an output above shows it"]),
        (text("It takes all slots.", "7"), "", ["7 need not be given: the text does not tell it"]),
        (text("The tables `[7, 2, 5]`"), "[7,2,5]", []),
        (text("three, 2.7 times or 2.7x"), "2.6667", []),
        (text("3 times"), "2.6667", ["3 is not in any output above"]),
        (text("4 times"), "4.0", []),
        (text("the slot -1", "-1"), "", []),
        (text("It takes 12 ms."), "12", ["12 is a timing, which differs from machine to machine"]),
        (text("It takes 12 ms.", "12"), "12", []),
        (text("12s, 3-second"), "", [f"{n} is a timing, which differs from machine to machine" for n in (12, 3)]),
        (text("40 tokens/s"), "40", ["40 is a timing, which differs from machine to machine"]),
        (text("40 tokens"), "40", []),
    ],
    ids=lambda value: value.source if isinstance(value, Cell) else "",
)
def test_numbers_are_compared_as_numbers_and_timings_are_refused(cell: Cell, shown: str, complaints: list[str]):
    assert sorted(complaints_about(cell, numbers_shown(shown))) == sorted(complaints)


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        ("fp16, sm_90, H200, 02a, x_1, `seq_lens[0]`, `q[0, 1]`, `a[1:2]`, gpt-2, Python 3.11.7", []),
        ("[lesson 03](03_sharing.ipynb#7) and [a paper](https://arxiv.org/abs/2309.06180)", []),
        ("# 01  Title\n\n1. first\n2. second\n\n## 3. Third\n<details open=1>", []),
        ("```python\nx = 16\n```\nand 17", ["17"]),
        ("a list [1, 2], 3-4, 5/6, (7), 8.", ["1", "2", "3", "4", "5", "6", "7", "8"]),
        ("0, 0.25 and 10,000.5, but not 0.25 again", ["0", "0.25", "10000.5"]),
        ("1,2,3 and 1,024,000", ["1", "2", "3", "1024000"]),
    ],
)
def test_what_counts_as_a_number(source: str, numbers: list[str]):
    assert numbers_in(source) == numbers
