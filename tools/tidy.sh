#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy) over every source of a build folder: tools/tidy.sh BUILD JOBS [PATTERN]
# The precompiled header is GCC's, so clang reads its text instead: about 20 s a source.
set -euo pipefail
cd "$(dirname "$0")/.."
build="$1"
jobs="$2"
pattern="${3:-.}"
command -v clang-tidy >/dev/null || { echo "[tidy] expected clang-tidy, got none — install the package clang-tidy" >&2; exit 1; }

# What only GCC understands goes out of the compile commands.
commands="$build/tidy"
mkdir -p "$commands"
python3 - "$build/compile_commands.json" "$commands/compile_commands.json" <<'PYTHON'
import json, re, sys
source, target = sys.argv[1:]
entries = json.load(open(source))
for entry in entries:
    command = entry["command"]
    command = re.sub(r"-include \S*cmake_pch\.hxx", "", command)
    command = re.sub(r"-Winvalid-pch|-fopenmp|-Wno-error=\S+|-Wno-(maybe-uninitialized|array-bounds|stringop-\S+|free-nonheap-object|dangling-\S+)|-Wduplicated-\S+|-Wlogical-op|-Wuseless-cast", "", command)
    entry["command"] = command + " -Wno-unknown-warning-option"
json.dump(entries, open(target, "w"))
PYTHON
git ls-files 'src/*.cpp' 'apps/*.cpp' 'tests/*.cpp' 'examples/*.cpp' 'benchmarks/*.cpp' | grep -v consumer | grep -E "$pattern" \
  | xargs -P "$jobs" -n 1 clang-tidy --quiet -p "$commands"
echo "[tidy] no findings"
