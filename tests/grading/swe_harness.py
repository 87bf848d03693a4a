"""SWE-bench's own harness on patches of our rows: run in the Python that has ``swebench``, on the local engine.

Reads a JSON object from stdin: ``cases``, a list of ``[name, row, patch]``. Writes one to stdout: by name, what
``run_instance`` says, or null where it says nothing (a patch that does not apply, a time-out).
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from swebench.harness.run_evaluation import _docker_client, run_instance
from swebench.harness.utils import make_test_spec

TIMEOUT_S = 120


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    client = _docker_client()

    def run(case: tuple[str, dict[str, Any], str]) -> tuple[str, Any]:
        name, row, patch = case
        prediction = {"instance_id": row["instance_id"], "model_patch": patch, "model_name_or_path": name}
        done = run_instance(make_test_spec(row), prediction, client, f"turnstile-{os.getpid()}-{name}", TIMEOUT_S)
        return name, None if done is None else done[1][row["instance_id"]]

    cases = json.load(sys.stdin)["cases"]
    # A container of the harness takes 15 s to stop: its first process ignores the signal.
    with ThreadPoolExecutor(max(1, len(cases))) as pool:
        json.dump(dict(pool.map(run, cases)), answers)


if __name__ == "__main__":
    main()
