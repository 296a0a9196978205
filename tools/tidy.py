#!/usr/bin/env python3
"""Runs clang-tidy (.clang-tidy) over the sources, many in one translation unit, and compiles each public header alone.

    tools/tidy.py BUILD [--jobs N] [--alone] [PATTERN]

BUILD is a configured folder of the preset `check`: only its compile_commands.json is used. PATTERN, a regular expression, chooses
among the files. Prints the findings, and exits with 1 if there is one.

Other libraries' headers, LibTorch's above all, are parsed once, into a clang module, as a precompiled header is for the compiler.
Some checks look at all that a unit knows of them, which takes 10 s for each unit, so that many sources make one unit. All that
those headers declare is known to each file, and what one source of a unit includes to the others. With --alone, every source and
every header is read alone, without the module, so that a file that uses what it does not include is found. It takes more than ten
times as long.
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
# Sources in a unit.
UNIT_SIZE = 60
MAIN = re.compile(r"^int main\(", re.M)
# Headers for the module: of other libraries, and what they include. Those of CUDA, NCCL and Gloo are not everywhere, or depend on macros
# that a source defines.
LIBRARIES = "(?:ATen|c10|torch|caffe2|gtest|gmock|nlohmann|fmt|CLI)/"
LIBRARY_HEADER = re.compile(rf"^#include <({LIBRARIES}(?!\S*(?:cuda|CUDA|NCCL|Gloo))[^>]+)>", re.M)
MODULAR = re.compile(rf"/c\+\+/[0-9.]+/(bits/)?[^/]+$|/{LIBRARIES}")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
# Without one of these, a header is made to be included several times, or by one other header only.
GUARD = re.compile(r"^\s*#\s*pragma\s+once|#\s*ifndef\s+(\w+)\s*\n\s*#\s*define\s+\1\b", re.M)


def sources_of(file):
    return re.findall(r'#include "(/[^"]+)"', pathlib.Path(file).read_text()) if GROUP.search(file) else [file]


def texts_of(sources):
    return [pathlib.Path(source).read_text() for source in sources]


def translation_units(build, pattern, alone):
    """Entries of compile_commands.json, one a file: groups of sources, or each source; files that include a single header."""
    units = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        file = entry["file"]
        # pch.cpp is for the precompiled header, a .cu file for nvcc.
        if file.endswith(("/pch.cpp", ".cu")) or not pathlib.Path(file).exists():
            continue
        header = HEADER_ALONE.search(file)
        if header and not alone and not header.group(1).startswith("include_"):
            continue
        command = " ".join(flag for flag in entry["command"].split(" ") if flag not in ONLY_GCC)
        command += f" -idirafter {GCC_HEADERS}"
        for source in sources_of(file) if alone else [file]:
            name = pathlib.Path(source)
            if pattern.search(str(name.relative_to(ROOT) if name.is_relative_to(ROOT) else name)):
                units.setdefault(source, {**entry, "file": source, "command": command.replace(file, source)})
    return units


def joined(entries, folder):
    """Units of several entries, and those entries. Entries that define a macro differently stay apart, as do the tests of each folder,
    programs and other sources."""
    units, seen = [], set()
    for entry in entries:
        sources = [source for source in sources_of(entry["file"]) if source not in seen]  # some belong to two programs
        if not sources:
            continue
        seen.update(sources)
        kind = kind_of(sources)
        macros = definitions(entry["command"])
        unit = next((unit for unit in units if unit["kind"] == kind and len(unit["sources"]) + len(sources) <= UNIT_SIZE
                     and all(unit["macros"].get(name, value) == value for name, value in macros.items())), None)
        if unit is None:
            unit = {"kind": kind, "sources": [], "macros": {}, "words": [], "entries": []}
            units.append(unit)
        unit["sources"] += sources
        unit["macros"].update(macros)
        words = entry["command"].split(" ")
        unit["words"] += [*(word for word in words if word.startswith("-D")), *search_flags(words)]
        unit["entries"].append(entry)
    for number, unit in enumerate(units):
        file = folder / unit["kind"] / "Unity" / f"unity_{number}.cxx"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(programs(unit["sources"]) if unit["kind"] == "programs" else "".join(f'#include "{source}"\n' for source in unit["sources"]))
        first = max(unit["entries"], key=lambda entry: len(entry["command"]))  # one with all warnings: stand-ins have none
        compiler, rest = first["command"].replace(first["file"], str(file)).split(" ", 1)
        if unit["kind"] == "programs":
            rest += " -Wno-return-type"  # of a main() in a namespace
        command = " ".join([compiler, *dict.fromkeys(unit["words"]), rest])
        yield {**first, "file": str(file), "command": command}, unit["entries"]


def kind_of(sources):
    """Of which others may be in the same unit."""
    folder = pathlib.Path(sources[0]).relative_to(ROOT).parts[:-1]
    if "tests" in folder:
        return "/".join(folder[folder.index("tests"):])
    room = folder[0]
    texts = "".join(texts_of(sources))
    return "programs" if room in ("benchmarks", "examples") and MAIN.search(texts) and "namespace semitone" not in texts else room


def programs(sources):
    """Several programs in one unit: each in a namespace of its own, behind the headers of all."""
    texts = texts_of(sources)
    headers = dict.fromkeys(line for text in texts for line in re.findall(r"^#include .+$", text, re.M))
    return "\n".join([*headers, *(f'namespace program_{number} {{\n#include "{source}"\n}}' for number, source in enumerate(sources)), ""])


def can_be_joined(entry):
    """Groups of the build, but not those that stand in for a library's headers with others of the same names, nor programs of tests."""
    if not GROUP.search(entry["file"]):
        return False
    folders = {flag for flag in entry["command"].split(" ") if flag.startswith("-I")} - {f"-I{ROOT}", f"-I{ROOT}/include"}
    sources = sources_of(entry["file"])
    return not folders and not (kind_of(sources).startswith("tests/") and any(MAIN.search(text) for text in texts_of(sources)))


