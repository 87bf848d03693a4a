#!/bin/bash
awk -F, '$1 == 2 {sum += $3} END {print sum}' sales.csv > total-2.txt
