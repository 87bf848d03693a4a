"""Runs the test-suite of a repository in which an agent worked. Runs inside the grading sandbox.

Started as ``python3 -I -S -B start.py repository``, like ``run_tests``, and answers as that does: one line, keyed
with the nonce that it got from stdin. The suite runs in processes of its own (``repository_session``), on the
interpreter that the task names, with that interpreter's packages and the repository's configuration.

What must hold:
- Nothing of the work runs in this process.
- A test counts when its process reported it on its own pipe in a keyed line, reported as many tests as it had
  collected, said that it was done and exited 0; when a canary, a test that must fail, failed in the same process;
  and when the files of the suite were afterwards what they were before.
- The work runs in the process that reports. It can find the key there, with effort: ``trust: in_process``.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import subprocess
import sys
import time
from typing import Any

from .ledger import MAX_MESSAGE
from .ledger import TestReports as Reports
from .run_tests import (
    CANARIES,
    FAULTY,
    MAX_OUTPUT,
    end_orphans,
    guard_process,
    listen,
    opened,
    signed,
)
from .run_tests import FAILED as SOME_FAILED
from .suite_rules import FAILED, NOT_RUN, SKIPPED, TAMPERED, found_for, outcomes

NO_CANARY = "a test that must fail (a canary) passed, or did not run"


class SessionResult:
    """Result of one process, judged from its reports."""

    def __init__(self) -> None:
        self.reports = Reports()
        self.collected = 0
        self.seconds: dict[str, float] = {}


def run_session(files: list[str], config: dict[str, Any], deadline: float) -> SessionResult:
    result = SessionResult()
    key = secrets.token_hex(32)
    canaries = [f"test_{secrets.token_hex(8)}" for _ in range(CANARIES)]
    report_read, report_write = os.pipe()
    start = os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py")
    child = subprocess.Popen(
        [config["python"], "-I", "-B", start, "repository_session"],
        cwd=config["work"],
        env=environment(config),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(report_write,),
        start_new_session=True,
    )
    os.close(report_write)
    assert child.stdin is not None
    assert child.stdout is not None
    names = ("work", "owned", "import_paths", "options")
    session = {name: config[name] for name in names}
    session.update(key=key, report=report_write, canaries=canaries, files=files)
    try:
        child.stdin.write(json.dumps(session).encode())
        child.stdin.close()
    except BrokenPipeError:
        pass
    report = listen(child, report_read, result.reports, deadline)
    os.close(report_read)
    child.stdout.close()
    end_orphans()
    read_report(report, bytes.fromhex(key), child.returncode, result)
    took_canaries(canaries, result.reports)
    return result


def environment(config: dict[str, Any]) -> dict[str, str]:
    """The interpreter's own folder comes first on the path, as where its environment is activated."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **config["env"]}
    folder = os.path.dirname(config["python"])
    if folder:
        env["PATH"] = folder + os.pathsep + env.get("PATH", os.defpath)
    return env


def read_report(report: bytes, key: bytes, exit_status: int, result: SessionResult) -> None:
    reports = result.reports
    for line in filter(None, report.split(b"\n")):
        try:
            said = opened(key, line)
        except ValueError:
            reports.note = reports.note or "something else wrote to the report of the tests"
            reports.done = False
            return
        if "test" in said:
            # Of two reports of one test the worse counts.
            if reports.tests.get(said["test"], ["passed"])[0] == "passed":
                reports.tests[said["test"]] = [said["status"], said["message"]]
            result.seconds[said["test"]] = result.seconds.get(said["test"], 0.0) + said["seconds"]
        elif "collected" in said:
            result.collected = said["collected"]
        elif "note" in said:
            reports.note = reports.note or said["note"]
        else:
            reports.done = True
    if exit_status != 0:
        reports.done = False
        reports.note = reports.note or f"the tests' process ended with {exit_status}"
    elif not reports.done:
        reports.note = reports.note or "the tests' process ended before the tests had"
    elif len(reports.tests) != result.collected:
        reports.done = False
        reports.note = reports.note or f"{len(reports.tests)} of {result.collected} tests were reported"


