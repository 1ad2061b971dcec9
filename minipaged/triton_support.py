"""Can this machine run the Triton tier? Asked once, before a model's weights are loaded."""

import os
import shutil
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from minipaged.errors import UserError
from minipaged.launch import MAX_HEAD_DIM, compute_capability, is_interpreted

MIN_CAPABILITY = (8, 0)
"""Older GPUs have no bfloat16 and no asynchronous copies, which every attention kernel is built on."""


def require_triton(device: torch.device, dtype: torch.dtype = torch.float32, head_dim: int | None = None) -> None:
    """Refuse the Triton tier where it cannot work, in one sentence that names what is missing.

    What can be looked up is looked up first. A trial of one small attention finds the rest, for example a Triton
    that does not match PyTorch, or a NumPy that does not match Triton's interpreter.

    Raises:
        UserError: The first piece that is missing.
    """
    reason = next(_missing_pieces(device, dtype, head_dim), None) or _trial_error(device, dtype)
    if reason is not None:
        raise UserError(f"tier='triton' {reason}")


def triton_works(device: torch.device, dtype: torch.dtype = torch.float32, head_dim: int | None = None) -> bool:
    """Return whether ``tier=None`` should mean Triton here: on a CUDA device that can run it.

    On a CUDA device that cannot, one warning says why PyTorch runs in its place. On a CPU nobody expects kernels.
    """
    if device.type != "cuda":
        return False
    try:
        require_triton(device, dtype, head_dim)
    except UserError as error:
        warnings.warn(f"{error}; running tier='torch'", stacklevel=2)
        return False
    return True


def _missing_pieces(device: torch.device, dtype: torch.dtype, head_dim: int | None) -> Iterator[str]:
    """Yield what is missing, what hides the rest first."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        yield f"needs the package triton, which cannot be imported ({_first_line(error)})"
    if device.type == "cpu" and not is_interpreted():
        yield "on a CPU needs TRITON_INTERPRET=1 set before Python starts; it is slow and meant for tests"
    if is_interpreted():
        if dtype == torch.bfloat16:
            yield "with TRITON_INTERPRET=1 computes bfloat16 wrongly; use dtype float32"
        yield from _missing_for_interpreter()
    else:
        yield from _missing_for_compiler(device)
    if head_dim is not None and head_dim > MAX_HEAD_DIM:
        yield f"takes a head_dim of up to {MAX_HEAD_DIM}, and this model's is {head_dim}"


def _missing_for_interpreter() -> Iterator[str]:
    """Yield the versions that do not go together: before 3.7 the interpreter's loops fail with a newer NumPy."""
    import numpy
    import triton

    found = triton.__version__, numpy.__version__
    if _version(found[0]) < (3, 7) and _version(found[1]) >= (2, 4):
        yield "cannot run here: the interpreter of Triton {} needs numpy below 2.4, and this is {}".format(*found)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _missing_for_compiler(device: torch.device) -> Iterator[str]:
    capability = compute_capability(device)
    if capability < MIN_CAPABILITY:
        yield "needs a GPU of compute capability 8.0 or higher, and this one has {}.{}".format(*capability)
    # Triton compiles a small C module that hands the kernel's arguments over.
    if os.environ.get("CC") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        yield "needs a C compiler: install gcc or clang, or put the path of one into CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    if not (Path(sysconfig.get_paths(scheme)["include"]) / "Python.h").exists():
        yield "needs Python.h: install the headers of this Python, often a package called python3-dev"


def _trial_error(device: torch.device, dtype: torch.dtype) -> str | None:
    """Run one attention and return what went wrong. Values 1 and 3 under equal scores give 1, then 2."""
    try:
        from minipaged.foundation.kernels import causal_attention

        v = torch.tensor([1.0, 3.0], device=device, dtype=dtype).view(2, 1, 1).expand(2, 1, 16).contiguous()
        starts = torch.tensor([0, 2], device=device, dtype=torch.int32)
        out = causal_attention(torch.zeros_like(v), v, v, starts)[:, 0, 0].tolist()
    except Exception as error:  # whatever a compiler, a driver or an interpreter may raise
        return f"fails on its first kernel: {_first_line(error)}"
    return None if out == [1.0, 2.0] else f"computes wrongly on this machine: {out} in place of [1.0, 2.0]"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
