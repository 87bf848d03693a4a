"""A scan of a sandbox from outside: runs ``scan_start`` in it, and reads what that says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnstile_server.errors import SandboxFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.leaks import OWN_FOLDERS, SKIPPED
from turnstile_server.grading.programs import python_of
from turnstile_server.grading.verdict import printable, storable
from turnstile_server.sandboxes.protocol import Command, Sandbox
from turnstile_server.settings import GradingSettings

JUDGES_FOLDERS = ("/tests", "/solution", "/logs")
"""Folders that a judge or a solution uses, in some images."""
_PROGRAM = (Path(__file__).parent / "scan_start.py").read_text()
_RESULT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StartScan:
    """``found``: the names of patterns, each with the places where it stands."""

    found: Mapping[str, tuple[str, ...]]
    digest: str
    """Of the work folder's files."""
    whole: bool


async def scan(
    sandbox: Sandbox, patterns: Mapping[str, str], settings: GradingSettings, *, skip: tuple[str, ...] = ()
) -> StartScan:
    """``patterns``: regular expressions by name; looked for in files, variables and processes. Raises
    SandboxFailed."""
    config = {
        "root": sandbox.workdir,
        "within": (sandbox.workdir, *OWN_FOLDERS, "/dev/shm", *JUDGES_FOLDERS),
        "skip": [*(folder for folder in SKIPPED if folder != "/dev"), *skip],
        "patterns": dict(patterns),
        "seconds": settings.leak_search_s,
        "max_file": settings.bounds_of(GradingBounds).leak_search_max_file_bytes,
    }
    result = await sandbox.exec(
        Command(
            argv=(*python_of(sandbox), "-c", _PROGRAM),
            stdin=json.dumps(config).encode(),
            timeout_s=2 * settings.leak_search_s + settings.bounds_of(GradingBounds).runner_grace_s,
            max_output_bytes=_RESULT_BYTES,
        )
    )
    if result.exit_code != 0:
        tail = printable(result.stderr.decode(errors="replace").strip()[-200:])
        raise SandboxFailed(f"the look at a task's start ended with {result.exit_code}: {tail}")
    said = storable(json.loads(result.stdout))
    found: dict[str, tuple[str, ...]] = {}
    for name, place in said["found"]:
        found[name] = (*found.get(name, ()), printable(place))
    return StartScan(found, str(said["digest"]), bool(said["whole"]))
