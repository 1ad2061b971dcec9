"""How much memory a process and a checkpoint take."""

import gc
import math
from pathlib import Path

import torch


def resident_bytes() -> int:
    """Return how much memory of this process is in RAM now."""
    import psutil

    gc.collect()
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int | None:
    """Return the most that ever was in RAM, or None where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def stored_weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Return the size of one copy of a checkpoint's tensors in ``dtype``."""
    from safetensors import safe_open

    num_elements = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            num_elements += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return num_elements * dtype.itemsize
