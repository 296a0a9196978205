#!/bin/sh
# in_own_processes.sh COUNT PROGRAM TEST: runs one test alone, COUNT times, each in a process of its own. Fails unless each run
# passes exactly that test: a filter that names none would pass as well.
count=$1 program=$2 filter=$3
while [ "$count" -gt 0 ]; do
  output=$("$program" --gtest_brief=1 --gtest_filter="$filter" 2>&1)
  code=$?
  case $code-$output in
    0-*'[  PASSED  ] 1 test.'*) ;;
    *) printf '%s\nexit code %s, %s runs to go\n' "$output" "$code" "$count"; exit 1 ;;
  esac
  count=$((count - 1))
done
