"""Finds the solution of a task, or its hidden tests, in what the task's agent can read.

For ``turnstile tasks validate``. Which lines are looked for is decided here, from the task; the files of the
sandbox are read inside it (``inside/find_leaks.py``), as the agent's user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile_server.errors import SandboxFailed
from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.grading.programs import INSIDE, python_of
from turnstile_server.grading.verdict import printable, storable
from turnstile_server.sandboxes.protocol import HOMES, Command, Sandbox
from turnstile_server.settings import GradingSettings

SOLUTION = "the gold solution"
HIDDEN_TESTS = "the hidden tests"
SKIPPED = ("/proc", "/sys", "/dev", "/turnstile", "/run/turnstile", "/opt/turnstile")
"""Folders that every sandbox has, whatever its task."""
OWN_FOLDERS = (*HOMES.values(), "/tmp", "/var/tmp")
"""Folders of a sandbox without an image, beside its work folder. The rest is this machine's, the same for all."""
LEAST_LINE = 20
"""Characters of a line that is looked for: a shorter one may stand anywhere by chance."""
LEAST_LINES = 2
"""A text with fewer such lines is not looked for: its one line may stand in some library."""
MOST_LINES = 400
_PROGRAM = (INSIDE / "find_leaks.py").read_text()
_RESULT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class SecretText:
    """Lines that no agent may find. ``path``: where in the work folder they belong, None: nowhere."""

    what: str
    path: str | None
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeakReport:
    """``leaks``: sentences. ``note``: why nothing, or not everything, was looked at."""

    leaks: tuple[str, ...] = ()
    note: str | None = None


def telling_lines(lines: Iterable[str], known: Iterable[str] = ()) -> tuple[str, ...]:
    """The lines by which a text can be recognised: long enough, with letters, and not among ``known``."""
    seen = {line.strip() for line in known}
    found = dict.fromkeys(
        line
        for line in (each.strip() for each in lines)
        if len(line) >= LEAST_LINE and re.search(r"[^\W\d_]{3}", line) and line not in seen
    )
    return tuple(found)[:MOST_LINES]


def secret_texts(
    base: Mapping[str, bytes], gold: Mapping[str, bytes], tests: Mapping[str, bytes]
) -> tuple[SecretText, ...]:
    """The lines of a solution that its own file lacks at the start, and those of hidden tests that stand nowhere
    in the base, whose visible tests may have many of them. Each mapping: contents by path."""

    def lines(data: bytes) -> list[str]:
        return data.decode(errors="replace").splitlines()

    everywhere = [line for data in base.values() for line in lines(data)]
    solution = [
        SecretText(SOLUTION, path, telling_lines(lines(data), lines(base.get(path, b""))))
        for path, data in sorted(gold.items())
    ]
    hidden = [
        SecretText(HIDDEN_TESTS, path, telling_lines(lines(data), everywhere))
        for path, data in sorted(tests.items())
    ]
    return tuple(text for text in (*solution, *hidden) if text.lines)


def patch_texts(patch: str | None, *, reverse: bool, what: str = SOLUTION) -> tuple[SecretText, ...]:
    """The lines that a unified diff adds, or takes away where its reverse is meant, by file."""
    sign, other = ("-", "+++ ") if reverse else ("+", "--- ")
    by_file: dict[str, list[str]] = {}
    path = ""
    for line in (patch or "").splitlines():
        if line.startswith(("--- ", "+++ ")):
            name = line[4:].partition("\t")[0]
            if name != "/dev/null" and not line.startswith(other):
                path = name.partition("/")[2]
        elif line.startswith(sign) and path:
            by_file.setdefault(path, []).append(line[1:])
    texts = (SecretText(what, path, telling_lines(lines)) for path, lines in by_file.items())
    return tuple(text for text in texts if text.lines)


async def find_leaks(
    sandbox: Sandbox, texts: Sequence[SecretText], settings: GradingSettings, *, own_image: bool
) -> LeakReport:
    """``sandbox``: as an agent would get it. ``own_image``: all that is in it comes from an image, and is
    searched. Raises SandboxFailed."""
    wanted: dict[str, int] = {}
    for text in texts:
        wanted[text.what] = wanted.get(text.what, 0) + len(text.lines)
    searched = [text for text in texts if wanted[text.what] >= LEAST_LINES]
    if not searched:
        return LeakReport(note="nothing that could be recognised")
    config: dict[str, Any] = {
        "texts": [{"what": text.what, "path": text.path, "lines": text.lines} for text in searched],
        "root": sandbox.workdir,
        "within": ("/",) if own_image else (sandbox.workdir, *OWN_FOLDERS),
        "skip": SKIPPED,
        "seconds": settings.leak_search_s,
        "max_file": settings.bounds_of(GradingBounds).leak_search_max_file_bytes,
        "max_shown": settings.bounds_of(GradingBounds).max_shown,
    }
    result = await sandbox.exec(
        Command(
            argv=(*python_of(sandbox), "-c", _PROGRAM),
            cwd="/",
            stdin=json.dumps(config).encode(),
            timeout_s=settings.leak_search_s + settings.bounds_of(GradingBounds).runner_grace_s,
            max_output_bytes=_RESULT_BYTES,
        )
    )
    if result.exit_code != 0:
        tail = printable(result.stderr.decode(errors="replace").strip()[-200:])
        raise SandboxFailed(f"the search for leaks ended with {result.exit_code}: {tail}")
    said = storable(json.loads(result.stdout))
    leaks = tuple(
        f"{leak['what']} can be read in the agent's sandbox: {printable(leak['path'])} has {leak['found']} of its "
        f"{leak['of']} telling lines"
        for leak in said["leaks"]
    )
    note = None if said["whole"] else f"not all was read in {settings.leak_search_s:g} s (grading.leak_search_s)"
    return LeakReport(leaks, note)
