#!/usr/bin/env bash
# Installs what the build needs and is missing: compiler and libraries (Debian packages by name) and LibTorch.
# Once everything is there, another run costs nothing and needs no network. `make setup` calls it.
#
#   TORCH=2.11.0            the LibTorch release to fetch into .deps/libtorch-<release>/
#   CUDA=1                  fetch LibTorch with CUDA and its libraries, into .deps/libtorch-<release>-cuda/. Neither a
#                           CUDA toolkit nor a GPU is needed to build with it
#   SEMITONE_MACHINE=aarch64   fetch LibTorch for these processors into .deps/aarch64/libtorch-<release>/; default: this machine's
#   SEMITONE_LIBTORCH=DIR   use this LibTorch (the folder that holds include/ and lib/) and fetch none
#   TEST_PROGRAMS=1         install small programs too, without which some tests are not registered (make setup-tests)
set -euo pipefail
cd "$(dirname "$0")/.."
torch_release="${TORCH:-2.11.0}"
with_cuda="${CUDA:-0}"

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

case "$with_cuda" in
  0 | 1) ;;
  *) fail "expected CUDA=1 or CUDA=0, got CUDA=$with_cuda" ;;
esac

case "$PWD${SEMITONE_LIBTORCH:-}" in
  *[[:space:]]*) fail "expected paths without spaces, got '$PWD'${SEMITONE_LIBTORCH:+ and '$SEMITONE_LIBTORCH'} — move the folder" ;;
esac

# --- compiler and libraries ------------------------------------------------------------------------------------
# package: a file or command that shows that it is installed, as a package or in another way
needed=(
  "g++:command -v g++"
  "make:command -v make"
  "cmake:command -v cmake"
  "ninja-build:command -v ninja"
  "git:command -v git"
  "python3:command -v python3"
  "unzip:command -v unzip"
  "libcli11-dev:header CLI/CLI.hpp"
  "libfmt-dev:header fmt/format.h"
  "libspdlog-dev:header spdlog/spdlog.h"
  "nlohmann-json3-dev:header nlohmann/json.hpp"
  "libhwy-dev:header hwy/highway.h"
  "libgloo-dev:header gloo/context.h"
  "libjpeg-dev:header jpeglib.h"
  "libpng-dev:header png.h"
  "zlib1g-dev:header zlib.h"
  "libgtest-dev:header gtest/gtest.h"
  "libgmock-dev:header gmock/gmock.h"
)
[ "${TEST_PROGRAMS:-0}" = 0 ] || needed+=(
  "zsh:command -v zsh"
  "fish:command -v fish"
  "groff-base:command -v groff"
  "dpkg-dev:command -v dpkg-shlibdeps"
  "file:command -v file"
  "iproute2:command -v ip"
  "rustc:command -v rustc"
  "mono-mcs:command -v mcs"
  "default-jdk-headless:command -v javac"
  "libjna-java:[ -e /usr/share/java/jna.jar ]"
  "openmpi-bin:command -v mpirun"
)
# Ubuntu has no such package, but a snap.
if [ "${TEST_PROGRAMS:-0}" != 0 ] && ! grep -qs '^ID=ubuntu' /etc/os-release; then
  needed+=("chromium:command -v chromium || command -v chromium-browser || command -v google-chrome || command -v chrome")
