"""Checks of a machine's sandboxes, and of the resources that it leaves a server: ``turnstile doctor``.

Everything is tried: a sandbox is made and attacked from inside (``sandbox_probes``), descriptors are opened up to
the limit, a file is written where the journal lies. A server may run on the same data directory meanwhile.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict

from turnstile_server.backends import started_sandboxes
from turnstile_server.data_dir import journal_folder
from turnstile_server.errors import StartupError, TurnstileError
from turnstile_server.http.descriptors import raise_descriptor_limit, too_few
from turnstile_server.journal.retention import DiskBounds
from turnstile_server.journal.segments import SEGMENT_PATTERN
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import Settings
from turnstile_server.testing.doctor import Finding
from turnstile_server.testing.installed_plugins import installed_parts
from turnstile_server.testing.sandbox_probes import LIMITS, PROBES

_WRITTEN = 64 << 10
"""Bytes that are written where the journal lies: more than a record of most turns."""


class MachineReport(BaseModel):
    """The findings of a check of the machine. ``passed``: no finding is false."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: Sequence[Finding]) -> Self:
        return cls(passed=all(each.passed is not False for each in findings), findings=tuple(findings))


async def check_parts() -> MachineReport:
    """Lists the installed parts alone."""
    return MachineReport.of(await anyio.to_thread.run_sync(installed_parts))


async def check_machine(settings: Settings) -> MachineReport:
    """Tries what holds here. Blocks for some seconds, and raises the process's limit of descriptors as a server
    does. Raises StartupError where the settings name something that is wrong by itself."""
    findings = await _sandboxes(settings)
    findings.append(_descriptors(settings))
    findings.append(await anyio.to_thread.run_sync(_journal, settings))
    return MachineReport.of([*findings, *await anyio.to_thread.run_sync(installed_parts)])


async def _sandboxes(settings: Settings) -> list[Finding]:
    try:
        async with started_sandboxes(settings) as provider:
            return await _tried(provider)
    except StartupError as error:
        return [Finding(name="sandboxes", passed=False, text=error.message)]


async def _tried(provider: SandboxProvider) -> list[Finding]:
    if provider.missing is not None:
        return [Finding(name="sandboxes", passed=False, text=provider.missing)]
    told = Finding(name="sandboxes", passed=provider.isolated, text=provider.description)
    if not provider.isolated:  # nothing may be tried there: it would be this machine that is attacked
        return [told]
    try:
        sandbox = await provider.create(SandboxSpec(LIMITS))
    except TurnstileError as error:
        return [told, Finding(name="made", passed=False, text=error.message)]
    findings = [told]
    try:
        for probe in PROBES:
            findings.append(await probe(sandbox))
    except TurnstileError as error:
        text = f"the sandbox ended while it was tried: {error.message}"
        findings.append(Finding(name="held", passed=False, text=text))
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.destroy()
    return findings


def _descriptors(settings: Settings) -> Finding:
    shares = raise_descriptor_limit(settings)
    opened = _opened(shares.limit)
    text = (
        f"{opened} could be opened; connections at once: control API {shares.control}, agents' listener "
        f"{shares.agents}, all sandboxes {shares.sandboxes}"
    )
    lacking = too_few(shares, settings)
    return Finding(name="descriptors", passed=None, text=text if lacking is None else f"{text}. FEW: {lacking}")


def _opened(limit: int) -> int:
    """Number of descriptors that this process can have, found out by opening them."""
    made: list[int] = []
    try:
        while len(made) < limit:
            made.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:  # at the limit, or the machine's own is reached
        pass
    finally:
        for descriptor in made:
            os.close(descriptor)
    return len(made)


def _journal(settings: Settings) -> Finding:
    directory = journal_folder(settings.data_dir).absolute()
    place = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    found = os.statvfs(place)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    used = sum(path.stat().st_size for path in directory.glob(SEGMENT_PATTERN))
    text = DiskBounds.of(settings.journal, total).sentence(directory, used, total, settings.journal)
    text = f"{free / (1 << 30):.1f} GiB free; {text}"
    problem = _write_problem(place)
    if problem is None and free < settings.journal.min_free_bytes:
        problem = "less is free than journal.min_free_bytes: turns would be refused"
    return Finding(name="journal", passed=problem is None, text=text if problem is None else f"{problem}; {text}")


def _write_problem(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(_WRITTEN))
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as error:
        return f"{folder} takes no record ({error.strerror})"
    return None
