#!/bin/bash
# The part of the texts for which the program is right.
right=0
for text in /tests/*.txt; do
  if [ "$(awk -f frequencies.awk "$text" 2>/dev/null)" = "$(cat "${text%.txt}.expected")" ]; then
    right=$((right + 1))
  fi
done
printf '%s\n' "$((right / 2)).$((right % 2 * 5))" > /logs/verifier/reward.txt
