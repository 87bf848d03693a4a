"""Every attack of ``attacks.py`` in every backend: none gets what it wants, the sandbox answers afterwards, and
the table in docs/sandboxes.md says what was answered.

``TURNSTILE_WRITE_DOCS=1`` writes the backend's column instead of comparing it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
from attack import PRELUDE, Attack
from attacks import ATTACKS
from sandbox_providers import BACKENDS, SPEC, Backend

from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.protocol import (
    Command,
    ExecResult,
    Mount,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    User,
)
from waiting import wait_until

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "sandboxes.md"
COLUMNS = {"local": 2, "local-one-uid": 3, "docker": 4, "docker-stream": 5, "runsc": 6}
HEAD = [
    "| attack | how | bubblewrap as root | bubblewrap, one uid | Docker | Docker, `stream` | Docker, `runsc` |",
    "|---|---|---|---|---|---|---|",
]
EITHER = "bounded: an error, or the sandbox ends"
"""Of what fills a sandbox whose bounds are those of the runtime's own process, too: by chance one or the other."""
FILLS = {"a fork bomb", "a memory bomb", "files without end"}
DONE_IN_GVISOR = {
    "the helper's environment",
    "the helper's descriptors",
    "the helper's mappings",
    "a lower place in the queue of victims",
    "a higher priority",
}
"""What the kernel of Debian's runsc does not refuse; docs/sandboxes.md says what follows from each."""
DONE = "done: see below"


def rows() -> list[list[str]]:
    """The table of the page, without its head; empty where there is none."""
    lines = PAGE.read_text().splitlines()
    if HEAD[0] not in lines:
        return []
    start = lines.index(HEAD[0]) + len(HEAD)
    table = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def write(column: int, answers: dict[str, str]) -> None:
    """Replaces one column; rows are those of ``ATTACKS``."""
    before = {row[0]: row for row in rows()}
    table = []
    for attack in ATTACKS:
        row = before.get(attack.name, [attack.name, attack.what, *[""] * len(COLUMNS)])
        row[1], row[column] = attack.what, answers[attack.name]
        table.append("| " + " | ".join(row) + " |")
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEAD[0]) + len(HEAD)
    end = next(at for at in range(start, len(lines)) if not lines[at].startswith("|"))
    PAGE.write_text("\n".join([*lines[:start], *table, *lines[end:]]) + "\n")


def said_by(result: ExecResult) -> str:
    return result.stdout.decode(errors="replace").strip()


async def tried(sandbox: Sandbox, attack: Attack, known: Collection[str] = ()) -> str:
    """What the attack printed, as the table says it. ``known``: those that
    succeed. Raises SandboxFailed where it ended the sandbox."""
    limits = f"LIMIT_MB = {SPEC.limits.memory_bytes >> 20}\n"
    result = await sandbox.exec(Command(("python3", "-c", PRELUDE + limits + attack.script), timeout_s=60))
    await sandbox.stop_all()
    if attack.after:
        assert result.exit_code == 0, result
        look = Command(("python3", "-c", PRELUDE + attack.after), user=User.TESTS, timeout_s=60)
        result = await sandbox.exec(look)
    after = await sandbox.exec(Command(("sh", "-c", "rm -rf /tmp/* /dev/shm/* ~/big big; echo well")))
    assert after.stdout == b"well\n", f"after {attack.name}: {after}"
    said = said_by(result)
    allowed = ("refused: ", "bounded: ") if attack.bounded else ("refused: ",)
    if said.startswith("DONE") and attack.name in known:
        return DONE
    assert said.startswith(allowed), f"{attack.name}: {result}"
    return said


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    """With a program of root's that has the set-uid bit."""
    folder = tmp_path / "set-uid"
    folder.mkdir()
    program = folder / "whoami"
    shutil.copy("/usr/bin/whoami", program)
    program.chmod(0o6755)
    for each in (tmp_path, *tmp_path.parents[:2]):
        each.chmod(each.stat().st_mode | 0o055)
    return replace(SPEC, mounts=(Mount(folder, "/opt/set-uid"),))


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True, ids=lambda each: each.name)
async def test_no_attack_succeeds_and_the_table_in_the_docs_says_what_was_answered(
    backend: Backend, provider: SandboxProvider, spec: SandboxSpec
) -> None:
    sandbox = await provider.create(spec)
    answers = {}
    for attack in ATTACKS:
        try:
            answers[attack.name] = await tried(sandbox, attack, DONE_IN_GVISOR if backend.own_kernel else ())
        except SandboxFailed:
            assert backend.own_kernel, attack.name
            assert attack.name in FILLS
            sandbox = await provider.create(spec)
        if backend.own_kernel and attack.name in FILLS:
            answers[attack.name] = EITHER
    assert len(answers) == len(ATTACKS) >= 90
    column = COLUMNS[backend.name]
    if "TURNSTILE_WRITE_DOCS" in os.environ:
        write(column, answers)
    told = {row[0]: row[column] for row in rows()}
    assert told == answers, "docs/sandboxes.md is stale: run this test with TURNSTILE_WRITE_DOCS=1"


async def test_a_daemon_ends_with_its_sandbox(backend: Backend, provider: SandboxProvider, run_dir: Path) -> None:
    sandbox = await provider.create(SPEC)
    (daemon,) = [attack for attack in ATTACKS if attack.name == "a daemon"]
    ran = await sandbox.exec(Command(("python3", "-c", PRELUDE + daemon.script), timeout_s=60))
    assert ran.exit_code == 0, ran
    # It lives: without this the rest would show nothing.
    seen = await sandbox.exec(Command(("python3", "-c", PRELUDE + daemon.after), timeout_s=60))
    assert seen.stdout.startswith(b"DONE"), seen
    await sandbox.destroy()
    assert backend.traces(sandbox.sandbox_id, run_dir) == []
    await wait_until(lambda: daemons() == [])


def daemons() -> list[str]:
    """On this machine, where every sandbox but those with a kernel of their own can be seen."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if b"\0turnstile-daemon\0" in (process / "cmdline").read_bytes():
                    found.append(process.name)
    return found
