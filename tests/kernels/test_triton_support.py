"""What is missing for the Triton tier is said in one sentence, before any weights are loaded."""

import sys

import pytest
import torch

from minipaged import triton_support
from minipaged.cases import AttentionCase, make_paged_inputs
from minipaged.errors import UserError
from minipaged.foundation import kernels
from minipaged.launch import check_heads, check_tensors
from minipaged.paged.ops import paged_attention
from minipaged.triton_support import require_triton, triton_works
from tests.kernels.helpers import DEVICE, ON_DEVICE

pytest.importorskip("triton")
pytestmark = ON_DEVICE

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch):
    """Let the checks believe in a GPU of compute capability 9.0 and in a trial that went well."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_support, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_support, "_trial_error", lambda device, dtype: None)


def test_this_machine_can_run_the_triton_tier():
    require_triton(DEVICE, torch.float32)
    require_triton(DEVICE, torch.float16)


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, pretended_gpu: None):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"^tier='triton' needs the package triton, which cannot be imported .*$"):
        require_triton(GPU)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"^tier='triton' on a CPU needs TRITON_INTERPRET=1 .*$"):
        require_triton(CPU)


def test_bfloat16_is_refused_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match=r"^tier='triton' .*computes bfloat16 wrongly; use dtype float32$"):
        require_triton(CPU, torch.bfloat16)
    inputs = make_paged_inputs(AttentionCase("one", (3,)), torch.bfloat16)
    with pytest.raises(UserError, match=r"paged_attention: .*bfloat16"):
        paged_attention(*inputs.args, tier="triton")


def test_an_interpreter_that_cannot_work_with_this_numpy_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr("numpy.__version__", "2.4.1")
    with pytest.raises(UserError, match=r"the interpreter of Triton 3.6.0 needs numpy below 2.4, and this is 2.4.1$"):
        require_triton(CPU)


def test_an_old_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch, pretended_gpu: None):
    monkeypatch.setattr(triton_support, "compute_capability", lambda device: (7, 5))
    with pytest.raises(UserError, match=r"needs a GPU of compute capability 8.0 or higher, and this one has 7.5$"):
        require_triton(GPU)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, pretended_gpu: None):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_support.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="needs a C compiler"):
        require_triton(GPU)


def test_missing_python_headers_are_named(monkeypatch: pytest.MonkeyPatch, pretended_gpu: None):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(triton_support.sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
    with pytest.raises(UserError, match=r"needs Python\.h"):
        require_triton(GPU)


def test_a_head_that_is_too_large_is_refused_with_the_limit(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_support, "_missing_for_compiler", lambda device: iter(()))
    with pytest.raises(UserError, match=r"takes a head_dim of up to 256, and this model's is 320$"):
        require_triton(GPU, head_dim=320)
    with pytest.raises(UserError, match="head_dim 320 is too large"):
        check_heads("op", torch.zeros(1, 2, 320), torch.zeros(1, 1, 320))


def test_a_kernel_that_fails_or_computes_wrongly_is_found_by_the_trial(monkeypatch: pytest.MonkeyPatch):
    def fail(*args):
        raise RuntimeError("the driver is too old\nand a long trace")

    monkeypatch.setattr(kernels, "causal_attention", fail)
    with pytest.raises(UserError, match=r"^tier='triton' fails on its first kernel: the driver is too old$"):
        require_triton(DEVICE)
    monkeypatch.setattr(kernels, "causal_attention", lambda q, k, v, starts: v)
    with pytest.raises(UserError, match="computes wrongly on this machine"):
        require_triton(DEVICE)


def test_without_a_tier_an_unfit_gpu_gives_one_warning_and_a_cpu_none(
    monkeypatch: pytest.MonkeyPatch, pretended_gpu: None
):
    monkeypatch.setattr(triton_support, "_missing_for_compiler", lambda device: iter(()))
    assert triton_works(GPU)
    assert not triton_works(CPU)
    monkeypatch.setattr(triton_support, "_missing_for_compiler", lambda device: iter(["needs more"]))
    with pytest.warns(UserWarning, match="^tier='triton' needs more; running tier='torch'$"):
        assert not triton_works(GPU)


def test_launchers_refuse_a_cpu_and_tensors_with_gaps(monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(4, 4, device=DEVICE)
    with pytest.raises(AssertionError, match="contiguous"):
        check_tensors("op", x, x.T)
    with pytest.raises(AssertionError, match="must be"):
        check_tensors("op", x, x.half())
    with pytest.raises(UserError, match="float32, float16 and bfloat16, not"):
        check_tensors("op", x.double())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="kernels need a CUDA device"):
        check_tensors("op", torch.zeros(1))