fi
prefix=.deps/prefix/usr
headers() {  # every file of this name
  local dir
  for dir in /usr/include /usr/local/include "$prefix/include" ${CPLUS_INCLUDE_PATH:+${CPLUS_INCLUDE_PATH//:/ }} \
      ${CMAKE_PREFIX_PATH:+${CMAKE_PREFIX_PATH//:/\/include }/include}; do
    [ ! -e "$dir/$1" ] || echo "$dir/$1"
  done
}
header() { [ -n "$(headers "$1")" ]; }
# Existing versions, or those that apt-get would install, must be new enough. Checked now, before the downloads.
version_of() {  # command package
  if command -v "$1" >/dev/null; then
    "$1" --version | sed -n '1s/.* \([0-9][0-9.]*\).*/\1/p'
  elif command -v apt-cache >/dev/null; then
    apt-cache policy "$2" | sed -n 's/^ *Candidate: \([0-9]*:\)\{0,1\}\([0-9][0-9.]*\).*/\2/p'
  fi
}
compare_version() {  # name version least remedy; a version that is not known is new enough
  [ -z "$2" ] || [ "$(printf '%s\n' "$3" "$2" | sort -V | head -1)" = "$3" ] \
    || fail "expected $1 $3 or newer, got $2 — $4"
}
require_version() {  # command package least remedy
  compare_version "$1" "$(version_of "$1" "$2")" "$3" "$4"
}
require_version cmake cmake 3.25 "install a newer one, with 'python3 -m pip install cmake' for example, or use the bundle (docs/using.md)"
compiler="${CXX:-c++}"
command -v "$compiler" >/dev/null || compiler=g++
case "$("$compiler" --version 2>/dev/null | head -1)" in
  *clang*) require_version "$compiler" clang 14 "install a newer one, and say so: CXX=clang++-14 make …" ;;
  *) require_version "$compiler" g++ 12 "install a newer one, and say so: CXX=g++-12 make …" ;;
esac
# The one of Ubuntu 22.04 is older. Of several that are there, the build may take the newest. Its headers say the version, later
# ones in base.h.
highway_version() {
  local file
  header hwy/highway.h || { version_of libhwy-dev libhwy-dev; return; }
  for file in $(headers hwy/highway.h); do
    cat "$file" "${file%highway.h}base.h" 2>/dev/null \
      | sed -n 's/^#define HWY_\(MAJOR\|MINOR\|PATCH\) \([0-9]*\).*/\2/p' | paste -sd .
  done | sort -V | tail -1
}
compare_version libhwy-dev "$(highway_version)" 1.0.3 \
  "use a distribution that has it (Debian 12, Ubuntu 24.04), install Highway from its sources, or use the bundle (docs/using.md)"
missing=()
for entry in "${needed[@]}"; do
  eval "${entry#*:}" >/dev/null 2>&1 || missing+=("${entry%%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root=(sudo); else as_root=(none); fi
  fi
  if [ "${as_root[0]:-}" = none ]; then
    say "no root and no sudo: unpacking the libraries into .deps/prefix instead of installing ${missing[*]}"
    tools/make_prefix.sh "${missing[@]}"
  else
    say "installing packages: ${missing[*]}"
    command -v apt-get >/dev/null || fail "expected apt-get (Debian, Ubuntu), got another system — install by hand: ${missing[*]}"
    "${as_root[@]}" apt-get update -qq || fail "apt-get update failed — is there a network?"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null \
      || fail "apt-get could not install: ${missing[*]}"
  fi
else
  say "packages: all there"
fi

# --- LibTorch --------------------------------------------------------------------------------------------------
if [ -n "${SEMITONE_LIBTORCH:-}" ]; then
  [ -e "$SEMITONE_LIBTORCH/lib/libtorch_cpu.so" ] \
    || fail "expected lib/libtorch_cpu.so in SEMITONE_LIBTORCH, got none in $SEMITONE_LIBTORCH — give the folder that holds include/ and lib/"
  [ "$with_cuda" = 0 ] || [ -e "$SEMITONE_LIBTORCH/lib/libtorch_cuda.so" ] \
    || fail "expected lib/libtorch_cuda.so in SEMITONE_LIBTORCH, got none in $SEMITONE_LIBTORCH — give a LibTorch with CUDA, or unset SEMITONE_LIBTORCH to download one"
  say "LibTorch: $SEMITONE_LIBTORCH, as given"
  exit 0
fi
kind="LibTorch $torch_release"
target=".deps/libtorch-$torch_release"
export SEMITONE_MACHINE="${SEMITONE_MACHINE:-$(uname -m)}"
if [ "$SEMITONE_MACHINE" != "$(uname -m)" ]; then
  kind="$kind for $SEMITONE_MACHINE"
  target=".deps/$SEMITONE_MACHINE/libtorch-$torch_release"
fi
if [ "$with_cuda" = 1 ]; then
  kind="$kind with CUDA"
  target="$target-cuda"
fi
if [ -e "$target/complete" ]; then
  say "$kind: there ($target)"
  exit 0
fi

# Another run may download too: make mnist and make test in two terminals.
mkdir -p .deps
exec 9> .deps/lock
flock 9
if [ -e "$target/complete" ]; then
  say "$kind: there ($target)"
  exit 0
fi

# The Python package `torch` contains the C++ LibTorch, and any machine can install it by name. Using it needs no Python;
# pip only downloads.
work=".deps/download"
rm -rf "$work" "$target.partial"
mkdir -p "$target.partial"
say "$kind: downloading (530 MB, once)"
tools/fetch_wheels.sh "$work" "torch==$torch_release" || fail "expected LibTorch $torch_release, got none — or give SEMITONE_LIBTORCH, the folder of an existing one"
say "$kind: unpacking headers and libraries"
wheel="$(ls "$work"/torch-*.whl)"
left_out=('*libtorch_python*')
# Without CUDA=1 the CUDA libraries stay packed: they need 4 GB of other libraries.
[ "$with_cuda" = 1 ] || left_out+=('*libtorch_cuda*' '*libtorch_nvshmem*' '*libc10_cuda*')
unzip -q -o "$wheel" 'torch/include/*' 'torch/lib/*' 'torch/version.py' -x "${left_out[@]}" -d "$target.partial"
cuda="$(sed -n "s/^cuda.*= '\([0-9]*\)\..*/\1/p" "$target.partial/torch/version.py")"
if [ "$with_cuda" = 1 ]; then
  [ -n "$cuda" ] || fail "expected a LibTorch with CUDA, got $(basename "$wheel") — give SEMITONE_LIBTORCH, the folder of one for this machine"
  # The releases that this LibTorch was tested with, as the package says.
  mapfile -t libraries < <(unzip -p "$wheel" '*.dist-info/METADATA' \
    | sed -n 's/^Requires-Dist: \(cuda-toolkit[^;]*\|nvidia-[^;]*\);.*/\1/p' | tr -d ' ')
  say "$kind: downloading the CUDA $cuda libraries (2 GB, once)"
  tools/fetch_wheels.sh --with-dependencies "$work" "${libraries[@]}"
elif [ -n "$cuda" ]; then
  # libtorch_cpu.so links two small CUDA libraries; they need no GPU.
  suffix=""
  [ "$cuda" -lt 13 ] && suffix="-cu$cuda"
  say "$kind: downloading the CUDA $cuda runtime that its CPU library links (15 MB)"
  tools/fetch_wheels.sh "$work" "nvidia-cuda-runtime$suffix~=$cuda.0" "nvidia-cuda-cupti$suffix~=$cuda.0"
fi
for wheel in "$work"/nvidia_*.whl; do
  [ ! -e "$wheel" ] || unzip -q -o "$wheel" 'nvidia/*' -d "$target.partial"
done
rm -rf "$work" "$target"
mv "$target.partial" "$target"
touch "$target/complete"
say "$kind: done ($target)"
