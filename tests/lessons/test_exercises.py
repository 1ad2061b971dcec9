"""Every exercise: its solution passes the check, and at least two plausible wrong solutions do not."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipaged.lessons import WrongAnswer
from minipaged.lessons.reading import Lesson
from tests.lessons.notebooks import CHECK, each_lesson

WRONG = Path(__file__).parent / "wrong"
NUM_WRONG = 2


def wrong_solutions(topic: str) -> list[tuple[Any, Any, str]]:
    return importlib.import_module(f"tests.lessons.wrong.{topic}").WRONG


def all_wrong_solutions() -> Iterator[Any]:
    for path in sorted(WRONG.glob("*.py")):
        for check, answer, message in wrong_solutions(path.stem):
            yield pytest.param(check, answer, message, id=f"{check.__name__}-{getattr(answer, '__name__', answer)}")


@pytest.mark.parametrize(("check", "answer", "message"), list(all_wrong_solutions()))
def test_a_wrong_solution_is_refused_with_help(check: Any, answer: Any, message: str):
    with pytest.raises(WrongAnswer) as refused:
        check(answer)
    assert message in str(refused.value)


@each_lesson
def test_every_exercise_has_wrong_solutions(lesson: Lesson):
    refused = [check.__name__ for check, _, _ in wrong_solutions(lesson.name.split("_", 1)[1])]
    for index, cell in enumerate(lesson.cells):
        if cell.is_exercise:
            check = CHECK.search(lesson.cells[index + 2].source)
            assert check, cell.exercise_name
            assert refused.count(check[1]) >= NUM_WRONG, f"{check[1]} has fewer than {NUM_WRONG} wrong solutions"


@each_lesson
def test_the_solutions_of_a_lesson_pass_their_checks(lesson: Lesson, tmp_path: Path, capsys: pytest.CaptureFixture):
    namespace: dict[str, Any] = {"__name__": lesson.name}
    for index, cell in enumerate(lesson.cells):
        if cell.is_exercise:
            run(lesson.solution(index), tmp_path / f"{index}.py", namespace)
            run(lesson.cells[index + 2].source, tmp_path / f"{index}_check.py", namespace)
            assert f"right: {cell.exercise_name}" in capsys.readouterr().out.splitlines()
        elif cell.is_code:
            run(definitions(cell.source), tmp_path / f"{index}.py", namespace)


def run(source: str, path: Path, namespace: dict[str, Any]) -> None:
    """Run code from a file, where a kernel's compiler can find it."""
    path.write_text(source)
    exec(compile(source, str(path), "exec"), namespace)


def definitions(source: str) -> str:
    """Return what of a cell takes no time and an exercise may need: imports, functions, classes and constants."""
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return "\n".join(
        ast.unparse(node) for node in ast.parse(source).body if isinstance(node, kept) or is_constant(node)
    )


def is_constant(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Assign) or not all(isinstance(target, ast.Name) for target in node.targets):
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def test_definitions_leave_out_what_runs():
    source = "import os\nx = [1, 2]\ny = os.getpid()\nprint(x)\n\ndef f():\n    return x"
    assert definitions(source) == "import os\nx = [1, 2]\ndef f():\n    return x"
