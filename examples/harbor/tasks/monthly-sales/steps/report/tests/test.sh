#!/bin/bash
# A step's own script instead of the shared one.
if [ "$(cat report.txt 2>/dev/null)" = "$(printf 'month 1: 245\nmonth 2: 217')" ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
