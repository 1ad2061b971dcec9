"""What people see on standard error while they wait: the default model made ready, many prompts answered."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Show what a long preparation is doing: one line that changes on a terminal, one line a stage elsewhere."""

    def __init__(self, out: TextIO):
        self._out = out
        self._is_terminal = out.isatty()
        self._shown = ""

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def __call__(self, line: str) -> None:
        """Show a line in the place of the one before."""
        stage = line.split(":")[0] if line.endswith("%") else line
        if self._is_terminal:
            self._out.write(f"\r\x1b[K{line}")
        elif stage != self._shown:  # a log gets no percentages
            self._out.write(f"{stage}\n")
        self._shown = stage
        self._out.flush()


FEW_PROMPTS = 4
"""Up to this many prompts show no progress bar unless asked."""


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the tokens of each finished prompt; draw a bar if one is wanted."""
    if wanted is None:
        wanted = total > FEW_PROMPTS and sys.stderr.isatty()
    if not wanted:
        yield lambda _: None
        return
    from rich import progress as rich
    from rich.console import Console

    speed_column = rich.TextColumn("{task.fields[speed]}")
    columns = (rich.BarColumn(), rich.MofNCompleteColumn(), speed_column, rich.TimeRemainingColumn())
    start, num_tokens = time.perf_counter(), 0
    with rich.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total, speed="")

        def advance(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.update(task, advance=1, speed=f"{num_tokens / (time.perf_counter() - start):.0f} tokens/s")

        yield advance
