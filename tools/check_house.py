#!/usr/bin/env python3
"""Checks the structure in docs/house.md: which room may include which, what a public header may contain, and that each test runs.

    tools/check_house.py [ROOT]

Prints one line for each violation and exits with 1 if there is one.
"""
import pathlib
import re
import sys

PROGRAMS = ["apps", "examples", "tests", "benchmarks"]

# A public header must not include libraries that only sources use, nor anything of CUDA, NCCL and MPI.
BANNED_IN_PUBLIC = re.compile(
    r'#\s*include\s*[<"](CLI/|fmt/|spdlog/|nlohmann/|hwy/|zlib|png|jpeglib|gtest/|benchmark/|cuda|nccl|mpi)'
)
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
BUILD_OPTION = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\b(SEMITONE_|USE_|NDEBUG|__CUDA)")
# A private header that other rooms may include says so.
INTERNAL = "// Internal interface"
# Code that works on raw memory does not include LibTorch, so that a CUDA compiler never reads its headers.
LIBTORCH = re.compile(r'#\s*include\s*[<"](torch|ATen|c10)/')
CUDA_FOLDER = "src/kernels/cuda/"
EXITS = re.compile(r"(?<![\w.:>])(?:std::)?(exit|_exit|abort|quick_exit|printf|puts)\s*\(")
STREAMS = re.compile(r"\bstd::(cout|cerr|clog)\b")


ROOM_ROW = re.compile(r"^\| `(\w+)`[^|]*\|.*\|([^|]*)\|$", re.M)


def read_table(root: pathlib.Path) -> dict:
    """Each room, the rooms that it may include besides its own, its top header and its umbrella, or "": src/rooms.txt."""
    lines = [line for line in (root / "src/rooms.txt").read_text().splitlines() if line and not line.startswith("#")]
    rows = {name: [*row.split("|"), "", ""] for name, _, row in (line.partition(":") for line in lines)}
    return {name: (row[0].split(), row[1].strip(), row[2].strip()) for name, row in rows.items()}


def check_page(root: pathlib.Path, rooms: dict):
    """That docs/house.md draws the arrows of src/rooms.txt."""
    page = root / "docs/house.md"
    if not page.exists():
        return []
    drawn = {name: re.findall(r"`(\w+)`", arrows) for name, arrows in ROOM_ROW.findall(page.read_text()) if name in rooms}
    return [f"docs/house.md: room '{name}': expected the arrows '{' '.join(arrows)}' of src/rooms.txt, got '{' '.join(drawn.get(name, ['no row']))}'"
            for name, arrows in rooms.items() if drawn.get(name) != arrows]


def room_of(path: str):
    """The room of an include path or file: semitone/amp/x.h, include/semitone/amp/x.h, src/amp/x.h."""
    match = re.match(r"(?:include/)?semitone/(\w+)/|src/(\w+)/", path)
    return (match.group(1) or match.group(2)) if match else None


def without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def check_headers(files: dict, tops: set):
    """That no header includes itself through others, nor the top header of its own room.

    files: the text of each file, by its path.
    """
    included = {}
    problems = []
    for name, text in files.items():
        if not name.endswith((".h", ".cuh")):
            continue
        paths = [match.group(1) for match in map(INCLUDE.match, without_comments(text).splitlines()) if match]
        problems += [f"{name}: includes the top header of its room, {path}"
                     for path in paths if path in tops and room_of(path) == room_of(name)]
        included[name] = [path for path in (f"include/{path}" if path.startswith("semitone/") else path for path in paths)
                          if path in files]
    open_path, done = [], set()

    def visit(name):
        if name in open_path:
            problems.append("include cycle: " + " -> ".join([*open_path[open_path.index(name):], name]))
        elif name not in done:
            open_path.append(name)
            for other in included.get(name, []):
                visit(other)
            open_path.pop()
            done.add(name)

    for name in included:
        visit(name)
    return problems


