#!/usr/bin/env python3
"""Checks the names that libsemitone.so exports.

    exports_test.py NM LIBRARY OBJECT...

OBJECT: objects of programs that use the public headers. The library must export what they use of Semitone.
"""
import re
import subprocess
import sys


def names(nm, *arguments):
    lines = subprocess.run([nm, "-C", *arguments], check=True, capture_output=True, text=True).stdout.splitlines()
    # "0000 T name", " U name", or a file's name.
    return {match.group(1) for match in (re.match(r"[0-9a-f ]{16} [A-Za-z] (.*)", line) for line in lines) if match}


def main():
    nm, library, *objects = sys.argv[1:]
    exported = names(nm, "-D", "--defined-only", library)
    problems = [f"exports a name of another library: {name}" for name in exported if "semitone::" not in name]
    problems += [f"exports a name of a private room: {name}" for name in exported if re.match(r"semitone::(kernels|net)::", name)]
    # The programs of the pages are in semitone::docs.
    used = {name for name in names(nm, "--undefined-only", *objects) if re.match(r"(\w+ for )?semitone::(?!docs::)", name)}
    if len(used) < 100:
        problems.append(f"expected programs that use at least 100 names of Semitone, got {len(used)}")
    problems += [f"does not export {name}" for name in used - exported]
    print("\n".join(sorted(problems)) or f"{len(exported)} names exported, {len(used)} of them used")
    sys.exit(1 if problems else 0)


main()
