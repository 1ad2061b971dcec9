"""Python's collector of cycles, and when it has to wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let no cycles be collected for a while.

    Among steps a collection would look through all of torch, a tenth of a second each time, and find nothing: steps
    leave no cycles behind. While a CUDA graph is recorded it could free the graphs of an engine that is gone, and that
    ends the recording.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
