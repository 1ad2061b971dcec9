"""Compile every kernel for GPUs that need not be here, and check what the compiler made of it.

    python -m minipaged.compile_gate            all shapes, fp16, bf16 and fp32, three GPU generations
    python -m minipaged.compile_gate --quick    one shape of each kernel in bf16

The operations run on tensors without memory, and their launches are caught and compiled instead: what is checked
is what would run, tile sizes and all. A compiled kernel must not spill registers to memory, must fit into the
shared memory of its GPU, and must use matrix instructions where it multiplies matrices. In fp32, which exists to
check the rest, it only has to compile and fit. No function of a kernel module may be left out.
"""

import argparse
import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minipaged import launch

SHARED_KB = {(8, 0): 163, (8, 9): 99, (9, 0): 227}
"""Compute capabilities to compile for (A100, RTX 4090, H100), with the KB of shared memory a program may have."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.int32: "i32", torch.int64: "i64"}
TYPE_NAMES |= {torch.float64: "fp64"}

Shape = str | tuple[str, torch.dtype]
"""Axes by the letters of `minipaged.shapes`, for a tensor of the dtype that is compiled for or of a given one."""


def settings(axis: str) -> list[tuple[str, torch.dtype]]:
    """Return the tensors of ``sample_tokens`` between logits and output indices."""
    return [(axis, dtype) for dtype in (torch.float32, torch.int32, torch.float64, torch.float64, torch.int64)]


ARGUMENTS: dict[str, list[Shape | float]] = {
    "foundation.rms_norm": ["T E", "E", 1e-6],
    "foundation.rotary": ["T H D", "T K D", ("T D/2", torch.float32), ("T D/2", torch.float32)],
    "foundation.silu_mul": ["T F", "T F"],
    "foundation.causal_attention": ["T H D", "T K D", "T K D", ("B+1", torch.int32)],
    "foundation.sampler.sample_tokens": ["B V", ("B", torch.float32)],
    "contiguous.contiguous_attention": ["B H D", "B L K D", "B L K D", ("B", torch.int32)],
    "paged.write_slots": ["T K D", "T K D", "N S K D", "N S K D", ("T", torch.int64)],
    "paged.paged_attention": ["B H D", "N S K D", "N S K D", ("B M", torch.int32), ("B", torch.int32)],
    "sharing.copy_blocks": ["N S K D", ("N 2", torch.int64)],
    "batching.ragged_paged_attention": [
        *("T H D", "N S K D", "N S K D"),
        *[(axes, torch.int32) for axes in ("B M", "B+1", "B")],
    ],
    "batching.merge_states": ["T H D", ("T H", torch.float32), "T H D", ("T H", torch.float32)],
    "batching.gather_blocks": ["N S K D", ("P", torch.int64), "P S K D"],
    "batching.scatter_blocks": ["N S K D", ("P", torch.int64), "P S K D"],
    "prefix.shared_prefix_attention": [
        *("B H D", "N S K D", "N S K D"),
        *[(axes, torch.int32) for axes in ("B M", "B", "P+1", "P")],
    ],
    "fast.skinny_linear": ["T E", "F E"],
    "fast.norm_rotate_write": ["T (H+2K)D"],
    "fast.silu_mul_packed": ["T 2F"],
    "fast.rows.expand_rows": [
        *(("4 N", torch.int64), ("N+1 M", torch.int32), *settings("N+1"), ("N", torch.int64)),
        *[("N", torch.int64)] * 3,
        *(("N M", torch.int32), ("N", torch.int32), ("N", torch.int64), *settings("N")),
    ],
}
"""The positional arguments of every operation, as ``rung.operation``."""

LONG_TABLE = 512
"""Width of block tables that hold many pieces of a sequence: several programs of decode may then share them."""

MANY_SEQUENCES = launch.FEW_PROGRAMS
"""With so many, decode takes one program for all pieces of a sequence."""

HEADS = [
    (32, 8, 128),
    (9, 3, 64),
    (28, 4, 128),
    (12, 12, 80),
    (32, 32, 96),
    (48, 2, 64),
    (71, 1, 64),
    (64, 1, 128),
    (8, 4, 256),
]
"""Query heads, KV heads and head sizes to compile; ``--quick`` takes the first."""


@dataclass(frozen=True)
class Case:
    """One call of an operation: sizes by letter, and keyword arguments."""

    op: str
    sizes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = self.sizes | {name: value for name, value in self.options.items() if name != "scale"}
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def call(self, dtype: torch.dtype) -> None:
        """Call the operation on tensors without memory."""
        rung, _, name = self.op.rpartition(".")
        op = getattr(importlib.import_module(f"minipaged.{rung}.ops"), name)
        arguments = [self.make(spec, dtype) for spec in ARGUMENTS[self.op]]
        op(*arguments, **{name: self.make(value, dtype) for name, value in self.options.items()}, tier="triton")

    def make(self, spec: Any, dtype: torch.dtype) -> Any:
        """Return an empty tensor for a shape, and anything else as it is."""
        if isinstance(spec, str):
            spec = (spec, dtype)
        if not isinstance(spec, tuple):
            return spec
        sizes = {"T": 64, "B": 4, "L": 256, "N": 32, "M": 8, "P": 3, "2": 2, **self.sizes}
        sizes |= {"D/2": sizes.get("D", 0) // 2, "B+1": sizes["B"] + 1, "P+1": sizes["P"] + 1}
        sizes |= {"(H+2K)D": (sizes.get("H", 0) + 2 * sizes.get("K", 0)) * sizes.get("D", 0)}
        sizes |= {"2F": 2 * sizes.get("F", 0), "4": 4, "N+1": sizes["N"] + 1}
        return torch.empty([sizes[axis] for axis in spec[0].split()], dtype=spec[1], device="cuda")


def all_cases() -> list[Case]:
    """Return the calls to compile, for each operation the commonest shape first."""
    shared = "prefix.shared_prefix_attention"
    attention = [op for op in ARGUMENTS if op.endswith("attention") and op != shared]
    cases = [Case("foundation.rms_norm", {"E": width}, {"residual": "T E"}) for width in (2048, 8192)]
    cases += [Case("foundation.rms_norm", {"E": width}) for width in (64, 2048)]
    cases += [Case("foundation.silu_mul", {"F": width}) for width in (8192, 1000)]
    sampler = "foundation.sampler.sample_tokens"
    cases += [Case(sampler, {"V": vocab_size}, limit(True)) for vocab_size in (151_936, 1000, 262_144)]
    cases += [Case(sampler, {"V": 151_936}, limit(False))]
    for num_heads, num_kv_heads, head_dim in HEADS:
        sizes = {"H": num_heads, "K": num_kv_heads, "D": head_dim, "S": 16}
        cases += [Case("foundation.rotary", sizes), Case("batching.merge_states", sizes)]
        cases += [Case(op, sizes, attend()) for op in attention]
        cases += [Case("batching.ragged_paged_attention", sizes | {"M": LONG_TABLE}, attend())]
        cases += [Case("batching.ragged_paged_attention", sizes | {"T": 4}, attend())]  # mostly decode rows
        cases += [Case(shared, sizes | {"M": LONG_TABLE, "B": num_seqs}) for num_seqs in (4, MANY_SEQUENCES)]
    sizes = {"H": 32, "K": 8, "D": 128}
    cases += [Case(op, sizes | {"S": 16}, attend(window=4096)) for op in attention]
    cases += [Case("batching.ragged_paged_attention", sizes | {"S": 16, "M": LONG_TABLE}, attend(window=4096))]
    for op in ("paged.paged_attention", "batching.ragged_paged_attention"):
        cases += [Case(op, sizes | {"S": slots}, attend()) for slots in (1, 5, 256)]
    cases += [Case(shared, sizes | {"S": slots, "M": 2048}) for slots in (1, 5, 256)]
    for op in ("paged.write_slots", "sharing.copy_blocks", "batching.gather_blocks", "batching.scatter_blocks"):
        cases += [Case(op, {"K": 8, "D": head_dim, "S": 16}) for head_dim in (128, 80)]
    return cases + fast_cases()


def fast_cases() -> list[Case]:
    """Return the calls to compile of the operations above the rungs."""
    skinny, rotate = "fast.skinny_linear", "fast.norm_rotate_write"
    weights = [(4096, 1024), (6144, 1024), (1024, 2048), (1024, 3072), (4096, 4096), (6144, 4096), (28672, 4096)]
    cases = [Case(skinny, {"T": 16, "F": num_out, "E": num_in}) for num_out, num_in in weights]
    cases += [Case(skinny, {"T": 1, "F": 1000, "E": 100}, {"bias": "F"})]
    cases += [Case("fast.silu_mul_packed", {"T": 64, "F": 3072})]
    cases += [Case("fast.rows.expand_rows", {}, {"size": 32, "block_size": slots}) for slots in (16, 5)]
    for num_heads, num_kv_heads, head_dim in HEADS:
        sizes = {"H": num_heads, "K": num_kv_heads, "D": head_dim, "S": 16}
        cases += [Case(rotate, sizes, pack(num_heads, norm)) for norm in ("D", None)]
    return cases


def pack(num_heads: int, norm: str | None) -> dict[str, Any]:
    """Return the arguments of ``norm_rotate_write`` behind the packed rows."""
    angles, pool = ("T D/2", torch.float32), "N S K D"
    return {
        **{"q_norm": norm, "k_norm": norm, "eps": 1e-6, "cos": angles, "sin": angles},
        **{"k_pool": pool, "v_pool": pool, "slot_mapping": ("T", torch.int64), "num_heads": num_heads},
    }


def attend(window: int | None = None) -> dict[str, Any]:
    """Return the options of an attention operation."""
    return {"scale": 1.0, "window": window}


def limit(has_limits: bool) -> dict[str, Any]:
    """Return the arguments of ``sample_tokens`` behind the temperatures, with all filters or with none."""
    dtypes = {"top_k": torch.int32, "top_p": torch.float64, "min_p": torch.float64}
    limits = {name: ("B", dtype) if has_limits else None for name, dtype in dtypes.items()}
    return limits | {"seeds": ("B", torch.int64), "output_indices": ("B", torch.int64)}


def quick_cases() -> list[Case]:
    """Return the first case of every operation, and one in which several programs of decode share a sequence."""
    first = {case.op: case for case in reversed(all_cases())}
    return [*first.values(), next(case for case in all_cases() if case.sizes.get("M") == LONG_TABLE)]


def all_jobs(quick: bool) -> list[tuple[Case, str, tuple[int, int]]]:
    """Return what to compile, in which dtype and for which GPU. fp32 is slow to compile; two shapes are enough."""
    jobs = []
    for case in quick_cases() if quick else all_cases():
        dtypes = ["bf16"] if quick else ["bf16", "fp16"]
        if not quick and (case in quick_cases() or case.sizes.get("D") == launch.MAX_HEAD_DIM):
            dtypes.append("fp32")
        jobs += [(case, dtype, capability) for dtype in dtypes for capability in SHARED_KB]
    return jobs


@dataclass(frozen=True)
class Launch:
    """One launch as caught: the kernel, its arguments by name, and the compiler's options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


