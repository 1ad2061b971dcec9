"""The command line of the benches."""

import sys
from importlib import import_module

from minipaged.cli import FAILURE, OneSentenceParser
from minipaged.errors import UserError

BENCHES = {
    "bookkeeping": "seconds that the caches' bookkeeping takes, by size of the pool",
    "cpu": "speed against transformers.generate and resident memory, on the CPU",
    "evidence": "the tests that need a GPU: which ran, on what, and how they ended",
    "fast": "what each step of fast/ is worth: the throughput workload with one more step each time",
    "kernels": "each operation on a GPU beside PyTorch's own and a plain copy, and beside its target",
    "prefix": "what the prefix cache costs without hits and saves with them, and whether its size matters",
    "profile": "steady decode steps under the profiler: time by kernel, and how long the GPU idles",
    "scheduler": "time of one step of the scheduler, by running sequences, queue and pool",
    "step": "one whole decode step of a 0.6B model in one CUDA graph, and its parts",
    "ladder": "one workload on every rung at the same memory: speed, sequences held, and where the slots go",
    "throughput": "whole workloads: tokens a second, start, memory, beside other engines and targets",
}
"""Name of each bench, which is its module's too, and what it measures."""


def list_benches() -> str:
    """Return the help text that names every bench."""
    lines = [f"  {name:<12}{purpose}" for name, purpose in BENCHES.items()]
    return "\n".join(["python -m minipaged.bench NAME [--help], where NAME is one of", *lines])


def main(arguments: list[str] | None = None) -> int:
    """Run the bench that the command line names and return the process's exit code.

    A bench is a module of this package with ``add_arguments(parser)`` and ``run(options)``.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(list_benches())
        return 0
    name, *rest = arguments
    if name not in BENCHES:
        print(f"no bench is called {name!r}; there is {', '.join(BENCHES)}", file=sys.stderr)
        return FAILURE
    bench = import_module(f"minipaged.bench.{name}")
    parser = OneSentenceParser(prog=f"minipaged.bench {name}", description=BENCHES[name])
    bench.add_arguments(parser)
    try:
        bench.run(parser.parse_args(rest))
    except UserError as error:
        print(error, file=sys.stderr)
        return FAILURE
    return 0


if __name__ == "__main__":
    sys.exit(main())
