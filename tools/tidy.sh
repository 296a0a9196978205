#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy) over every source of a build folder: tools/tidy.sh BUILD JOBS [PATTERN]
# The precompiled header is GCC's, so clang reads its text instead: about 20 s each time. Sources that the build compiles
# together are read together. PATTERN chooses among the files of compile_commands.json.
set -euo pipefail
cd "$(dirname "$0")/.."
build="$1"
jobs="$2"
pattern="${3:-.}"
command -v clang-tidy >/dev/null || { echo "[tidy] expected clang-tidy, got none — install the package clang-tidy" >&2; exit 1; }

# Removes flags that only GCC supports from the compile commands.
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
python3 -c 'import json, sys; print(*(entry["file"] for entry in json.load(open(sys.argv[1]))), sep="\n")' "$commands/compile_commands.json" \
  | grep -vE "/alone/|semitone_pch|/pch.cpp|\.cu$" | sort -u | grep -E "$pattern" > "$commands/sources" \
  || { echo "[tidy] expected a pattern that matches sources in $commands/compile_commands.json, got '$pattern'" >&2; exit 1; }
xargs -P "$jobs" -n 1 clang-tidy --quiet -p "$commands" < "$commands/sources"
echo "[tidy] no findings"
