#!/usr/bin/env bash
# Unpacks Debian packages into .deps/prefix without root, so that one folder holds every library the build needs.
# The folder can be copied to a machine without a network: the build searches it automatically.
#
#   tools/make_prefix.sh [package...]      default: every library of tools/setup.sh
set -euo pipefail
cd "$(dirname "$0")/.."
packages=("$@")
[ ${#packages[@]} -gt 0 ] || packages=(libcli11-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libhwy-dev libjpeg-dev libpng-dev zlib1g-dev
  libgloo-dev libgtest-dev libgmock-dev)
for package in "${packages[@]}"; do
  case "$package" in
    lib*|*-dev|nlohmann*) ;;
    *) echo "[make_prefix] $package is a program, not a library: it needs an administrator (apt-get install $package)" >&2; exit 1 ;;
  esac
done
# A -dev package needs its library: follow the dependencies, within the libraries named here.
mapfile -t closure < <(
  for package in "${packages[@]}"; do
    echo "$package"
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$package" \
      | sed -n 's/^ *Depends: \(lib\(fmt\|spdlog\|hwy\|gloo\|gtest\|gmock\|jpeg\|png\)[^ <]*\|googletest\|zlib1g\(-dev\)\{0,1\}\).*/\1/p'
  done | sort -u)
mkdir -p .deps/prefix
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
(cd "$work" && apt-get download -qq "${closure[@]}")
for deb in "$work"/*.deb; do
  dpkg -x "$deb" .deps/prefix
done
# Compilers search the folder of an architecture's headers below /usr/include only.
for header in .deps/prefix/usr/include/*-linux-gnu/*.h; do
  [ ! -e "$header" ] || ln -sf "$(basename "$(dirname "$header")")/$(basename "$header")" .deps/prefix/usr/include/
done
echo "[make_prefix] .deps/prefix holds: ${closure[*]}"
