"""Stands in for ``swebench_program.py``: the same lines, with a parser of ``PASSED name`` and ``FAILED name``.

Its arguments are a file to note each start in, and how it misbehaves: ``dies`` at the first request of the first
start, ``hangs`` at every request.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

START, END = ">>>>> Start Test Output", ">>>>> End Test Output"


def report(row: dict[str, list[str]], log: str) -> dict[str, object]:
    section = log.partition(START)[2].partition(END)[0]
    found = dict(reversed(line.split()) for line in section.splitlines() if line[:6] in ("PASSED", "FAILED"))
    failed = [
        [test, group, found.get(test, "MISSING")]
        for group in ("FAIL_TO_PASS", "PASS_TO_PASS")
        for test in row[group]
        if found.get(test) != "PASSED"
    ]
    doubts = ["it says so itself"] if "DOUBTFUL" in log else []
    return {
        "graded": bool(found),
        "resolved": bool(found) and not failed,
        "failed": failed,
        "infra_failure": None,
        "doubts": doubts,
    }


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    starts, how = Path(sys.argv[1]), sys.argv[2]
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    say({"ready": "0"})
    for line in sys.stdin:
        if how == "hangs":
            time.sleep(600)
        if how == "dies" and len(starts.read_text().splitlines()) == 1:
            sys.exit("no more")
        request = json.loads(line)
        row = request["row"]
        if request["do"] == "script":
            say({"result": {"script": row["eval_script"]}})
        elif row["log_parser"] == "unknown":
            say({"error": "ValueError: it has no log parser 'unknown'"})
        elif "STALLING" in request["log"]:
            time.sleep(600)
        elif "UNREADABLE" in request["log"]:
            say({"error": "IndexError: list index out of range"})
        else:
            say({"result": report(row, request["log"])})


if __name__ == "__main__":
    main()
