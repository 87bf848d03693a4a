#!/bin/bash
# 1 where every check passes, else 0.
script=$PWD/rotate.sh
check() {
  place=$(mktemp -d) && cd "$place" || return 1
  for text in one two three; do
    printf '%s' "$text" > a.log
    sh "$script" a.log 2 || return 1
  done
  [ "$(cat a.log.1)" = three ] && [ "$(cat a.log.2)" = two ] && [ ! -e a.log.3 ] && [ ! -s a.log ] || return 1
  sh "$script" missing.log 2
  [ $? -eq 1 ] && [ ! -e missing.log ]
}
if check; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
