"""The gate that compiles kernels for GPUs that are not here: it passes, and it would fail if it had to."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from minipaged.compile_gate import Report, all_cases, missing_functions, quick_cases

GOOD = Report("k", "a case", "bf16", (8, 9), 100, 0, 99 * 1024, has_dot=True, has_matrix_instructions=True)


def test_every_kernel_compiles_for_three_gpu_generations(run_python):
    done = run_python("-m", "minipaged.compile_gate", "--quick", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 kernels" in done.stdout and "sm_80 32, sm_89 32, sm_90 32" in done.stdout and " 0 faults" in done.stdout


def test_the_whole_gate_covers_the_quick_one_and_head_sizes_that_are_no_powers_of_two():
    assert all(case in all_cases() for case in quick_cases())
    sizes = {case.sizes["D"] for case in all_cases() if case.op.endswith("attention")}
    assert sizes == {64, 80, 96, 128, 256}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stack_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": 99 * 1024 + 1}, "takes 101377 bytes of shared memory, more than 101376"),
        ({"has_matrix_instructions": False}, "without matrix instructions"),
    ],
)
def test_each_broken_rule_is_a_fault(change: dict, fault: str):
    assert not list(GOOD.faults())
    assert any(fault in found for found in replace(GOOD, **change).faults())


def test_in_fp32_only_shared_memory_counts():
    slow = replace(GOOD, dtype="fp32", stack_bytes=8, has_matrix_instructions=False)
    assert not list(slow.faults())
    assert list(replace(slow, shared_bytes=200_000).faults())


SPILLING = """
import minipaged.compile_gate as gate, minipaged.foundation.kernels as kernels
from minipaged.launch import Tiles
kernels.prefill_tiles = lambda q: Tiles(128, 64, 4, 5)
case = next(case for case in gate.all_cases() if case.op == "foundation.causal_attention")
print(*gate.compile_case((case, "bf16", (8, 9)))[0].faults())
"""


def test_tiles_that_are_too_large_are_found(run_python, tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-c", SPILLING, **environment)
    assert "spills" in done.stdout and "shared memory" in done.stdout, done.stdout + done.stderr


def test_a_function_that_no_compiled_kernel_calls_is_found():
    class Function:
        def __init__(self, fn):
            self.fn = fn

    def leaf():
        pass

    def middle():
        leaf()

    def kernel():
        middle()

    functions = {fn.__name__: Function(fn) for fn in (leaf, middle, kernel, torch.nn.functional.silu)}
    assert missing_functions(functions, {"kernel"}) == {"silu"}
    assert missing_functions(functions, {"middle"}) == {"silu", "kernel"}
