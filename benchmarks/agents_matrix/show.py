"""Prints a recording for people: ``PYTHONPATH=benchmarks python -m agents_matrix.show FILE [CALL …]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from agents_matrix.recording import Call, read

SHOWN_CHARS = 1000


def show(path: Path, numbers: set[int]) -> None:
    recording = read(path)
    print(recording.header.model_dump_json())
    for number, call in enumerate(recording.calls, 1):
        if not numbers or number in numbers:
            _show(number, call)


def _show(number: int, call: Call) -> None:
    query = f"?{call.query}" if call.query else ""
    print(f"\n{number} {call.method} {call.path}{query} {call.status}")
    for name, value in call.headers:
        print(f"  {name}: {value[:SHOWN_CHARS]}")
    body: dict[str, Any] = json.loads(call.body) if call.body else {}
    for name, value in body.items():
        items = value if isinstance(value, list) else [value]
        for item in items:
            print(f"  {name} {json.dumps(item, ensure_ascii=False)[:SHOWN_CHARS]}")
    print(f"  said {call.said}")


if __name__ == "__main__":
    show(Path(sys.argv[1]), {int(number) for number in sys.argv[2:]})
