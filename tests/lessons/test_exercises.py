"""Every exercise: its solution passes the check, and at least two plausible wrong solutions do not."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minipaged.lessons import WrongAnswer
from minipaged.lessons.exercises.paged_kernel import is_open
from minipaged.lessons.reading import Lesson
from tests.lessons.notebooks import CHECK, each_lesson

WRONG = Path(__file__).parent / "wrong"
NUM_WRONG = 2
HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = "paged_kernel"
"""The lesson whose exercises are Triton kernels: where Triton cannot be had, nothing of it can run."""


def wrong_solutions(topic: str) -> list[tuple[Any, Any, str]]:
    return importlib.import_module(f"tests.lessons.wrong.{topic}").WRONG


def all_wrong_solutions() -> Iterator[Any]:
    for path in sorted(WRONG.glob("*.py")):
        if path.stem == NEEDS_TRITON and not HAS_TRITON:
            yield pytest.param(None, None, "", id=path.stem, marks=pytest.mark.skip(reason="Triton is not installed"))
            continue
        for check, answer, message in wrong_solutions(path.stem):
            yield pytest.param(check, answer, message, id=f"{check.__name__}-{getattr(answer, '__name__', answer)}")


@pytest.mark.parametrize(("check", "answer", "message"), list(all_wrong_solutions()))
def test_a_wrong_solution_is_refused_with_help(check: Any, answer: Any, message: str):
    with pytest.raises(WrongAnswer) as refused:
        check(answer)
    assert message in str(refused.value)


@each_lesson
def test_every_exercise_has_wrong_solutions(lesson: Lesson):
    skip_without_triton(lesson)
    refused = [check.__name__ for check, _, _ in wrong_solutions(topic_of(lesson))]
    for index, cell in enumerate(lesson.cells):
        if cell.is_exercise:
            check = CHECK.search(lesson.cells[index + 2].source)
            assert check, cell.exercise_name
            assert refused.count(check[1]) >= NUM_WRONG, f"{check[1]} has fewer than {NUM_WRONG} wrong solutions"


@each_lesson
def test_the_solutions_of_a_lesson_pass_their_checks(lesson: Lesson, tmp_path: Path, capsys: pytest.CaptureFixture):
    skip_without_triton(lesson)
    namespace: dict[str, Any] = {"__name__": lesson.name}
    for index, cell in enumerate(lesson.cells):
        if cell.is_exercise:
            run(lesson.solution(index), tmp_path / f"{index}.py", namespace)
            run(lesson.cells[index + 2].source, tmp_path / f"{index}_check.py", namespace)
            assert f"right: {cell.exercise_name}" in capsys.readouterr().out.splitlines()
        elif cell.is_code:
            run(definitions(cell.source), tmp_path / f"{index}.py", namespace)


def topic_of(lesson: Lesson) -> str:
    return lesson.name.split("_", 1)[1]


def skip_without_triton(lesson: Lesson) -> None:
    if topic_of(lesson) == NEEDS_TRITON and not HAS_TRITON:
        pytest.skip("Triton is not installed")


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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise NotYet", True),
        ("if x:\n        raise kit.NotYet('later')", True),
        ('"""Solve it:\n    raise NotYet\n    """\n    return x', False),
        ("# raise NotYet\n    return x", False),
        ("raise ValueError", False),
        ("raise", False),
    ],
)
def test_a_kernel_is_open_while_a_statement_raises_not_yet_and_not_where_words_mention_it(body: str, expected: bool):
    assert is_open(f"    def f(x):\n        {body.replace(chr(10), chr(10) + '    ')}\n") is expected
