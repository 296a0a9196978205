#!/usr/bin/env python3
"""Runs clang-tidy (.clang-tidy) over every source and every header, each alone: without precompiled header, and without the
sources that the build compiles together. So it also finds what a file uses without including it.

    tools/tidy.py BUILD [--jobs N] [PATTERN]

BUILD is a configured folder of the preset `check`: only its compile_commands.json is used. PATTERN, a regular expression, chooses
among the files. Prints the findings, and exits with 1 if there is one.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CLANG_TIDY = ROOT / ".deps/check/bin/clang-tidy"
# Flags that clang does not know. OpenMP's header is GCC's; without the flag, LibTorch's headers include none.
ONLY_GCC = {"-fopenmp", "-Wduplicated-cond", "-Wlogical-op", "-Wuseless-cast", "-Wno-stringop-overflow", "-Wno-restrict",
            "-Wno-maybe-uninitialized"}
NOISE = re.compile(r"^(\d+ warnings? (and \d+ errors? )?generated\.|Suppressed \d+|Use -header-filter|Error while processing|"
                   r"\d+ warnings? treated as errors?|Found compiler error)")


def translation_units(build, pattern):
    """Entries of compile_commands.json, one a file: sources, and the files that include a single header."""
    units = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = pathlib.Path(entry["file"])
        # pch.cpp is for the precompiled header, a .cu file for nvcc.
        if file.name == "pch.cpp" or file.suffix == ".cu" or not file.exists():
            continue
        if pattern.search(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)):
            entry["command"] = " ".join(flag for flag in entry["command"].split(" ") if flag not in ONLY_GCC)
            units.setdefault(entry["file"], entry)
    return units


def findings_of(commands, file):
    done = subprocess.run([CLANG_TIDY, "--quiet", "-p", commands, file], capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not NOISE.match(line)]
    if done.returncode and not lines:
        lines = [f"{file}: clang-tidy ended with {done.returncode}"]
    return lines if done.returncode else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("pattern", nargs="?", default=".", type=re.compile)
    args = parser.parse_intermixed_args()
    units = translation_units(args.build.resolve(), args.pattern)
    if not units:
        sys.exit(f"[tidy] expected a pattern of files in {args.build}/compile_commands.json, got '{args.pattern.pattern}'")
    commands = args.build / "tidy"
    commands.mkdir(exist_ok=True)
    (commands / "compile_commands.json").write_text(json.dumps(list(units.values())))

    seen = set()  # a header's findings appear in each source that includes it
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(findings_of, commands, file) for file in sorted(units)]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            if number % 50 == 0:
                print(f"[tidy] {number} of {len(units)}", flush=True)
            text = "\n".join(done.result()).replace(f"{ROOT}/", "")
            for finding in re.split(r"\n(?=\S+:\d+:\d+: (?:error|warning):)", text):
                if finding and finding not in seen:
                    seen.add(finding)
                    print(finding, flush=True)
    if seen:
        sys.exit(f"[tidy] {len(seen)} findings")
    print(f"[tidy] {len(units)} files, no findings")


if __name__ == "__main__":
    main()
