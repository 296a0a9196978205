#!/usr/bin/env bash
# Builds Semitone from an unpacked bundle (tools/bundle.py), without a network, root or packages of a distribution:
#
#   ./build.sh [TARGET...]      default: everything. The program alone: ./build.sh semitone_cli
#
#   SEMITONE_LIBTORCH=DIR   the LibTorch: a folder with include/ and lib/. Default: that of python3's torch
#   PRESET=cuda|release     default: cuda if LibTorch has CUDA, else release (CMakePresets.json)
#   JOBS=N                  jobs that compile, default: one per core
#   CMAKE_FLAGS=…           more flags for Semitone's configuration, for example -DSEMITONE_CUDA=OFF
#
# It needs g++ 12 or newer, CMake 3.25 or newer and ninja. With nvcc 12.1 or newer, the CUDA kernels are built too. The result is
# in build/<preset>. Another run builds what has changed.
set -euo pipefail
cd "$(dirname "$0")"
say() { printf '\033[1m[build]\033[0m %s\n' "$*"; }
fail() { printf '[build] %s\n' "$*" >&2; exit 1; }

for program in cmake ninja "${CXX:-c++}" "${CC:-cc}"; do
  command -v "$program" >/dev/null || fail "expected the program $program, got none — install it ('python3 -m pip install cmake ninja' has the first two), or extend PATH"
done
LIBTORCH="${SEMITONE_LIBTORCH:-$(python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")}"
[ -e "$LIBTORCH/lib/libtorch_cpu.so" ] || fail "expected LibTorch, got '${LIBTORCH:-no torch in python3}' — set SEMITONE_LIBTORCH to the folder that holds its include/ and lib/"
[ -e "$LIBTORCH/include/torch/csrc/api/include/torch/torch.h" ] || fail "expected headers, got none in $LIBTORCH/include — use a LibTorch that has them"
if [ -e "$LIBTORCH/lib/libtorch_cuda.so" ]; then PRESET="${PRESET:-cuda}"; else PRESET="${PRESET:-release}"; fi
JOBS="${JOBS:-$(nproc)}"
# Often a toolkit is installed, but not in PATH.
if [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null && [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  export CUDACXX="${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
fi

prefix="$PWD/build/third_party/prefix"
if [ ! -e "$prefix/complete" ]; then
  say "libraries: compiling with $JOBS jobs"
  build_libraries() {
    cmake -S third_party -B build/third_party -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" || return
    cmake --build build/third_party -j "$JOBS" || return
    cmake --install build/third_party
  }
  if ! build_libraries > build-third_party.log 2>&1; then
    tail -50 build-third_party.log >&2
    fail "the libraries could not be built: build-third_party.log"
  fi
  touch "$prefix/complete"
fi

flags=(-DSEMITONE_LIBTORCH="$LIBTORCH" -DCMAKE_PREFIX_PATH="$prefix"
  # A compiler that Semitone is not tested with has warnings of its own.
  -DSEMITONE_WERROR=OFF)
capability="$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | tr -d . | tr '\n' ';' || true)"
case "$capability" in
  '' | *[!0-9\;]*) ;;
  *) flags+=("-DCMAKE_CUDA_ARCHITECTURES=${capability%;}") ;;
esac
if [ ! -e "build/$PRESET/build.ninja" ] || [ -n "${CMAKE_FLAGS:-}" ] \
  || ! grep -qsFx "SEMITONE_LIBTORCH:PATH=$LIBTORCH" "build/$PRESET/CMakeCache.txt"; then
  say "configuring build/$PRESET with $LIBTORCH"
  # shellcheck disable=SC2086
  cmake --preset "$PRESET" "${flags[@]}" ${CMAKE_FLAGS:-} > "build-$PRESET.log" 2>&1 || { tail -50 "build-$PRESET.log" >&2; fail "the configuration failed: build-$PRESET.log"; }
  grep -- '-- LibTorch' "build-$PRESET.log"
fi
say "compiling ${*:-everything} with $JOBS jobs"
if [ $# -gt 0 ]; then cmake --build "build/$PRESET" -j "$JOBS" --target "$@"; else cmake --build "build/$PRESET" -j "$JOBS"; fi
say "done: build/$PRESET"
