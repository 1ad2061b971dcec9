"""Python's collector of cycles, and when it has to wait."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_num_resting = 0
"""How many want the collector to rest. The last of them wakes it, if it was awake when the first came."""
_was_enabled = False


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Let no cycles be collected for a while, in no thread.

    Among steps a collection would look through all of torch, a tenth of a second each time, and find nothing: steps
    leave no cycles behind. While a CUDA graph is recorded it could free the graphs of an engine that is gone, and that
    ends the recording.
    """
    global _num_resting, _was_enabled
    with _lock:
        if not _num_resting:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_resting += 1
    try:
        yield
    finally:
        with _lock:
            _num_resting -= 1
            if not _num_resting and _was_enabled:
                gc.enable()
