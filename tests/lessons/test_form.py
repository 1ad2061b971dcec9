"""The form of a lesson: title, short cells, exercises with hint, solution and check, and links that lead somewhere."""

import ast
import re
from collections.abc import Iterator

from minipaged.lessons.reading import Cell, Lesson
from tests.lessons.notebooks import CHECK, NAMES, each_lesson

MAX_CODE_LINES = 15
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def code_lines(cell: Cell) -> int:
    """Return the lines of a code cell, empty ones left out; docstrings of an exercise are its text and do not count."""
    lines = _num_filled(cell.source.splitlines())
    if not cell.is_exercise:
        return lines
    return lines - sum(_docstring_lines(cell.source, node) for node in ast.walk(ast.parse(cell.source)))


def _docstring_lines(source: str, node: ast.AST) -> int:
    if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
        return 0
    text = node.body[0]
    return _num_filled(source.splitlines()[text.lineno - 1 : text.end_lineno])


def _num_filled(lines: list[str]) -> int:
    return sum(bool(line.strip()) for line in lines)


def form_complaints(lesson: Lesson) -> Iterator[str]:
    """Yield what is wrong with the form of a lesson."""
    cells = lesson.cells
    if cells[0].is_code or not cells[0].source.startswith(f"# {lesson.number}  "):
        yield f"the first cell does not begin with '# {lesson.number}  Title'"
    for cell in cells:
        first = cell.source.splitlines()[0] if cell.source else ""
        if cell.is_code and code_lines(cell) > MAX_CODE_LINES:
            yield f"{code_lines(cell)} lines of code in the cell {first!r}"
        if not cell.is_code and re.search(r"^(!!!|\?\?\?)", cell.source, re.MULTILINE):
            yield f"a callout that is no block quote in the cell {first!r}"
        if not cell.is_code and cell.source.count("<details>") != cell.source.count("</details>"):
            yield f"a fold that is not closed in the cell {first!r}"
        if re.search(r"^!\[|<img", cell.source, re.MULTILINE):
            yield f"a picture that no code draws in the cell {first!r}"
    for index, cell in enumerate(cells):
        if cell.is_exercise:
            yield from exercise_complaints(lesson, index)


def exercise_complaints(lesson: Lesson, index: int) -> Iterator[str]:
    """Yield what is missing around the exercise at this index."""
    below = [*lesson.cells[index + 1 : index + 3], Cell(False, ""), Cell(False, "")]
    name = lesson.cells[index].exercise_name
    defined = next(node for node in ast.parse(lesson.cells[index].source).body if getattr(node, "name", "") == name)
    assert isinstance(defined, ast.FunctionDef | ast.ClassDef)
    if not ast.get_docstring(defined):
        yield f"exercise {name} does not say in a docstring what is wanted"
    if "<summary>Hint</summary>" not in below[0].source:
        yield f"exercise {name} has no hint below it"
    if name not in defined_names(lesson.solution(index)):
        yield f"the solution of exercise {name} does not define it"
    if not (below[1].is_code and CHECK.search(below[1].source)):
        yield f"exercise {name} has no check below its solution"


def defined_names(source: str) -> set[str]:
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@each_lesson
def test_a_lesson_has_the_form_of_a_lesson(lesson: Lesson):
    assert list(form_complaints(lesson)) == []


@each_lesson
def test_a_lesson_has_two_to_four_exercises_and_ends_in_the_chat(lesson: Lesson):
    assert 2 <= len(lesson.exercise_names) <= 4
    assert len(set(lesson.exercise_names)) == len(lesson.exercise_names)
    code = "\n".join(cell.source for cell in lesson.cells if cell.is_code)
    assert re.search(r"\bask\(", code)


@each_lesson
def test_links_lead_to_files_that_exist_or_to_papers(lesson: Lesson):
    targets = [target for cell in lesson.cells if not cell.is_code for target in LINK.findall(cell.source)]
    for target in targets:
        if target.startswith("http"):
            assert target.startswith("https://arxiv.org/abs/"), target
        elif target.endswith(".ipynb"):
            assert target.removesuffix(".ipynb") in NAMES, target
        elif not target.startswith("#"):
            assert (lesson.path.parent / target.split("#")[0]).exists(), target


def test_the_lines_of_a_docstring_do_not_count_in_an_exercise():
    source = 'def f():\n    """Do.\n\n    This.\n    """\n    raise NotYet'
    assert code_lines(Cell(True, source, tags=("exercise",))) == 2
    assert code_lines(Cell(True, source)) == 5


FORMLESS = """\
# %% [markdown]
# # 01 One space only
#
# !!! note
# <details>

# %%
{long}

# %% tags=["exercise"]
def f():
    raise NotYet

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def g():
#     return 1
# ```
#
# </details>
"""


def test_every_fault_of_form_is_named(tmp_path):
    path = tmp_path / "01_formless.py"
    path.write_text(FORMLESS.format(long="\n".join(["x = 1"] * 16)))
    assert list(form_complaints(Lesson(path))) == [
        "the first cell does not begin with '# 01  Title'",
        "a callout that is no block quote in the cell '# 01 One space only'",
        "a fold that is not closed in the cell '# 01 One space only'",
        "16 lines of code in the cell 'x = 1'",
        "exercise f does not say in a docstring what is wanted",
        "exercise f has no hint below it",
        "the solution of exercise f does not define it",
        "exercise f has no check below its solution",
    ]