def check_umbrellas(root: pathlib.Path, table: dict):
    """That the umbrella of a room includes each of its public headers, and semitone/semitone.h each umbrella."""
    def missing(umbrella, headers):
        file = root / "include" / umbrella
        included = set(re.findall(r'^#include "([^"]+)"', file.read_text(), re.M)) if file.is_file() else headers
        return [f"include/{umbrella}: does not include {header}" for header in sorted(headers - included)]

    rooms = [(umbrella, {f"semitone/{room}/{path.name}" for path in (root / "include/semitone" / room).glob("*.h")})
             for room, (_, _, umbrella) in table.items() if umbrella]
    whole = "semitone/semitone.h"
    rooms.append((whole, {umbrella for umbrella, _ in rooms} - {whole}))
    return [problem for umbrella, headers in rooms for problem in missing(umbrella, headers)]


def check_tests(root: pathlib.Path):
    """That each tests/**/*_test.cpp belongs to a program of tests/**/CMakeLists.txt: else it never runs."""
    tests = root / "tests"
    listed = {(file.parent / word).as_posix() for file in tests.rglob("CMakeLists.txt")
              for word in re.findall(r"[\w/*.-]+\.cpp", file.read_text())}
    return [f"{path.relative_to(root).as_posix()}: no program of tests/CMakeLists.txt has it" for path in sorted(tests.rglob("*_test.cpp"))
            if not {path.as_posix(), (path.parent / "*_test.cpp").as_posix()} & listed]


def check(root: pathlib.Path):
    table = read_table(root)
    rooms = {name: arrows for name, (arrows, _, _) in table.items()}
    problems = check_page(root, rooms)
    files = sorted(p for d in ["include", "src", *PROGRAMS] for p in (root / d).rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    problems += check_headers(texts, {top for _, top, _ in table.values() if top})
    problems += check_umbrellas(root, table)
    problems += check_tests(root)
    # Rooms with public headers. A room without any, and core, is all for other rooms.
    internal = {room_of(name) for name in texts if name.startswith("include/")} - {"core"}
    for path in files:
        name = path.relative_to(root).as_posix()
        room = room_of(name)
        public = name.startswith("include/")
        lines = without_comments(path.read_text()).splitlines()
        if room is not None and room not in rooms:
            problems.append(f"{name}: room '{room}' is not in src/rooms.txt")
            continue
        if path.suffix in {".h", ".cuh"} and not name.endswith("-inl.h") and "#pragma once" not in path.read_text():
            problems.append(f"{name}: no #pragma once")
        for number, line in enumerate(lines, 1):
            where = f"{name}:{number}"
            include = INCLUDE.match(line)
            if include:
                target = room_of(include.group(1))
                if room is not None and target is not None and target != room and target not in rooms[room]:
                    problems.append(f"{where}: room '{room}' may not include room '{target}'")
                is_private = target in internal and include.group(1).startswith("src/")
                if is_private and room not in (None, target) and INTERNAL not in texts.get(include.group(1), INTERNAL):
                    problems.append(f"{where}: {include.group(1)} is private to room '{target}': if other rooms may "
                                    f"include it, it says \"{INTERNAL}\"")
                if public and include.group(1).startswith("src/"):
                    problems.append(f"{where}: a public header includes a private one")
                if name.startswith("examples/") and include.group(1).startswith("src/"):
                    problems.append(f"{where}: examples use public headers only")
            if public and BANNED_IN_PUBLIC.search(line):
                problems.append(f"{where}: a public header includes a library that only sources may use")
            if public and BUILD_OPTION.search(line):
                problems.append(f"{where}: a public header depends on a build option")
            if name.startswith(CUDA_FOLDER) and LIBTORCH.search(line):
                problems.append(f"{where}: CUDA sources know nothing of LibTorch")
            if name.startswith(("include/", "src/")) and (EXITS.search(line) or STREAMS.search(line)):
                problems.append(f"{where}: the library neither prints nor ends the program")
    return problems


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