def includes_libtorch(file, seen):
    """Directly, or in this repository's headers. What does not is read faster without the module."""
    if file in seen:
        return False
    seen.add(file)
    text = file.read_text()
    own = [folder / name for name in re.findall(r'^#include ["<]([^">]+)[">]', text, re.M) for folder in (ROOT, ROOT / "include")]
    return bool(re.search(r"^#include <(ATen|c10|torch)/", text, re.M)) or any(includes_libtorch(each, seen) for each in own if each.is_file())


def definitions(command):
    return dict(word[2:].split("=", 1) if "=" in word else (word[2:], "") for word in command.split(" ") if word.startswith("-D"))


def use_module(units, everything, folder):
    """Changes the commands of units so that they use a module of other libraries' headers. The first one makes it. Everything: all
    units that there are, so that the module is the same for all choices."""
    words = [unit["command"].split(" ") for unit in everything]
    search = list(dict.fromkeys(flag for each in words for flag in search_flags(each)))
    lines = "".join(f'  header "{header}"\n' for header in library_headers(folder, search))
    module_map = folder / "libraries.modulemap"
    module_map.write_text(f"module libraries [system] {{\n{lines}  export *\n}}\n")
    # What a source defines for itself must not make another module.
    macros = sorted({flag[2:].split("=", 1)[0] for each in words for flag in each if flag.startswith(("-D", "-U"))} - {"NDEBUG"})
    flags = ["-fmodules", "-fno-implicit-module-maps", f"-fmodule-map-file={module_map}", f"-fmodules-cache-path={folder}/modules",
             "-fmodules-validate-system-headers", "-Wno-modules-import-nested-redundant", *(f"-fmodules-ignore-macro={macro}" for macro in macros)]
    for unit in units:
        own = [flag for flag in unit["command"].split(" ") if not flag.startswith(("-O", "-ffp-contract"))]
        unit["command"] = " ".join([*own, *flags])


def search_flags(words):
    """Where a command looks for headers."""
    for flag, value in zip(words, [*words[1:], ""]):
        if flag.startswith("-I") and flag != "-I":
            yield flag
        elif flag in ("-isystem", "-idirafter"):
            yield f"{flag} {value}"


def library_headers(folder, search):
    """The files of all headers of other libraries that this repository includes, and of those which they include. LibTorch's
    comes first: it includes what the others take for granted."""
    texts = (file.read_text() for room in ("include", "src", "apps", "tests", "benchmarks", "examples")
             for file in (ROOT / room).rglob("*") if file.suffix in (".h", ".cpp"))
    names = sorted({name for text in texts for name in LIBRARY_HEADER.findall(text)} - {"torch/torch.h"})
    everything = folder / "libraries.cpp"
    everything.write_text("".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in ["torch/torch.h", *names]))
    made = subprocess.run(["g++", "-std=c++20", *" ".join(search).split(" "), "-M", str(everything)], capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"[tidy] the headers of the libraries:\n{made.stderr}")
    files = [file for file in made.stdout.replace("\\\n", " ").split()[2:] if MODULAR.search(file)]
    # A file of bits/ needs what includes it; so do parts of LibTorch.
    files.sort(key=lambda file: (not file.endswith("/torch/torch.h"), "/bits/" in file))
    return [file for file in files if GUARD.search(COMMENT.sub("", pathlib.Path(file).read_text(errors="ignore")))]


def findings_of(commands, file, alone):
    if HEADER_ALONE.search(file) and not alone:  # the units that include it have its findings
        return run_tidy(commands, file, "--checks=-*,clang-diagnostic-*,modernize-use-nullptr")
    checks = "--checks="
    if GROUP.search(file):
        checks += "-bugprone-suspicious-include,"  # a group includes its sources
    if "/tests/" in file:
        checks += "-performance-*,"  # tests are written to be read
    return run_tidy(commands, file, checks)


def run_tidy(commands, file, checks):
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
    jobs = sorted(units)
    parts = {}  # of a unit: the files that are read one by one if it has findings, some of which may come from joining them
    if not args.alone:
        groups = [entry for _, entry in sorted(units.items()) if can_be_joined(entry)]
        for entry in groups:
            del units[entry["file"]]
        for entry, entries in joined(groups, commands):
            parts[entry["file"]] = [part["file"] for part in entries]
            units[entry["file"]] = entry
        jobs = [*parts, *sorted(set(units) - set(parts))]
        units.update((entry["file"], entry) for entry in groups)
        using = [unit for file, unit in units.items() if any(includes_libtorch(pathlib.Path(source), set()) for source in sources_of(file))]
        use_module(using, translation_units(args.build.resolve(), re.compile("."), False).values(), commands)
    (commands / "compile_commands.json").write_text(json.dumps(list(units.values())))

    def check(file):
        findings = findings_of(commands, file, args.alone)
        if not findings or len(parts.get(file, [])) < 2:
            return findings
        return [line for part in parts[file] for line in findings_of(commands, part, args.alone)]

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
