#!/usr/bin/env bash
# Runs clang-format (tools/setup_check.sh) over every C++ and CUDA source: tools/format.sh -i | --dry-run -Werror
set -euo pipefail
cd "$(dirname "$0")/.."
git ls-files -z '*.h' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs -0 .deps/check/bin/clang-format "$@"
