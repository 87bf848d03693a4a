"""Compares summary.json with what it should be; the file is only read, never run."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    summary = Path("summary.json")
    if summary.is_symlink() or not summary.is_file():
        print("there is no file summary.json")
        return 1
    try:
        have = json.loads(summary.read_bytes())
    except ValueError as error:
        print(f"summary.json is not JSON: {error}")
        return 1
    want = json.loads((HERE / "wanted.json").read_bytes())
    if not isinstance(have, dict):
        print("summary.json is no object")
        return 1
    wrong = sorted(key for key in want.keys() | have.keys() if want.get(key) != have.get(key))
    if wrong:
        print("wrong:", ", ".join(wrong))
        return 1
    return 0


sys.exit(main())
