"""``python3 -I -S -B plain_loop.py INSTRUCTION_FILE …``: the package beside this file is all of it."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # an isolated Python does not look there by itself

from loop_parts.plain_loop import main  # type: ignore[import-not-found, unused-ignore]

if __name__ == "__main__":
    sys.exit(main())
