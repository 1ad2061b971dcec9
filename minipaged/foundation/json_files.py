"""Reads the JSON files of a model folder, which may hold anything."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as shown
from typing import Any

from minipaged.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file of a model folder holds.

    Raises:
        UserError: The file is missing, cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}, so it is no model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not {shown(content)}")
    return content


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn what a value of an unforeseen type sets off into one sentence that names the file with the value."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"{path} has a value that cannot be used ({type(error).__name__}: {reason})") from error
