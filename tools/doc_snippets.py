#!/usr/bin/env python3
"""Writes the C++ blocks of README.md and docs/ as one source that is compiled: documentation that does not compile fails the build.

    tools/doc_snippets.py OUTPUT [ROOT]

Each page becomes a function. A block may use what earlier blocks of its page declare, and the names of tests/docs/context.h. Blocks
that begin with a class or a function stand before it. "…" stands for what a reader writes himself and is left out.
"""
import argparse
import pathlib
import re

BLOCK = re.compile(r"^```cpp\n(.*?)^```$", re.M | re.S)


def pages(root: pathlib.Path):
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def blocks_of(text: str):
    """(line number of the first line, code) of each C++ block."""
    return [(text.count("\n", 0, match.start(1)) + 1, match.group(1).replace("…", "")) for match in BLOCK.finditer(text)]


def is_definition(code: str) -> bool:
    return re.match(r"\s*(struct|class|template|void)\b", code) is not None


def is_include(line: str) -> bool:
    return line.startswith("#include")


def without_includes(code: str) -> str:
    return "".join("\n" if is_include(line) else line for line in code.splitlines(keepends=True))


def source_of(root: pathlib.Path) -> str:
    includes, definitions, functions = {}, [], []
    for page in pages(root):
        body = []
        for line, code in blocks_of(page.read_text()):
            includes.update((text, None) for text in code.splitlines() if is_include(text))
            placed = f'#line {line} "{page.relative_to(root).as_posix()}"\n{without_includes(code)}'
            if is_definition(code):
                definitions.append(placed)
            else:
                body.append(placed)
        if body:
            name = "page_" + re.sub(r"\W", "_", page.stem.lower())
            functions.append(f"void {name}() {{\n" + "{\n".join(body) + "}" * len(body) + "\n")
    head = ['#include "tests/docs/context.h"', *includes]
    return "\n".join([*head, "namespace semitone::docs {", *definitions, *functions, "}  // namespace semitone::docs\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(source_of(options.root.resolve()))


if __name__ == "__main__":
    main()
