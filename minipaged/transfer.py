"""Numbers on their way from Python to a device."""

from collections.abc import Sequence
from typing import Any

import torch

from minipaged.shapes import Tensor


def send(values: Sequence[Any], dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Return a tensor of some numbers on a device, without waiting for what the device is doing.

    From ordinary memory CUDA copies only when everything launched before is done, and the caller waits. From pinned
    memory the GPU fetches the numbers itself, when it comes to that.

    Example:
        >>> send([1, 2], torch.int32, "cpu")
        tensor([1, 2], dtype=torch.int32)
    """
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
