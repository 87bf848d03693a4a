#!/bin/bash
awk -F, '$1 == 1 {sum += $3} END {print sum}' sales.csv > total-1.txt
