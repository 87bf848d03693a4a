#!/bin/bash
for month in 1 2; do
    echo "month $month: $(cat "total-$month.txt")"
done > report.txt
