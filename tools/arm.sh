#!/usr/bin/env bash
# Builds Semitone for Arm (aarch64) on a Debian machine with another processor, and runs tests there in QEMU, which takes
# 10 to 50 times as long as on a processor. `make test-arm` calls it.
#
#   tools/arm.sh [TEST...]   default: those of numbers, below
#   QEMU_CPU=neoverse-n1     the processor (qemu-aarch64 -cpu help), the least that LibTorch needs. With max, kernels_test
#                            tests SVE too; some operators of LibTorch meet instructions there that QEMU 7.2 does not know
#   JOBS=N                   number of jobs that compile, default: one per core
set -euo pipefail
cd "$(dirname "$0")/.."
export QEMU_CPU="${QEMU_CPU:-neoverse-n1}"
tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(core_test nn_test conformance_test kernels_test)
torch=2.11.0
work=.deps/aarch64
sysroot="$work/sysroot"

say() { printf '\033[1m[arm]\033[0m %s\n' "$*"; }
fail() { printf '[arm] %s\n' "$*" >&2; exit 1; }

for program in aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$program" >/dev/null \
    || fail "expected the program $program, got none — install the packages g++-aarch64-linux-gnu and qemu-user"
done
env -u SEMITONE_LIBTORCH CUDA=0 SEMITONE_MACHINE=aarch64 TORCH="$torch" tools/setup.sh

# Debian's libraries for Arm, in a folder of their own. apt-get gets a status without packages, so that it downloads all that
# these depend on.
libraries=(libstdc++-12-dev libcli11-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libhwy-dev libgloo-dev libjpeg-dev libpng-dev
  zlib1g-dev libgtest-dev libgmock-dev)
if [ ! -e "$sysroot/complete" ]; then
  say "downloading Debian's libraries for Arm (100 MB, once)"
  rm -rf "$sysroot"
  mkdir -p "$sysroot" "$work/lists/partial" "$work/cache/archives/partial"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::status=/dev/null
    -o "Dir::State::lists=$PWD/$work/lists" -o "Dir::Cache=$PWD/$work/cache" -o Debug::NoLocking=1)
  "${apt[@]}" update || fail "apt-get could not read the lists of packages for arm64 — is there a network, and is this Debian?"
  "${apt[@]}" install -y --no-install-recommends --download-only "${libraries[@]}" >/dev/null \
    || fail "apt-get could not download: ${libraries[*]}"
  for package in "$work"/cache/archives/*.deb; do dpkg -x "$package" "$sysroot"; done
  # Links with absolute paths would lead out of the folder.
  find "$sysroot" -type l -lname '/*' | while read -r link; do ln -sfnr "$sysroot$(readlink "$link")" "$link"; done
  rm -rf "$work/lists" "$work/cache"
  touch "$sysroot/complete"
fi

mkdir -p build
[ -e build/arm/build.ninja ] || cmake --preset release -B build/arm -DCMAKE_TOOLCHAIN_FILE="$PWD/tools/arm.cmake" \
  -DSEMITONE_LIBTORCH="$PWD/$work/libtorch-$torch/torch" -DSEMITONE_LIBRARY=STATIC -DSEMITONE_CUDA=OFF \
  -DSEMITONE_BENCHMARKS=OFF > build/arm.log 2>&1 || { cat build/arm.log; rm -f build/arm/build.ninja; exit 1; }
say "compiling ${tests[*]}"
cmake --build build/arm -j "${JOBS:-$(nproc)}" --target "${tests[@]}"
say "running them as QEMU's processor $QEMU_CPU"
IFS='|'
ctest --test-dir build/arm --output-on-failure -j "${JOBS:-$(nproc)}" -R "^(${tests[*]})\$"
