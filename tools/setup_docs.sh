#!/usr/bin/env bash
# Installs what `make docs` uses: Doxygen as a package of the system, Zensical in a fixed release into .deps/docs, a Python
# environment of its own. Once they are there, another run costs nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
target=.deps/docs
requirements=tools/docs/requirements.txt

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

if ! command -v doxygen >/dev/null; then
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null && sudo -n true 2>/dev/null || fail "expected doxygen, got none — install the package doxygen"
    as_root=(sudo)
  fi
  command -v apt-get >/dev/null || fail "expected apt-get (Debian, Ubuntu), got another system — install doxygen by hand"
  say "installing packages: doxygen"
  "${as_root[@]}" apt-get update -qq || fail "apt-get update failed — is there a network?"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends doxygen >/dev/null \
    || fail "apt-get could not install: doxygen"
fi
doxygen="$(doxygen --version)"
doxygen="${doxygen%% *}"
[ "$(printf '%s\n' "$doxygen" 1.9.4 | sort -V | head -1)" = 1.9.4 ] || fail "expected doxygen 1.9.4 or newer, got $doxygen — install a newer one"

cmp -s "$requirements" "$target/complete" && exit 0
say "Zensical: downloading (20 MB, once)"
rm -rf "$target"
python3 -m venv "$target" || fail "could not make a Python environment — install the package python3-venv"
"$target/bin/pip" install --quiet --disable-pip-version-check --only-binary=:all: --no-deps -r "$requirements" \
  || fail "could not install Zensical — is there a network?"
"$target/bin/pip" check --quiet --disable-pip-version-check || fail "the packages of $requirements do not match each other"
cp "$requirements" "$target/complete"
