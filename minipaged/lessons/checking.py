"""Every lesson as a reader may run it: with all exercises open, and with all of them solved."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from minipaged.errors import UserError
from minipaged.lessons.building import cpu_environment
from minipaged.lessons.kit import MODEL_VARIABLE, RANDOM, lesson_model
from minipaged.lessons.reading import Lesson

LIMIT_S = 120
"""No run may take longer, on a machine that does other things too."""

TOTAL_LIMIT_S = 600
"""Nor may all runs together."""

SHOWN_LINES = 30


@dataclass(frozen=True)
class Run:
    """How one run of a lesson went; without complaints it went well."""

    lesson: Lesson
    is_solved: bool
    seconds: float
    complaints: tuple[str, ...]
    output: str

    def __str__(self) -> str:
        state = "solved" if self.is_solved else "open"
        return f"{self.lesson.name:<20} {state:<7} {self.seconds:6.1f}  {'; '.join(self.complaints) or 'ok'}"


def check(lessons: Sequence[Lesson], limit: float = LIMIT_S, total_limit: float = TOTAL_LIMIT_S) -> bool:
    """Run lessons open and solved, each in a new process on the CPU, as many at a time as there are cores.

    Prints a table, and below it the last lines of what each failed run printed.

    Returns:
        Whether all went well, and soon enough.
    """
    environment = cpu_environment()
    if lesson_model() == RANDOM:  # fetched once here, or looked for in vain once
        environment[MODEL_VARIABLE] = RANDOM
    print(f"{'lesson':<20} {'run':<7} seconds", flush=True)
    started = time.perf_counter()
    failed = []
    for run in _runs(lessons, environment, limit):
        print(run, flush=True)
        failed += [run] if run.complaints else []
    for run in failed:
        print("", f"-- {run}", *run.output.splitlines()[-SHOWN_LINES:], sep="\n")
    seconds = time.perf_counter() - started
    print(f"{2 * len(lessons) - len(failed)} runs ok, {len(failed)} failed, {seconds:.0f} s")
    if seconds > total_limit:
        print(f"all runs together take longer than {total_limit:g} s")
    return not failed and seconds <= total_limit


def _runs(lessons: Sequence[Lesson], environment: dict[str, str], limit: float) -> Iterator[Run]:
    twice = [lesson for lesson in lessons for _ in range(2)]
    is_solved = [False, True] * len(lessons)
    with ThreadPoolExecutor(_num_cores()) as pool:
        yield from pool.map(partial(run_lesson, environment=environment, limit=limit), twice, is_solved)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_lesson(lesson: Lesson, is_solved: bool, environment: dict[str, str], limit: float = LIMIT_S) -> Run:
    """Run a lesson as a script: its source as it is, or with the solutions in the places of the exercises."""
    started = time.perf_counter()
    with TemporaryDirectory() as folder:
        try:
            script = lesson.path
            if is_solved:
                script = Path(folder) / f"{lesson.name}_solved.py"
                script.write_text(lesson.solved(), encoding="utf-8")
            names = lesson.exercise_names
        except (UserError, SyntaxError) as error:
            return Run(lesson, is_solved, 0.0, (str(error),), "")
        code, output = _run_script(script, environment, limit)
    complaints = (
        [f"takes longer than {limit:g} s"] if code is None else complaints_about(names, is_solved, code, output)
    )
    return Run(lesson, is_solved, time.perf_counter() - started, tuple(complaints), output)


def _run_script(script: Path, environment: dict[str, str], limit: float) -> tuple[int | None, str]:
    """Return the exit code, None for one that had to be stopped, and everything that was printed."""
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
        )
    except subprocess.TimeoutExpired as error:
        return None, (error.output or b"").decode(errors="replace")
    return done.returncode, done.stdout.decode(errors="replace")


def complaints_about(names: Sequence[str], is_solved: bool, code: int, output: str) -> list[str]:
    """Return what is wrong with a run of a lesson with exercises of these names."""
    if code != 0:
        return [f"ends with exit code {code}"]
    lines = output.splitlines()
    word = "right" if is_solved else "not yet"
    complaints = [f'does not say "{word}: {name}"' for name in names if f"{word}: {name}" not in lines]
    if is_solved:
        complaints += [f'still says "{line}"' for line in lines if line.startswith("not yet")]
    return complaints
