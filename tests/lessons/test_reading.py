"""A lesson's source is read as it is written."""

from pathlib import Path

import pytest

from minipaged.errors import UserError
from minipaged.lessons.reading import choose_lessons, find_lessons
from tests.lessons.tiny_lessons import GOOD, write_lesson


def test_a_lesson_has_a_number_a_title_cells_and_exercises(tmp_path: Path):
    lesson = write_lesson(tmp_path)
    assert (lesson.number, lesson.title, lesson.notebook) == ("01", "Doubling", tmp_path / "01_doubling.ipynb")
    assert [cell.is_code for cell in lesson.cells] == [False, True, True, False, True]
    assert lesson.cells[0].given == ("12",)
    assert lesson.cells[1].source.startswith("# copy this, which a shell would do too\nclass NotYet(Exception):")
    assert [cell.is_exercise for cell in lesson.cells] == [False, False, True, False, False]
    assert lesson.exercise_names == ["double"]


def test_solving_replaces_the_whole_exercise_and_nothing_else(tmp_path: Path):
    lesson = write_lesson(tmp_path)
    code = [cell.source for cell in lesson.cells if cell.is_code]
    assert lesson.solved() == "\n\n".join([code[0], "def double(x):\n    return x + x", code[2]]) + "\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<summary>Solution", "<summary>Answer"),
        ("```python", "```"),
        ("# ```\n", "# ```\n#\n# ```python\n# double = abs\n# ```\n"),
    ],
)
def test_a_solution_that_is_not_one_fence_is_refused_by_name(tmp_path: Path, old: str, new: str):
    with pytest.raises(UserError, match=r"01_doubling.py: the text below exercise 'double' must hold one"):
        write_lesson(tmp_path, source=GOOD.replace(old, new)).solved()


def test_an_exercise_without_an_open_part_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no open function or class: def double"):
        _ = write_lesson(tmp_path, source=GOOD.replace("    raise NotYet\n", "    return x\n")).exercise_names


def test_lessons_are_found_in_the_order_of_their_numbers_and_other_files_are_left_alone(tmp_path: Path):
    for name in ("02b_last", "02a_middle", "00_first"):
        write_lesson(tmp_path, name)
    (tmp_path / "helper.py").touch()
    (tmp_path / "00_first.ipynb").touch()
    assert [lesson.name for lesson in find_lessons(tmp_path)] == ["00_first", "02a_middle", "02b_last"]


@pytest.mark.parametrize("name", ["02a", "02a_middle", "02a_middle.py", "lessons/02a_middle.ipynb"])
def test_a_lesson_is_chosen_by_number_name_or_file(tmp_path: Path, name: str):
    write_lesson(tmp_path)
    lesson = write_lesson(tmp_path, "02a_middle")
    assert choose_lessons([name], tmp_path) == [lesson]
    assert len(choose_lessons([], tmp_path)) == 2
    with pytest.raises(UserError, match=r"no lesson is called '7'; the lessons are 01, 02a$"):
        choose_lessons([name, "7"], tmp_path)
