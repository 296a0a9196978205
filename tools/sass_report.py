#!/usr/bin/env python3
"""Reports what limits the speed of CUDA kernels, from the machine code that nvcc made of them.

    tools/sass_report.py [--architecture 90] [--all] OBJECT...
    tools/sass_report.py --check OBJECT...

Prints a Markdown table, one row for each kernel (--all: also for kernels without a global load in a loop):

- registers of a thread, and the share of a multiprocessor's 2048 threads that fit with them, in blocks of 256;
- bytes of the widest and of the most frequent load and store of its loop;
- global loads, and their bytes, that a thread asks for before it waits for the first of them, and how often it waits;
- instructions in the loop for each 16 bytes that it moves, and fp64 instructions;
- local memory (spilled registers) and traps;
- an estimate of the share of an H200's 4.8 TB/s (its method is in docs/gpu.md).

"The loop" is the innermost one that loads most bytes. It is read as one straight pass: where it has alternatives, such as
formats that are chosen at run time, all of them count. --check prints problems instead, as tools/check_cuda_objects.py does,
whose reader of machine code this is.
"""
import argparse
import collections
import pathlib
import re
import subprocess
import sys

import check_cuda_objects

BLOCK = 256
MULTIPROCESSORS = 132
BANDWIDTH = 4.8e12
LATENCY = 0.6e-6
INSTRUCTIONS = 2.5 * 1.75e9  # a second, of warps, on a multiprocessor
BEST = 0.9  # what kernels that only copy reach


def threads_of(registers: int) -> int:
    """The threads that fit on a multiprocessor: registers are given to warps in units of 256."""
    of_warp = -(-registers * 32 // 256) * 256
    blocks = min(2048 // BLOCK, 65536 // of_warp // (BLOCK // 32))
    return blocks * BLOCK


def share_of(kernel) -> float:
    """Of the bandwidth: limited by waiting for memory, or by the instructions. No kernel here writes more than it reads, so
    further stores are alternatives."""
    loop = kernel.loop
    moved = sum(loop.loads) + min(sum(loop.stores), sum(loop.loads))
    by_latency = MULTIPROCESSORS * threads_of(kernel.registers) * moved / (loop.waits * LATENCY) / BANDWIDTH
    by_instructions = MULTIPROCESSORS * INSTRUCTIONS / loop.instructions * 32 * moved / BANDWIDTH
    return min(by_latency, by_instructions, BEST)


def demangled(names):
    result = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    short = []
    for name in result.splitlines():
        name = re.sub(r"\(anonymous namespace\)::|semitone::kernels::|^void ", "", name)
        name = re.sub(r"\((unsigned int|semitone::kernels::GeluForm|GeluForm)\)", "", name)
        name = re.sub(r",? Basic\w+Rule<double> ", "", name)
        short.append(name[: name.index("(")] if "(" in name else name)
    return short


def widths(sizes) -> str:
    if not sizes:
        return "-"
    widest, usual = max(sizes), collections.Counter(sizes).most_common(1)[0][0]
    return f"{widest}" if widest == usual else f"{widest} ({usual})"


def rows(paths, architecture: int, everything: bool):
    for path in paths:
        for cubin in check_cuda_objects.cubins_of(path.read_bytes()):
            if cubin.architecture != architecture:
                continue
            kernels = [kernel for kernel in cubin.kernels if kernel.loop.loads or everything]
            for kernel, name in sorted(zip(kernels, demangled([kernel.name for kernel in kernels])), key=lambda one: one[1]):
                loop = kernel.loop
                moved = sum(loop.loads) + sum(loop.stores)
                yield [
                    path.name.split(".")[0],
                    f"`{name}`",
                    kernel.registers,
                    f"{threads_of(kernel.registers) / 2048:.0%}",
                    widths(loop.loads),
                    widths(loop.stores),
                    f"{loop.loads_in_flight}, {loop.bytes_in_flight} B, {loop.waits}",
                    f"{16 * loop.instructions / moved:.0f}" if moved else "-",
                    loop.fp64,
                    f"{kernel.local_bytes}, {kernel.traps}",
                    f"{share_of(kernel):.0%}" if loop.loads else "-",
                ]


COLUMNS = ["source", "kernel", "registers", "threads", "load", "store", "on their way, waits", "instructions", "fp64", "local, traps", "share"]


def main() -> int:
    parser = argparse.ArgumentParser(description="What limits the speed of CUDA kernels, from their machine code.")
    parser.add_argument("objects", nargs="+", type=pathlib.Path)
    parser.add_argument("--architecture", type=int, default=90, help="compute capability, times ten (default: 90)")
    parser.add_argument("--all", action="store_true", help="also kernels without a global load in a loop")
    parser.add_argument("--check", action="store_true", help="print problems, and exit with 1 if there is one")
    arguments = parser.parse_args()
    if arguments.check:
        problems = check_cuda_objects.check(arguments.objects)
        print("\n".join(problems), end="\n" if problems else "")
        return 1 if problems else 0
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for row in rows(arguments.objects, arguments.architecture, arguments.all):
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
