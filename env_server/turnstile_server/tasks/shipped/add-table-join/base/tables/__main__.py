"""python3 -m tables join LEFT.csv RIGHT.csv --on COLUMN [--left] --out OUT.csv"""

from __future__ import annotations

import argparse
from pathlib import Path

from tables import csvfile
from tables.join import columns_of, join


def main() -> None:
    parser = argparse.ArgumentParser(prog="tables")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("join")
    command.add_argument("first", type=Path)
    command.add_argument("second", type=Path)
    command.add_argument("--on", required=True)
    command.add_argument("--left", action="store_true", help="keep rows of the first table without a partner")
    command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    first, second = csvfile.read(args.first), csvfile.read(args.second)
    rows = join(first, second, args.on, keep_left=args.left)
    csvfile.write(args.out, columns_of(first, second, args.on), rows)


if __name__ == "__main__":
    main()
