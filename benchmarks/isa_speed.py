#!/usr/bin/env python3
"""The time per step of `semitone train` in a 16-bit dtype, compared with fp32, at each instruction set up to the processor's.

    isa_speed.py [--program build/release/apps/semitone] [--dtype fp16 bf16] [--rounds 3] [--batches 40] [--json FILE]

Each level runs in its own process, with ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA set, in interleaved rounds; the minimum of all rounds
counts. First checks that every level trains: a finite loss, all its steps. Wanted: O1 to O3 at no more than 1.3 times O0's time, also where
the processor has no such instructions and the dtype is emulated. Says where that is missed, and fails not: nothing else should run on the
machine, and that is not known here.
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = {
    "SSE4.1": ("default", "SSE41"),
    "AVX2": ("avx2", "AVX2"),
    "AVX-512": ("avx512", "AVX512_CORE"),
    "AVX512-BF16": ("avx512", "AVX512_CORE_BF16"),
    "AVX512-FP16": ("avx512", "AVX512_CORE_FP16"),
    "AMX": ("avx512", "AVX512_CORE_AMX"),
    "native": (None, None),
}
LEVELS = ["O0", "O1", "O2", "O3"]
WANTED = 1.3


def environment_of(limit):
    environment = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}
    for name, value in zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), LIMITS[limit]):
        if value is not None:
            environment[name] = value
    return environment


def run(program, limit, arguments):
    done = subprocess.run([program, *arguments], env=environment_of(limit), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{limit}: semitone {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def ms_per_step(options, limit, level, dtype):
    out = run(options.program, limit, ["train", "--opt-level", level, "--dtype", dtype, "--limit-batches", str(options.batches),
                                       "--epochs", "1", "--quiet", "--json"])
    result = json.loads(out)
    result = result[0] if isinstance(result, list) else result["results"][0]
    if result["steps"] != options.batches or not math.isfinite(result["train_loss"]):
        sys.exit(f"{limit}, {level} in {dtype} did not train: {result}")
    return result["ms_per_step"]


def decisions(program, limit, dtype):
    """Semitone's description of native and emulated kinds there."""
    emulated = json.loads(run(program, limit, ["ops", "--dtype", dtype, "--json"]))["emulated"]
    return "all native" if not emulated else "emulated: " + ", ".join(emulated)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/release/apps/semitone", type=pathlib.Path)
    parser.add_argument("--dtype", nargs="+", default=["fp16", "bf16"], choices=["fp16", "bf16"])
    parser.add_argument("--limit", nargs="+", default=list(LIMITS), choices=list(LIMITS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows, missed = [], []
    for dtype in options.dtype:
        print(f"\n{dtype}: ms/step, and times O0's\n{'limit':<12}" + "".join(f"{level:>16}" for level in LEVELS) + "  kinds of operators")
        for limit in options.limit:
            least = {level: math.inf for level in LEVELS}
            for _ in range(options.rounds):
                for level in LEVELS:
                    least[level] = min(least[level], ms_per_step(options, limit, level, dtype))
            ratios = {level: least[level] / least["O0"] for level in LEVELS}
            words = decisions(options.program, limit, dtype)
            print(f"{limit:<12}" + "".join(f"{least[level]:>9.2f} {ratios[level]:>4.2f} x" for level in LEVELS) + f"  {words}", flush=True)
            rows.append({"dtype": dtype, "limit": limit, "ms_per_step": least, "kinds": words})
            missed += [f"{dtype} {level} at {limit}: {ratios[level]:.2f}" for level in LEVELS[1:] if ratios[level] > WANTED]
    print("\n" + (f"over {WANTED} times O0: " + "; ".join(missed) if missed else f"none over {WANTED} times O0"))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
