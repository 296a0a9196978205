#!/usr/bin/env bash
# Installs the peers of benchmarks/compare.py, once: PyTorch and Paddle into .deps/peers, and Intel Extension for PyTorch
# (IPEX), which needs another release of PyTorch, into .deps/peers-ipex. `make bench-peers` calls it. The comparison leaves out
# Paddle and IPEX where they cannot be installed.
#
#   SEMITONE_PEER_PYTHON=PYTHON   a Python that has torch already: nothing is installed
set -euo pipefail
cd "$(dirname "$0")/../.."
target=.deps/peers
ipex=.deps/peers-ipex

say() { printf '\033[1m[bench-peers]\033[0m %s\n' "$*"; }
fail() { printf '[bench-peers] %s\n' "$*" >&2; exit 1; }
# install FOLDER FILE: what the file lists, with pip.
install() { "$1/bin/pip" install --quiet --disable-pip-version-check -r "benchmarks/peers/$2"; }

install_torch_and_paddle() {
  rm -rf "$target"
  python3 -m venv "$target" || fail "could not make a Python environment — install the package python3-venv, or give SEMITONE_PEER_PYTHON"
  say "downloading PyTorch (3 GB with what it depends on, once)"
  install "$target" requirements.txt || fail "could not install PyTorch — is there a network?"
  say "downloading Paddle (200 MB, once)"
  install "$target" requirements-paddle.txt || say "could not install Paddle: the comparison leaves it out"
  touch "$target/complete"
  say "peers: done ($target)"
}

# Importing finds out whether it can be used here.
install_ipex() {
  rm -rf "$ipex"
  say "downloading IPEX and its PyTorch (3 GB, once)"
  if python3 -m venv "$ipex" && install "$ipex" requirements-ipex.txt \
      && "$ipex/bin/python" -c 'import intel_extension_for_pytorch' 2>/dev/null; then
    say "IPEX: done ($ipex)"
  else
    say "could not install IPEX: the comparison leaves it out (remove $ipex to try again)"
  fi
  touch "$ipex/complete"
}

if [ -n "${SEMITONE_PEER_PYTHON:-}" ]; then
  "$SEMITONE_PEER_PYTHON" -c 'import torch' 2>/dev/null \
    || fail "expected a Python with torch in SEMITONE_PEER_PYTHON, got $SEMITONE_PEER_PYTHON"
  say "peers: those of $SEMITONE_PEER_PYTHON"
  exit 0
fi
if [ -e "$target/complete" ]; then say "peers: there ($target)"; else install_torch_and_paddle; fi
if [ -e "$ipex/complete" ]; then say "IPEX: there ($ipex)"; else install_ipex; fi
