#!/usr/bin/env python3
"""Doxygen's view of a header, for tools/docs/Doxyfile: tools/docs/filter.py HEADER

A comment that opens a header and stands alone describes the file. Names of pages, such as docs/launch.md, become links.
Calls of LibTorch's optimizers and modules, such as optimizer.step(), become none.
"""
import re
import sys

OPENING = re.compile(r"\A((?:[^/\n].*\n|\n)*)((?:///.*\n)+)(?=\n)")
# Doxygen would take these for functions of the class at hand.
OTHERS = re.compile(r"(?<![\w`%.:>])(?=(?:optimizer|model)(?:\.|->)\w+\()")
PAGE = re.compile(r"(?<![\w/(\[])docs/(\w+)\.md(#[\w-]+)?")


def linked(line):
    """A comment's line with links; code, which is indented by four, stays as it is."""
    if not re.match(r"\s*///(?:<)? {0,4}\S", line):
        return line
    line = OTHERS.sub("%", line)
    return PAGE.sub(lambda page: f"[docs/{page.group(1)}.md](../docs/{page.group(1)}.html{page.group(2) or ''})", line)


def filtered(text):
    text = OPENING.sub(lambda opening: f"{opening.group(1)}/// @file\n{opening.group(2)}", text, count=1)
    return "".join(linked(line) for line in text.splitlines(keepends=True))


if __name__ == "__main__":
    sys.stdout.write(filtered(open(sys.argv[1], encoding="utf-8").read()))
