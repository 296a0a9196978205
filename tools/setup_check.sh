#!/usr/bin/env bash
# Fetches what `make check` and `make format` use into .deps/check: clang-format and clang-tidy of fixed releases, since each
# release formats and finds differently. Once they are there, another run costs nothing and needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
clang_format=23.1.5
clang_tidy=23.1.4
target=.deps/check
complete="$target/complete-$clang_format-$clang_tidy"
[ -e "$complete" ] && exit 0

mkdir -p .deps
exec 9> .deps/lock  # another run may download too
flock 9
[ -e "$complete" ] && exit 0

printf '\033[1m[setup]\033[0m clang-format %s and clang-tidy %s: downloading (47 MB, once)\n' $clang_format $clang_tidy
work=.deps/download-check
rm -rf "$work" "$target"
tools/fetch_wheels.sh "$work" "clang-format==$clang_format" "clang-tidy==$clang_tidy"
for wheel in "$work"/*.whl; do unzip -q -o "$wheel" -d "$work"; done
# clang-tidy finds its own headers in ../lib.
mkdir -p "$target"
cp -R "$work/clang_tidy/data/bin" "$work/clang_tidy/data/lib" "$target"
cp "$work/clang_format/data/bin/clang-format" "$target/bin"
chmod +x "$target"/bin/*
rm -rf "$work"
touch "$complete"