def catch_launches(case: Case, dtype: torch.dtype, capability: tuple[int, int]) -> list[Launch]:
    """Call the case's operation as on a GPU of this capability and return what it would have launched."""
    from triton.runtime.jit import JITFunction

    launches = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        options = {name: keywords.pop(name) for name in [*keywords] if name not in kernel.arg_names}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | keywords
        assert len(arguments) == len(kernel.arg_names) and all(size > 0 for size in grid), kernel.__name__
        launches.append(Launch(kernel, arguments, options))

    fake_gpu = patch.object(launch, "compute_capability", lambda device: capability)
    with FakeTensorMode(), fake_gpu, patch.object(JITFunction, "run", run):
        case.call(dtype)
    assert launches, f"{case} launched no kernel"
    return launches


def compile_launch(launch: Launch, capability: tuple[int, int]) -> Any:
    """Compile a launch for a GPU, pointers taken to be multiples of 16 bytes as PyTorch's are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for i, (parameter, name) in enumerate(zip(launch.kernel.params, launch.kernel.arg_names, strict=True)):
        value = launch.arguments[name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif torch.is_tensor(value):
            signature[name], attributes[(i,)] = f"*{TYPE_NAMES[value.dtype]}", [["tt.divisibility", 16]]
        else:
            assert isinstance(value, float) or parameter.do_not_specialize, f"{name} would be compiled anew"
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    return triton.compile(source, target=target, options=launch.options)


@dataclass(frozen=True)
class Report:
    """What one kernel was compiled to."""

    kernel: str
    case: str
    dtype: str
    capability: tuple[int, int]
    registers: int
    stack_bytes: int
    shared_bytes: int
    has_dot: bool
    has_matrix_instructions: bool

    def faults(self) -> Iterator[str]:
        """Yield what breaks a rule."""
        limit = SHARED_KB[self.capability] * 1024
        if self.shared_bytes > limit:
            yield f"takes {self.shared_bytes} bytes of shared memory, more than {limit}"
        if self.dtype != "fp32" and self.stack_bytes:
            yield f"spills {self.stack_bytes} bytes of registers"
        if self.dtype != "fp32" and self.has_dot and not self.has_matrix_instructions:
            yield "multiplies matrices without matrix instructions"

    def __str__(self) -> str:
        name = f"sm_{self.capability[0]}{self.capability[1]} {self.dtype}"
        return f"{name} {self.kernel} of {self.case}: {self.registers} registers, {self.shared_bytes} bytes shared"


def inspect_compiled(compiled: Any, case: Case, dtype: str, capability: tuple[int, int]) -> Report:
    """Read registers and stack out of the binary. Triton itself learns them only when a GPU loads it."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Report(
        kernel=compiled.metadata.name,
        case=str(case),
        dtype=dtype,
        capability=capability,
        registers=int(found[1]),
        stack_bytes=int(found[2]),
        shared_bytes=compiled.metadata.shared,
        has_dot="tt.dot" in compiled.asm["ttir"],
        has_matrix_instructions=bool(re.search(r"\b(wgmma\.mma_async|mma\.sync)\.", compiled.asm["ptx"])),
    )


