"""What is chosen on machines that are not this one: device, dtype, tier, and the default size of the cache."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from minipaged import UserError, machine
from minipaged.foundation.config import ModelConfig
from minipaged.machine import choose_device, choose_dtype, choose_tier, default_num_batched_tokens, default_num_blocks

CPU, GPU = torch.device("cpu"), torch.device("cuda")

SMALL_MODEL = ModelConfig.from_dict(
    {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    }
)
"""The sizes of SmolLM2-135M: 2 x 30 layers x 3 KV heads x 64 entries are 23,040 bytes a token in half precision."""


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    """Return a function that lets the machine look like another one."""

    def set_up(
        *,
        gpus: int = 1,
        capability: tuple[int, int] = (9, 0),
        free_bytes: int = 0,
        cpuinfo: str | None = None,
        triton_is_missing: str | None = None,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free_bytes, 2 * free_bytes))

        def read_text() -> str:
            if cpuinfo is None:
                raise FileNotFoundError("/proc/cpuinfo")
            return cpuinfo

        monkeypatch.setattr(machine, "Path", lambda path: SimpleNamespace(read_text=read_text))

        def require_triton(*_) -> None:
            if triton_is_missing:
                raise UserError(f"tier='triton' {triton_is_missing}")

        monkeypatch.setattr(machine, "require_triton", require_triton)
        monkeypatch.setattr(machine, "triton_works", lambda device, *_: device.type == "cuda" and not triton_is_missing)

    return set_up


# The device


def test_without_a_wish_the_gpu_is_taken_where_there_is_one(pretend):
    pretend(gpus=1)
    assert choose_device(None).type == "cuda"
    pretend(gpus=0)
    assert choose_device(None).type == "cpu"


def test_a_device_that_is_there_is_taken(pretend):
    pretend(gpus=2)
    for name in ("cpu", "cuda", "cuda:1", torch.device("cuda:0")):
        assert choose_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("tpu", 1, "device 'tpu' is not known; use 'cpu' or 'cuda'"),
        ("cuda:x", 1, "device 'cuda:x' is not known"),
        ("mps", 1, "device 'mps' is not supported; use 'cpu' or 'cuda'"),
        ("cuda", 0, "device 'cuda' is not here: this machine has 0 CUDA GPUs"),
        ("cuda:2", 2, "device 'cuda:2' is not here: this machine has 2 CUDA GPUs"),
    ],
)
def test_a_device_that_is_not_there_is_refused(pretend, device: str, gpus: int, message: str):
    pretend(gpus=gpus)
    with pytest.raises(UserError, match=message):
        choose_device(device)


# The dtype


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_with_bfloat16_uses_it_unless_told_otherwise(pretend, capability: tuple[int, int]):
    pretend(capability=capability)
    assert choose_dtype(None, GPU) == choose_dtype("bfloat16", GPU) == torch.bfloat16
    assert choose_dtype("float16", GPU) == torch.float16
    assert choose_dtype(torch.float32, GPU) == torch.float32


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_a_gpu_without_bfloat16_computes_in_float16_and_says_so(pretend, capability: tuple[int, int]):
    pretend(capability=capability)
    with pytest.warns(UserWarning, match="^this GPU has no bfloat16; computing in float16$"):
        assert choose_dtype(None, GPU) == torch.float16
    with pytest.raises(UserError, match=r"no bfloat16 .*use dtype float16 or float32"):
        choose_dtype("bfloat16", GPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_dtype("float16", GPU) == torch.float16  # what was asked for needs no warning


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("flags : fpu sse avx512f avx512_bf16", torch.bfloat16),
        ("flags : fpu amx_bf16 amx_tile", torch.bfloat16),
        ("Features : fp asimd bf16 i8mm", torch.bfloat16),  # 64-bit Arm
        ("flags : fpu sse avx2 avx512f", torch.float32),
        ("model name : some-bf16-like name", torch.float32),
        (None, torch.float32),  # no such file: macOS, Windows
    ],
)
def test_a_cpu_computes_in_bfloat16_only_where_it_does_so_natively(pretend, cpuinfo: str | None, expected: torch.dtype):
    pretend(cpuinfo=cpuinfo)
    assert choose_dtype(None, CPU) == expected
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16  # a named one is obeyed, slow as it may be
    assert choose_dtype("float32", CPU) == torch.float32


def test_float16_on_a_cpu_and_unknown_dtypes_are_refused(pretend):
    pretend()
    for dtype in ("float16", torch.float16):
        with pytest.raises(UserError, match="float16 is not supported on the CPU; use float32 or bfloat16"):
            choose_dtype(dtype, CPU)
    for device in (CPU, GPU):
        for dtype, name in (("int8", "'int8'"), ("fp16", "'fp16'"), (torch.float64, "torch.float64")):
            with pytest.raises(UserError, match=f"dtype {name} is not supported; use float32, bfloat16, float16"):
                choose_dtype(dtype, device)


# The tier


def test_no_tier_stays_open_where_kernels_run_and_on_a_cpu_but_becomes_torch_on_an_unfit_gpu(pretend):
    pretend()
    assert choose_tier(None, GPU, torch.float32, SMALL_MODEL) is None
    assert choose_tier(None, CPU, torch.float32, SMALL_MODEL) is None
    pretend(triton_is_missing="needs a C compiler")
    assert choose_tier(None, GPU, torch.float32, SMALL_MODEL) == "torch"
    assert choose_tier(None, CPU, torch.float32, SMALL_MODEL) is None


def test_a_named_tier_is_obeyed_or_refused(pretend):
    pretend()
    for tier in ("torch", "triton"):
        assert choose_tier(tier, GPU, torch.float32, SMALL_MODEL) == tier
    pretend(triton_is_missing="needs a C compiler")
    assert choose_tier("torch", GPU, torch.float32, SMALL_MODEL) == "torch"
    with pytest.raises(UserError, match=r"^tier='triton' needs a C compiler$"):
        choose_tier("triton", GPU, torch.float32, SMALL_MODEL)
    with pytest.raises(UserError, match="tier must be 'torch', 'triton' or None, not 'cuda'"):
        choose_tier("cuda", GPU, torch.float32, SMALL_MODEL)  # type: ignore[arg-type]


def test_the_kernels_are_asked_about_the_dtype_and_the_head_size_of_the_model(pretend, monkeypatch):
    pretend()
    asked = []
    monkeypatch.setattr(machine, "require_triton", lambda *question: asked.append(question))
    monkeypatch.setattr(machine, "triton_works", lambda *question: asked.append(question) or True)
    for tier in ("triton", None):
        choose_tier(tier, GPU, torch.float16, SMALL_MODEL)
    assert asked == [(GPU, torch.float16, 64)] * 2


# The cache


@pytest.mark.parametrize(
    ("dtype", "block_size", "max_model_len", "expected"),
    [
        (torch.bfloat16, 16, 8192, 2912),  # 2 ** 30 // 23,040 = 46,603 slots
        (torch.float32, 16, 8192, 1456),  # half as many
        (torch.bfloat16, 256, 8192, 182),
        (torch.bfloat16, 16, 64, 1024),  # no more than 256 sequences of 64 tokens
        (torch.bfloat16, 100_000, 8192, 1),
    ],
)
def test_on_a_cpu_the_cache_takes_one_gibibyte(
    pretend, dtype: torch.dtype, block_size: int, max_model_len: int, expected: int
):
    pretend()
    assert default_num_blocks(SMALL_MODEL, dtype, CPU, block_size, max_model_len) == expected


@pytest.mark.parametrize(
    ("gibibytes", "dtype", "expected"),
    [
        # 0.9 x 10 GiB - 16 x 8192 x 1536 x 2 bytes of activations = 9,261,023,232 bytes = 401,954 slots
        (10, torch.bfloat16, 25_122),
        (10, torch.float32, 12_014),  # 8,858,370,048 bytes = 192,239 slots
        (80, torch.bfloat16, 131_072),  # no more than 256 sequences of 8192 tokens
        (0.1, torch.bfloat16, 1),  # less than the activations
    ],
)
def test_on_a_gpu_the_cache_takes_nine_tenths_of_what_is_free_less_the_activations(
    pretend, gibibytes: float, dtype: torch.dtype, expected: int
):
    pretend(free_bytes=int(gibibytes * 2**30))
    assert default_num_blocks(SMALL_MODEL, dtype, GPU, 16, 8192) == expected


@pytest.mark.parametrize(("gibibytes", "expected"), [(24, 8192), (63, 8192), (64, 16_384), (140, 16_384)])
def test_a_step_takes_more_tokens_on_a_large_gpu_only(gibibytes: int, expected: int, monkeypatch: pytest.MonkeyPatch):
    properties = SimpleNamespace(total_memory=gibibytes * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert default_num_batched_tokens(GPU) == expected
    assert default_num_batched_tokens(CPU) == 8192
