"""Functions that the tests of ``test_host_code.py`` name as graders."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def length(*, answer: str | None, most: int = 10, **_: Any) -> float:
    sys.stdout.write("a line that is no answer\n")
    return min(1.0, len(answer or "") / most)


def parts(*, answer: str | None, task: dict[str, Any], files: dict[str, bytes | None], facts: Any) -> Any:
    return {"asked": task["instruction"] == "x", "read": (files.get("a.txt") or b"").count(b"a") / 4, "same": 1}


async def later(**_: Any) -> float:
    return 0.5


def sees_facts(*, facts: dict[str, Any], **_: Any) -> float:
    return float(facts["episode_id"] == "ep" and facts["world_scores"] is None)


def from_its_own_packages(**_: Any) -> float:
    import only_there

    return float(only_there.VALUE if os.environ["WHICH"] == "other" else 0)


def raises(**_: Any) -> float:
    raise RuntimeError("the reason")


def refused(**_: Any) -> float:
    raise ConnectionRefusedError("nobody there")


def exits(**_: Any) -> float:
    os._exit(3)


def leaves(**_: Any) -> float:
    sys.exit("gone")


def nan(**_: Any) -> float:
    return math.nan


def none(**_: Any) -> None:
    return None


def text(**_: Any) -> str:
    return "1.0"


def empty(**_: Any) -> dict[str, float]:
    return {}


def hangs(*, answer: str | None, **_: Any) -> float:
    child = subprocess.Popen(["sleep", "1000"])
    Path(answer or "").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
    return 1.0
