"""What Ctrl-C does while the chat gets ready: it leaves at once.

Python raises `KeyboardInterrupt` wherever the main thread is, and in the middle of an import that is a place from which
it cannot get out cleanly: the machinery of imports prints "Exception ignored".
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130


def leave_at_once() -> None:
    """Have Ctrl-C end the process without any cleaning up; where Ctrl-C is ignored or handled, leave it so."""
    if _is_handled_by(signal.default_int_handler):
        signal.signal(signal.SIGINT, _leave)


def as_usual() -> None:
    """Have Ctrl-C raise `KeyboardInterrupt` again."""
    if _is_handled_by(_leave):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def cleaning_up() -> Iterator[None]:
    """Have Ctrl-C raise `KeyboardInterrupt` in here, so that a download takes its half-finished files away."""
    was_leaving = _is_handled_by(_leave)
    as_usual()
    try:
        yield
    finally:
        if was_leaving:
            leave_at_once()


def can_set_handlers() -> bool:
    """Return whether this thread may say what a signal does; only the main thread may."""
    return threading.current_thread() is threading.main_thread()


def _is_handled_by(handler: object) -> bool:
    return can_set_handlers() and signal.getsignal(signal.SIGINT) is handler


def _leave(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)
