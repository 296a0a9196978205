#!/usr/bin/env bash
# Downloads Python packages into a folder, as files; what they require only if asked to. Nothing is installed; a wheel is a
# zip archive, whose programs and libraries work without Python:
#
#   tools/fetch_wheels.sh [--with-dependencies] FOLDER REQUIREMENT...
#   SEMITONE_MACHINE=aarch64   the processors they are for, default: this machine's
set -euo pipefail
dependencies=(--no-deps)
if [ "$1" = --with-dependencies ]; then
  dependencies=()
  shift
fi
folder="$1"
shift
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

if ! python3 -m pip --version >/dev/null 2>&1; then
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null \
      || fail "expected pip for python3, got none — install the package python3-pip, or give SEMITONE_LIBTORCH"
    as_root=(sudo)
  fi
  printf '\033[1m[setup]\033[0m installing packages: python3-pip\n'
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed — is there a network?"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-pip >/dev/null \
    || fail "apt-get could not install: python3-pip"
fi
machine="${SEMITONE_MACHINE:-$(uname -m)}"
platforms=(--platform "manylinux2014_$machine")  # pip matches each platform name exactly, so all must be listed
for minor in $(seq 17 28); do platforms+=(--platform "manylinux_2_${minor}_$machine"); done
mkdir -p "$folder"
python3 -m pip download --quiet --disable-pip-version-check "${dependencies[@]}" --only-binary=:all: \
  --implementation cp --python-version 3.11 --abi cp311 --abi abi3 --abi none "${platforms[@]}" -d "$folder" "$@" \
  || fail "could not download $* — is there a network?"
