"""The notebooks that come with the project: made from their sources as they are, with outputs, without errors."""

import ast
import re

import nbformat
import pytest

from minipaged.lessons.building import make_notebook
from minipaged.lessons.reading import LESSONS, Lesson
from tests.lessons.notebooks import NAMES, each_lesson, read_notebook

PRINTS = re.compile(r"print|show|ask|check_\w+")


def test_every_rung_that_runs_has_its_lessons_and_nothing_else_lies_beside_them():
    kept = {path.name for path in LESSONS.iterdir() if not path.name.startswith((".", "__"))}
    assert kept == {f"{name}.{ending}" for name in NAMES for ending in ("py", "ipynb")}


@each_lesson
def test_a_notebook_has_the_cells_of_its_source(lesson: Lesson):
    expected, found = make_notebook(lesson), read_notebook(lesson)
    build_again = f"python -m minipaged.lessons build {lesson.number}"
    for one, other in zip(expected.cells, found.cells, strict=False):
        assert one.source == other.source, build_again
        assert (one.id, one.cell_type, one.metadata) == (other.id, other.cell_type, other.metadata), build_again
    assert len(expected.cells) == len(found.cells), build_again
    assert expected.metadata == found.metadata
    nbformat.validate(found)


@each_lesson
def test_a_notebook_holds_outputs_and_no_errors(lesson: Lesson):
    for cell in read_notebook(lesson).cells:
        if cell.cell_type == "code":
            assert cell.execution_count is not None, cell.source
            assert bool(cell.outputs) or not does_print(cell.source), f"nothing is shown below: {cell.source}"
            for output in cell.outputs:
                assert output.output_type != "error", cell.source
                assert output.get("name") != "stderr", f"{cell.source}\nsays {output.text}"


@each_lesson
def test_neither_source_nor_notebook_names_a_place_on_one_machine(lesson: Lesson):
    place = re.compile(r"(?<![\w.])/(?:work|home|root|Users|tmp)/\w")
    for path in (lesson.path, lesson.notebook):
        found = place.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name} names {found[0]}"


def does_print(source: str) -> bool:
    """Return whether a cell calls what prints, functions that it only defines left out."""
    waiting: list[ast.AST] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and PRINTS.fullmatch(node.func.id):
            return True
        waiting += ast.iter_child_nodes(node)
    return False


@pytest.mark.parametrize(
    ("source", "prints"),
    [
        ("x = 1", False),
        ("def f():\n    print(1)", False),
        ("for x in y:\n    print(x)", True),
        ("check_fork(fork)", True),
        ("prints(1)", False),
    ],
)
def test_a_cell_that_prints_is_known_by_its_calls(source: str, prints: bool):
    assert does_print(source) is prints
