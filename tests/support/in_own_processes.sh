#!/bin/sh
# in_own_processes.sh COUNT PROGRAM FILTER: runs each test that the filter names alone, COUNT times, each in a process of its own.
# Fails unless each run passes exactly one test: a filter that names none would pass as well.
program=$2
tests=$("$program" --gtest_list_tests --gtest_filter="$3" | awk '/^[^ ]+\./ { suite = $1 } /^  / { print suite $1 }')
for test in ${tests:-none}; do
  count=$1
  while [ "$count" -gt 0 ]; do
    output=$("$program" --gtest_brief=1 --gtest_filter="$test" 2>&1)
    code=$?
    case $code-$output in
      0-*'[  PASSED  ] 1 test.'*) ;;
      *) printf '%s\n%s: exit code %s, %s runs to go\n' "$output" "$test" "$code" "$count"; exit 1 ;;
    esac
    count=$((count - 1))
  done
done
