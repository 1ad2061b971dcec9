"""The command line of the lessons."""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from minipaged.cli import FAILURE
from minipaged.errors import UserError
from minipaged.lessons.reading import LESSONS, Lesson, choose_lessons, find_lessons

USAGE = """\
python -m minipaged.lessons 00                 opens lesson 00 in Jupyter
python -m minipaged.lessons check [NUMBER ...] runs lessons, all without numbers, with their exercises open and solved
python -m minipaged.lessons build [NUMBER ...] runs lessons and writes their notebooks"""


def main(arguments: list[str] | None = None, folder: Path = LESSONS) -> int:
    """Do what the command line says and return the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments, folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return FAILURE


def _run(arguments: list[str], folder: Path) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        _list(find_lessons(folder))
        return 0
    command, *names = arguments
    if command == "check":
        from minipaged.lessons.checking import check

        return 0 if check(choose_lessons(names, folder)) else 1
    if command == "build":
        return _build(choose_lessons(names, folder))
    if names:
        raise UserError(
            f"one lesson is opened at a time, not {' '.join(arguments)!r}; without arguments, all are listed"
        )
    return _open(choose_lessons([command], folder)[0])


def _list(lessons: list[Lesson]) -> None:
    for lesson in lessons:
        print(f"{lesson.number:<4} {lesson.title}")
    print(f"\n{USAGE}")


def _build(lessons: list[Lesson]) -> int:
    from minipaged.lessons.building import build
    from minipaged.lessons.kit import DEFAULT, MODEL_VARIABLE, lesson_model

    if MODEL_VARIABLE in os.environ or lesson_model() != DEFAULT:
        raise UserError(f"notebooks are built with the default model's outputs, and without {MODEL_VARIABLE}")
    with ThreadPoolExecutor(2) as pool:
        for lesson, _ in zip(lessons, pool.map(build, lessons), strict=True):
            print(f"written: {lesson.notebook}", flush=True)
    return 0


def _open(lesson: Lesson) -> int:
    """Hand this process over to Jupyter, which has its own ways with Ctrl-C."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError('lessons are opened in JupyterLab, which is missing; pip install -e ".[lessons]" brings it')
    if not lesson.notebook.is_file():
        raise UserError(f"there is no notebook yet; python -m minipaged.lessons build {lesson.number} makes it")
    # Links of a lesson lead to the code and the docs; Jupyter follows none that leads out of its folder.
    root = f"--ServerApp.root_dir={lesson.path.parents[1]}"
    command = [sys.executable, "-m", "jupyterlab", root, str(lesson.notebook)]
    if os.name == "nt":  # where a process cannot be replaced
        return subprocess.call(command)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
