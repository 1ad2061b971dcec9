"""What the kernel tests share: the device, the dtypes, what counts as equal, and a guard against falling back."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minipaged.cases import MAX_ERROR, AttentionCase

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
"""Without a GPU, kernels run in Triton's interpreter; see tests/conftest.py."""

ON_DEVICE = [pytest.mark.gpu] if HAS_GPU else []
"""Where there is a GPU, ``-m gpu`` runs the whole suite on it."""

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter cannot do this")]

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16", marks=NEEDS_GPU),
]
HALF_DTYPES = DTYPES[1:]

RUNGS = ("foundation", "foundation.sampler", "contiguous", "paged", "sharing", "batching", "prefix", "fast")
REFERENCES = [f"minipaged.{rung}.reference" for rung in RUNGS]
ALLOWED = {"empty", "empty_like", "new_empty", "set_", "view", "_unsafe_view", "detach", "alias", "select", "slice"}
ALLOWED |= {"is_pinned"}
"""Operations of PyTorch that a launcher may use: they make room or look at it differently, and compute nothing."""


def assert_agrees(out: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor) -> None:
    """Hold a kernel's result to the exact one in fp64.

    In fp32 the distance is at most `MAX_ERROR`, relative for results above 1. In half precision it is at most twice
    that of the reference, which rounds once at the end, where the kernel rounds its softmax weights too; and half a
    unit in the last place of the largest result on top, for a reference that happened to round well.
    """
    assert out.dtype == reference.dtype and out.shape == reference.shape == exact.shape
    assert torch.isfinite(out).all()
    if not out.numel():
        return
    exact = exact.cpu()
    error, own_error = ((x.double().cpu() - exact).abs() for x in (out, reference))
    if out.dtype == torch.float32:
        assert (error <= MAX_ERROR[torch.float32] * exact.abs().clamp(min=1)).all(), error.max()
    else:
        half_unit = torch.finfo(out.dtype).eps / 2 * exact.abs().max()
        assert error.max() <= 2 * own_error.max() + half_unit, (error.max(), own_error.max())


class OnlyAllocations(TorchDispatchMode):
    """Raise when PyTorch computes anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # The interpreter hands memory back to its owner, which on a CPU copies it onto itself.
        is_hand_back = name == "copy_" and args[0].data_ptr() == args[1].data_ptr()
        assert name in ALLOWED or is_hand_back, f"a launcher called torch's {name}"
        return func(*args, **kwargs or {})


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the Triton tier called the reference")


@contextmanager
def no_fallback() -> Iterator[None]:
    """Run the body with every reference raising and PyTorch's own operations forbidden."""
    with ExitStack() as stack:
        for module in map(importlib.import_module, REFERENCES):
            for name, value in vars(module).items():
                if callable(value) and getattr(value, "__module__", None) == module.__name__:
                    stack.enter_context(patch.object(module, name, refuse))
        stack.enter_context(OnlyAllocations())
        yield


def run_kernel(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operation in the Triton tier, guarded against computing anywhere else."""
    with no_fallback():
        return op(*args, **kwargs, tier="triton")


@contextmanager
def guarded_outputs(head_dim: int) -> Iterator[None]:
    """Let launchers write into the middle of buffers full of 7.0, and check one spare head on each side afterwards."""
    buffers: list[torch.Tensor] = []

    def empty_like(like: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((like.numel() + 2 * head_dim,), 7.0, dtype=like.dtype, device=like.device)
        buffers.append(buffer)
        return buffer[head_dim : head_dim + like.numel()].view(like.shape)

    with patch.object(torch, "empty_like", empty_like):
        yield
    assert buffers
    for buffer in buffers:
        assert (buffer[:head_dim] == 7).all() and (buffer[-head_dim:] == 7).all(), "a program wrote past its rows"


def exact_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, case: AttentionCase, scale: float | None = None
) -> torch.Tensor:
    """Attend in fp64, one query token [H, D] and its dense cache [L, K, D], with K and V repeated for every head."""
    if not len(keys):
        return torch.zeros(q.shape, dtype=torch.float64)
    first = 0 if case.window is None else max(0, len(keys) - case.window)
    group = case.num_heads // case.num_kv_heads
    keys, values = (x[first:].double().cpu().repeat_interleave(group, dim=1) for x in (keys, values))
    scale = case.head_dim**-0.5 if scale is None else scale
    weights = torch.einsum("hd,lhd->hl", q.double().cpu(), keys).mul(scale).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values)
