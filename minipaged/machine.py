"""What this machine can do: the device, the dtype, and how much memory the cache gets when nobody says."""

import warnings
from pathlib import Path

import torch

from minipaged.batching.limits import MAX_NUM_BATCHED_TOKENS
from minipaged.errors import UserError
from minipaged.foundation.config import ModelConfig
from minipaged.foundation.generate import MAX_PREFILL_TOKENS
from minipaged.tiers import Tier, check_tier
from minipaged.triton_support import require_triton, triton_works

CPU_CACHE_BYTES = 2**30
"""Memory for keys and values on a CPU when ``num_blocks`` is not given."""

GPU_CACHE_SHARE = 0.9
"""Share of the GPU memory left by the weights that the cache takes when ``num_blocks`` is not given."""

LARGE_GPU_BYTES = 64 * 2**30
"""Memory of a GPU from which on a step takes more tokens when nobody says."""

MAX_DEFAULT_SEQUENCES = 256
"""The default cache never has room for more sequences of full length than this: tiny models stay tiny."""


def choose_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r} is not known; use 'cpu' or 'cuda'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {device!r} is not here: this machine has {torch.cuda.device_count()} CUDA GPUs")
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # kernels are launched on the current device
    return chosen


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in, or refuse one that the device cannot use well."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if isinstance(dtype, str):
        if dtype not in names:
            raise UserError(f"dtype {dtype!r} is not supported; use {', '.join(names)}")
        dtype = names[dtype]
    if dtype is not None and dtype not in names.values():
        raise UserError(f"dtype {dtype} is not supported; use {', '.join(names)}")
    if device.type == "cpu":
        if dtype == torch.float16:
            raise UserError("dtype float16 is not supported on the CPU; use float32 or bfloat16")
        return dtype or (torch.bfloat16 if cpu_has_bfloat16() else torch.float32)
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
    if dtype == torch.bfloat16 and not has_bfloat16:
        raise UserError("this GPU has no bfloat16 (compute capability below 8.0); use dtype float16 or float32")
    if dtype is None and not has_bfloat16:
        warnings.warn("this GPU has no bfloat16; computing in float16", stacklevel=3)
        return torch.float16
    return dtype or torch.bfloat16


def choose_tier(tier: Tier, device: torch.device, dtype: torch.dtype, config: ModelConfig) -> Tier:
    """Return the tier to run, before any weight is loaded: a named one is obeyed or refused.

    None stays None, which is Triton on a CUDA device; where the kernels cannot run on it, a warning says why and
    PyTorch runs in their place.
    """
    check_tier(tier)
    if tier == "triton":
        require_triton(device, dtype, config.head_dim)
    if tier is None and device.type == "cuda" and not triton_works(device, dtype, config.head_dim):
        return "torch"
    return tier


def cpu_has_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 natively, as far as the system tells."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    words = set(flags.split())
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def default_num_batched_tokens(device: torch.device) -> int:
    """Return the most tokens of one step when nobody says.

    A large GPU computes 8,192 tokens of a small model in the time that Python takes to launch them, and has room for
    twice as many activations: 7.5 GB for the 8B shape in half precision.
    """
    is_large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= LARGE_GPU_BYTES
    return 2 * MAX_NUM_BATCHED_TOKENS if is_large else MAX_NUM_BATCHED_TOKENS


def default_num_blocks(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    block_size: int,
    max_model_len: int,
    num_step_tokens: int = MAX_PREFILL_TOKENS,
) -> int:
    """Return how many blocks the cache gets when nobody says: see `LLM`.

    On a GPU, room is left for the activations of one step: about 16 vectors of the MLP's width a token.
    """
    if device.type == "cuda":
        activations = 16 * num_step_tokens * config.intermediate_size * dtype.itemsize
        num_bytes = torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE - activations
    else:
        num_bytes = CPU_CACHE_BYTES
    num_slots = min(num_bytes // config.kv_bytes_per_token(dtype), MAX_DEFAULT_SEQUENCES * max_model_len)
    return max(1, int(num_slots) // block_size)
