#!/usr/bin/env bash
# Installs the peers of benchmarks/compare.py, PyTorch and Paddle, into .deps/peers, once. `make bench-peers` calls it.
#
#   SEMITONE_PEER_PYTHON=PYTHON   a Python that has torch already: nothing is installed
set -euo pipefail
cd "$(dirname "$0")/../.."
target=.deps/peers

say() { printf '\033[1m[bench-peers]\033[0m %s\n' "$*"; }
fail() { printf '[bench-peers] %s\n' "$*" >&2; exit 1; }

if [ -n "${SEMITONE_PEER_PYTHON:-}" ]; then
  "$SEMITONE_PEER_PYTHON" -c 'import torch' 2>/dev/null \
    || fail "expected a Python with torch in SEMITONE_PEER_PYTHON, got $SEMITONE_PEER_PYTHON"
  say "peers: those of $SEMITONE_PEER_PYTHON"
  exit 0
fi
if [ -e "$target/complete" ]; then
  say "peers: there ($target)"
  exit 0
fi
rm -rf "$target"
python3 -m venv "$target" || fail "could not make a Python environment — install the package python3-venv, or give SEMITONE_PEER_PYTHON"
say "downloading PyTorch (3 GB with what it depends on, once)"
"$target/bin/pip" install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt \
  || fail "could not install PyTorch — is there a network?"
say "downloading Paddle (200 MB, once)"
"$target/bin/pip" install --quiet --disable-pip-version-check -r benchmarks/peers/requirements-paddle.txt \
  || say "could not install Paddle: the comparison leaves it out"
touch "$target/complete"
say "peers: done ($target)"
