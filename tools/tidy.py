#!/usr/bin/env python3
"""Runs clang-tidy (.clang-tidy) over the sources, several in one translation unit, and over the public headers alone. Nothing
uses the precompiled header, so most of the time is that of parsing LibTorch's headers, once for each unit.

    tools/tidy.py BUILD [--jobs N] [--alone] [PATTERN]

BUILD is a configured folder of the preset `check`: only its compile_commands.json is used. PATTERN, a regular expression, chooses
among the files. Prints the findings, and exits with 1 if there is one.

--alone: every source and every header alone, so that a file that uses what it does not include is found wherever it is. LibTorch's
headers are then parsed for each file: it takes five times as long.
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
# Flags that clang does not know. OpenMP's header is GCC's, see below; without the flag, LibTorch's headers include none.
ONLY_GCC = {"-fopenmp", "-Wduplicated-cond", "-Wlogical-op", "-Wuseless-cast", "-Wno-stringop-overflow", "-Wno-restrict",
            "-Wno-maybe-uninitialized", "-Wno-subobject-linkage"}
GROUP = re.compile(r"/Unity/unity_\w+\.cxx$")
# The file that includes a header alone: tests/house/CMakeLists.txt.
HEADER_ALONE = re.compile(r"/alone/(\w+)\.cpp$")
# In a folder of headers that clang must not prefer to its own, so it comes last.
GCC_HEADERS = subprocess.run(["g++", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
NOISE = re.compile(r"^(\d+ warnings? (and \d+ errors? )?generated\.|Suppressed \d+|Use -header-filter|Error while processing|"
                   r"\d+ warnings? treated as errors?|Found compiler error)")


# Groups with a main(), which are not joined.
PROGRAM = re.compile(r"/(apps|benchmarks|examples)/")
# Sources in a unit that is made of several of the build's groups.
UNIT_SIZE = 20


def sources_of(group):
    return re.findall(r'#include "(/[^"]+)"', pathlib.Path(group).read_text())


def translation_units(build, pattern, alone):
    """Entries of compile_commands.json, one a file: groups of sources, or each source; files that include a single header."""
    units = {}
    skipped = need_no_unit()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = entry["file"]
        # pch.cpp is for the precompiled header, a .cu file for nvcc.
        if file.endswith(("/pch.cpp", ".cu")) or not pathlib.Path(file).exists():
            continue
        header = HEADER_ALONE.search(file)
        if header and not alone and (not header.group(1).startswith("include_") or header.group(1) in skipped):
            continue
        command = " ".join(flag for flag in entry["command"].split(" ") if flag not in ONLY_GCC)
        command += f" -idirafter {GCC_HEADERS}"
        for source in sources_of(file) if alone and GROUP.search(file) else [file]:
            name = pathlib.Path(source)
            if pattern.search(str(name.relative_to(ROOT) if name.is_relative_to(ROOT) else name)):
                units.setdefault(source, {**entry, "file": source, "command": command.replace(file, source)})
    return units


def need_no_unit():
    """Public headers that need no unit of their own, as C identifiers: those that another one includes before anything else, so
    that reading that one reads them alone, and those that have nothing but includes of public headers."""
    include = ROOT / "include"
    headers = {str(path.relative_to(include)): path.read_text() for path in include.rglob("*.h")}
    included = {name: re.findall(r'^#include [<"](.+)[">]', text, re.M) for name, text in headers.items()}

    def has_code(text):
        return any(line and not line.startswith(("//", "#pragma once", "#include")) for line in text.splitlines())

    lists = {name for name, text in headers.items() if not has_code(text) and all(one in headers for one in included[name])}
    first = {included[name][0] for name in headers if name not in lists and included[name]}
    return {re.sub(r"\W", "_", f"include/{name}") for name in lists | (first & set(headers))}


def definitions(command):
    return dict(word[2:].split("=", 1) if "=" in word else (word[2:], "") for word in command.split(" ") if word.startswith("-D"))


def joined(groups, folder):
    """Units of several of the build's groups, each with the list of its groups. Groups that define a macro differently stay
    apart, as do tests and other sources. A unit hides what one of its sources uses without including it, and a
    using-declaration that only another one needs: --alone finds both."""
    units = []
    for entry in groups:
        sources = sources_of(entry["file"])
        kind = "tests" if "/tests/" in entry["file"] else "src"
        macros = definitions(entry["command"])
        unit = next((unit for unit in units if unit["kind"] == kind and len(unit["sources"]) + len(sources) <= UNIT_SIZE
                     and all(unit["macros"].get(name, value) == value for name, value in macros.items())), None)
        if unit is None:
            unit = {"kind": kind, "sources": [], "macros": {}, "words": [], "groups": [], "entry": entry}
            units.append(unit)
        unit["sources"] += sources
        unit["macros"].update(macros)
        unit["words"] += [word for word in entry["command"].split(" ") if word.startswith(("-D", "-I"))]
        unit["groups"].append(entry)
    for number, unit in enumerate(units):
        file = folder / unit["kind"] / "Unity" / f"unity_{number}.cxx"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f'#include "{source}"\n' for source in unit["sources"]))
        command = unit["entry"]["command"].replace(unit["entry"]["file"], str(file))
        compiler, rest = command.split(" ", 1)
        command = " ".join([compiler, *dict.fromkeys(unit["words"]), rest])
        yield {**unit["entry"], "file": str(file), "command": command}, unit["groups"]


def findings_of(commands, file):
    checks = "--checks="
    if GROUP.search(file):
        checks += "-bugprone-suspicious-include,"  # a group includes its sources
    if "/tests/" in file:
        checks += "-performance-*,"  # tests are written to be read
    done = subprocess.run([CLANG_TIDY, "--quiet", checks, "-p", commands, file], capture_output=True, text=True)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not NOISE.match(line)]
    if done.returncode and not lines:
        lines = [f"{file}: clang-tidy ended with {done.returncode}"]
    return lines if done.returncode else []


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("pattern", nargs="?", default=".", type=re.compile)
    args = parser.parse_intermixed_args()
    units = translation_units(args.build.resolve(), args.pattern, args.alone)
    if not units:
        sys.exit(f"[tidy] expected a pattern of files in {args.build}/compile_commands.json, got '{args.pattern.pattern}'")
    commands = args.build.resolve() / "tidy"
    commands.mkdir(exist_ok=True)
    entries = [entry for file, entry in sorted(units.items())]
    parts = {}  # of a unit: the files that are read one by one if it has findings, some of which may come from joining them
    alone = [entry for entry in entries if not GROUP.search(entry["file"]) or PROGRAM.search(entry["file"])]
    for entry, groups in joined([entry for entry in entries if entry not in alone], commands):
        parts[entry["file"]] = [group["file"] for group in groups]
        units[entry["file"]] = entry
    (commands / "compile_commands.json").write_text(json.dumps(list(units.values())))
    jobs = [*parts, *(entry["file"] for entry in alone)]

    def check(file):
        findings = findings_of(commands, file)
        if not findings or len(parts.get(file, [])) < 2:
            return findings
        return [line for part in parts[file] for line in findings_of(commands, part)]

    seen = set()  # a header's findings appear in each source that includes it
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        pending = [pool.submit(check, file) for file in jobs]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            if number % 50 == 0:
                print(f"[tidy] {number} of {len(jobs)}", flush=True)
            text = "\n".join(done.result()).replace(f"{ROOT}/", "")
            for finding in re.split(r"\n(?=\S+:\d+:\d+: (?:error|warning):)", text):
                if finding and finding not in seen:
                    seen.add(finding)
                    print(finding, flush=True)
    if seen:
        sys.exit(f"[tidy] {len(seen)} findings")
    print(f"[tidy] {len(jobs)} units, no findings")


if __name__ == "__main__":
    main()
