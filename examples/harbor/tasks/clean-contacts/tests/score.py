"""Prints the part of the expected rows that is there, in its place."""

import csv

EXPECTED = [
    ["Ada Lovelace", "ada@example.org", "44201234"],
    ["Grace Hopper", "grace@example.org", "2025550101"],
    ["Alan Turing", "alan@example.org", "016155577"],
]
try:
    with open("clean.csv", newline="") as file:
        header, *rows = csv.reader(file)
except (OSError, ValueError):
    header, rows = [], []
right = (
    sum(one == other for one, other in zip(rows, EXPECTED, strict=False))
    if header == ["name", "email", "phone"]
    else 0
)
print(right / max(len(EXPECTED), len(rows)))