def compile_case(job: tuple[Case, str, tuple[int, int]]) -> list[Report]:
    """Do one job of the gate: compile every kernel that the case launches."""
    case, dtype, capability = job
    caught = catch_launches(case, DTYPES[dtype], capability)
    return [inspect_compiled(compile_launch(launch, capability), case, dtype, capability) for launch in caught]


def package_functions() -> dict[str, Any]:
    """Return every ``@triton.jit`` function that a kernel module of the package defines, by name."""
    from triton.runtime.jit import JITFunction

    package = Path(__file__).parent
    functions = {}
    for path in sorted(package.rglob("kernels.py")):
        module = importlib.import_module(".".join(("minipaged", *path.relative_to(package).with_suffix("").parts)))
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                assert name not in functions, f"two functions of kernels are called {name}"
                functions[name] = value
    return functions


def missing_functions(functions: dict[str, Any], compiled: set[str]) -> set[str]:
    """Return the functions that are neither among the compiled kernels nor called by one, directly or not."""
    waiting, reached = list(compiled), set()
    while waiting:
        name = waiting.pop()
        if name in functions and name not in reached:
            reached.add(name)
            tree = ast.parse(dedent(inspect.getsource(functions[name].fn)))
            waiting += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return set(functions) - reached


def run_gate(quick: bool) -> int:
    """Compile everything in this process and its workers, print what is wrong, and return the exit code."""
    import triton

    start = time.monotonic()
    jobs = all_jobs(quick)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        reports = list(chain.from_iterable(pool.map(compile_case, jobs)))
    faults = [f"{report}: {fault}" for report in reports for fault in report.faults()]
    functions = package_functions()
    left_out = missing_functions(functions, {report.kernel for report in reports})
    faults += [f"{name}: no kernel that was compiled reaches this function" for name in sorted(left_out)]
    print(*faults, sep="\n", end="\n" if faults else "")
    num_kernels = len({report.kernel for report in reports})
    by_gpu = Counter("sm_{}{}".format(*report.capability) for report in reports)
    print(
        f"Triton {triton.__version__}: {num_kernels} kernels, {len(functions)} functions, {len(reports)} compiled "
        f"({', '.join(f'{name} {count}' for name, count in by_gpu.items())}), {len(faults)} faults, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 1 if faults else 0


def main(arguments: list[str] | None = None) -> int:
    """Run the gate in a new process: with the real compiler, and a cache in which no old result can hide an error."""
    parser = argparse.ArgumentParser(
        prog="python -m minipaged.compile_gate", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one shape of each kernel in bf16")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here:
        return run_gate(options.quick)
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "minipaged.compile_gate", "--here", *["--quick"] * options.quick]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
