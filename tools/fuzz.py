#!/usr/bin/env python3
"""Runs the fuzzers of tests/fuzz, and prints a table of what they did.

    tools/fuzz.py BUILD [--runs N] [--seconds N] [TARGET...]

BUILD is a built folder of the preset `fuzz`. Inputs start from tests/fuzz/corpus and from the files of weights in
tests/conformance; new ones that reach other code are kept in BUILD/corpus, for the next run. An input that a sanitizer or an
unexpected exception ends is written to BUILD/findings: fix the parser, and add the input to tests/fuzz/corpus, as NAME.hex if it
is not text. Exits with 1 if there is one. Default: 60 seconds for each target.
"""
import argparse
import base64
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SEEDS = ROOT / "tests/fuzz/corpus"
WEIGHTS = ROOT / "tests/conformance/data/weights_files.json"
# Of one input.
LARGEST = {"casts": 100, "cifar": 7000, "code": 500, "config": 1000, "flags": 200, "idx": 300, "image": 1000, "lines": 500, "manifest": 1500, "messages": 1000, "policy": 1500, "records": 1500, "rendezvous": 200, "values": 100, "watch": 500, "weights": 20_000, "zip": 20_000}
SECONDS = 10


def seed(target, folder):
    """Writes the seeds of a target to its working corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (SEEDS / target).iterdir():
        data = file.read_bytes()
        if file.suffix == ".hex":
            data = bytes.fromhex(re.sub(r"#.*", "", data.decode()))
        (folder / file.name).write_bytes(data)
    if target in ("weights", "zip"):
        for name, text in json.loads(WEIGHTS.read_text())["files"].items():
            (folder / name).write_bytes(base64.b64decode(text))


def run(build, target, args):
    """Runs one fuzzer. Returns its executions, executions a second, and whether it found nothing."""
    corpus = build / "corpus" / target
    findings = build / "findings"
    seed(target, corpus)
    findings.mkdir(exist_ok=True)
    limits = [f"-runs={args.runs}"] if args.runs else [f"-max_total_time={args.seconds or 60}"]
    if args.runs and args.seconds:
        limits.append(f"-max_total_time={args.seconds}")
    command = [build / "tests/fuzz" / f"fuzz_{target}", corpus, *limits, f"-max_len={LARGEST.get(target, 4096)}",
               f"-artifact_prefix={findings}/{target}-", f"-timeout={SECONDS}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UBSAN_OPTIONS": "print_stacktrace=1",
                   "LSAN_OPTIONS": f"suppressions={ROOT}/tools/lsan.supp:print_suppressions=0"}
    with open(build / f"{target}.log", "w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    text = (build / f"{target}.log").read_text(errors="replace")
    number = {name: int(value) for name, value in re.findall(r"^stat::(\w+):\s+(\d+)", text, re.M)}
    return number.get("number_of_executed_units", 0), number.get("average_exec_per_sec", 0), done.returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--runs", type=int, help="executions of each target")
    parser.add_argument("--seconds", type=int, help="seconds for each target")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    args = parser.parse_intermixed_args()
    build = args.build.resolve()
    known = sorted(folder.name for folder in SEEDS.iterdir())
    for target in args.targets:
        if target not in known:
            sys.exit(f"[fuzz] expected one of {', '.join(known)}, got '{target}'")
    found = False
    print(f"{'target':<12} {'executions':>12} {'per second':>12}")
    for target in args.targets or known:
        executions, speed, good = run(build, target, args)
        note = "" if good else f"  FINDING: see {build}/{target}.log"
        print(f"{target:<12} {executions:>12} {speed:>12}{note}", flush=True)
        found = found or not good
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