def took_canaries(names: list[str], reports: Reports) -> None:
    """Takes the canaries out of the reports; without one that failed, nothing that passed counts."""
    found = [reports.tests.pop(test)[0] for test in list(reports.tests) if test.rpartition("::")[2] in names]
    # One may be skipped with all tests of its file. That makes no test pass.
    sound = FAILED in found and all(status in (FAILED, SKIPPED) for status in found)
    for test, (status, message) in reports.tests.items():
        if status in (FAILED, TAMPERED):
            continue
        if not sound:
            reports.tests[test] = [TAMPERED, NO_CANARY]
        elif not reports.done:
            reports.tests[test] = ["not counted", reports.note or message]


def digest_of(work: str, owned: list[str]) -> dict[str, str]:
    """Digests of the suite's programs and configuration, by path."""
    found: dict[str, str] = {}
    places = [os.path.join(work, path) for path in owned]
    paths = [path for path in places if os.path.isfile(path)]
    for place in places:
        for folder, _, names in os.walk(place):
            paths += [
                os.path.join(folder, name) for name in names if name.endswith((".py", ".ini", ".toml", ".cfg"))
            ]
    for path in paths:
        try:
            with open(path, "rb") as file:
                found[os.path.relpath(path, work)] = hashlib.sha256(file.read()).hexdigest()
        except OSError:
            continue
    return found


def main() -> int:
    """Fields: ``nonce`` (hex), ``python``, ``work``, ``owned`` (what belongs to the suite), ``import_paths``,
    ``expected``, ``keep``, ``cut_ids``, ``processes``, ``options``, ``env``, ``timeout_s``, ``max_shown``."""
    guard_process()
    config = json.load(sys.stdin)
    wanted = [*config["expected"], *config["keep"]]
    files = list(dict.fromkeys(test.split("::")[0] for test in wanted))
    faults = [
        f"{name}: neither the repository nor the hidden tests have this file"
        for name in files
        if not os.path.isfile(os.path.join(config["work"], name))
    ]
    statuses: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    notes: list[str] = []
    output = b""
    if not faults:
        before = digest_of(config["work"], config["owned"])
        deadline = time.monotonic() + config["timeout_s"]
        for chunk in [files] if config["processes"] == "one" else [[name] for name in files]:
            result = run_session(chunk, config, deadline)
            statuses.update(result.reports.tests)
            seconds.update(result.seconds)
            if result.reports.note:
                notes.append(result.reports.note)
            output = (output + result.reports.output)[-MAX_OUTPUT:]
        after = digest_of(config["work"], config["owned"])
        changed = [name for name, digest in before.items() if after.get(name) != digest]
        if changed:
            statuses = {test: [TAMPERED, f"{changed[0]} was changed while the tests ran"] for test in statuses}
    answer = verdict(config, statuses, notes)
    answer.update(
        faults=faults[: config["max_shown"]],
        output=output.decode(errors="replace"),
        ran=len(statuses),
        seconds=round(sum(seconds.values()), 3),
    )
    sys.stdout.buffer.write(signed(bytes.fromhex(config["nonce"]), answer) + b"\n")
    sys.stdout.flush()
    return FAULTY if faults else SOME_FAILED if answer["failed"] else 0


def verdict(config: dict[str, Any], statuses: dict[str, list[str]], notes: list[str]) -> dict[str, Any]:
    plain = {test: status for test, (status, _) in statuses.items()}
    found = outcomes(config["expected"], config["keep"], plain, cut_ids=config["cut_ids"])
    failed = []
    for test, (counts, status) in found.items():
        if counts:
            continue
        told = [statuses[each][1] for each in found_for(test, plain, cut_ids=config["cut_ids"])]
        message = next(filter(None, told), "")
        if status == NOT_RUN:
            message = next(iter(notes), "")
        failed.append([test, status, message[:MAX_MESSAGE]])
    return {
        "passed": [test for test, (counts, _) in found.items() if counts],
        "failed": failed[: config["max_shown"]],
        "failed_count": len(failed),
    }


if __name__ == "__main__":
    sys.exit(main())
