"""How an engine's reader is asked. Imported in the engines' environments.

Standard input is a list of jobs as JSON (``job`` in ``__main__``); standard output has a line of readings for
each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

Read = Callable[[dict[str, Any]], tuple[list[list[Any]], str]]
"""A case, to the name and the arguments of each call, and the text beside them."""


def answer(reader_of: Callable[[str, str], Read]) -> None:
    """``reader_of``: the reader for a model folder and a parser's name."""
    for job in json.load(sys.stdin):
        read = reader_of(job["folder"], job["parser"])
        print(f"READ {json.dumps([_reading(read, case) for case in job['cases']])}", flush=True)


def _reading(read: Read, case: dict[str, Any]) -> dict[str, Any]:
    try:
        calls, text = read(case)
    except Exception as error:  # noqa: BLE001 - a reader that fails is a result of the comparison
        return {"calls": [], "text": f"{type(error).__name__}: {error}"}
    return {"calls": calls, "text": text}
