#!/usr/bin/env bash
# All that can be said of the sources without running them; `make check` calls it: tools/check.sh BUILD JOBS [ARGUMENT...]
# BUILD is a folder of the preset `check`. The arguments are tidy.py's; without any, clang-tidy reads the library, the program
# and each public header. Every step runs, whatever the others found; exits with 1 if one found something.
set -uo pipefail
cd "$(dirname "$0")/.."
build="$1"
jobs="$2"
shift 2
[ $# -gt 0 ] || set -- '^(build/[^/]+/)?(src|include|apps|tests/house/alone)/'
failed=()
step() {  # name command...
  printf '\033[1m[check]\033[0m %s\n' "$1"
  "${@:2}" || failed+=("$1")
}

step "format: clang-format" tools/format.sh --dry-run -Werror
step "arrows: which room includes which" tools/check_house.py
step "pages: links, anchors and commands" tools/check_docs.py
step "snippets: the C++ blocks of the pages" tools/doc_snippets.py "$build/tests/docs/snippets.cpp"
step "sources: clang-tidy" tools/tidy.py "$build" --jobs "$jobs" "$@"

[ ${#failed[@]} -eq 0 ] || { printf '[check] findings in: %s\n' "${failed[@]}" >&2; exit 1; }
printf '\033[1m[check]\033[0m no findings\n'
