"""``turnstile doctor`` finds out what holds by trying it, and says so where it does not hold."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_providers import Backend

from local import TURNSTILE
from turnstile.plugins import GROUPS
from turnstile_server.sandboxes.local import diagnosis
from turnstile_server.sandboxes.protocol import Command, ExecResult, Process, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import Settings
from turnstile_server.testing import machine, sandbox_probes
from turnstile_server.testing.machine import check_machine
from turnstile_server.testing.sandbox_probes import LIMITS, PROBES

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@dataclass
class OneUser:
    """A sandbox that runs every command as one user."""

    inner: Any
    python = "python3"

    async def exec(self, command: Command) -> ExecResult:
        result: ExecResult = await self.inner.exec(replace(command, user=User.AGENT))
        return result

    async def start(self, command: Command) -> Process:
        process: Process = await self.inner.start(replace(command, user=User.AGENT))
        return process


class NoSandbox:
    """Runs commands on this machine, as a process of the test: nothing holds them."""

    python = "python3"

    async def exec(self, command: Command) -> ExecResult:
        done = await asyncio.create_subprocess_exec(*command.argv, stdout=-1, stderr=-1, cwd="/tmp")
        stdout, stderr = await done.communicate()
        return ExecResult(done.returncode or 0, stdout, stderr, 0, False, 0.0)


@pytest.mark.thorough
@pytest.mark.slow
async def test_what_a_backend_holds_is_found_held(backend: Backend, provider: SandboxProvider) -> None:
    sandbox = await provider.create(SandboxSpec(LIMITS))
    findings = {}
    for probe in PROBES:
        found = await probe(sandbox)
        findings[found.name] = found
    judged = ("users", "capabilities", "system calls", "disk", "processes")
    assert [findings[name].text for name in judged if findings[name].passed is not True] == []
    assert ("a uid each" in findings["users"].text) is backend.own_uids
    whole = "control groups" in provider.description or provider.name == "docker"
    assert ("as a whole" in findings["memory"].text) is whole
    if whole:  # else a busy machine may hold them
        assert findings["cpus"].text.startswith("held"), findings["cpus"].text
    assert os.uname().release in findings["kernel"].text


async def test_users_that_are_not_apart_are_found(provider: SandboxProvider) -> None:
    sandbox: Any = OneUser(await provider.create(SandboxSpec(LIMITS)))
    found = await sandbox_probes.users(sandbox)
    assert found.passed is False
    assert "a command could read its key and kill it" in found.text


async def test_what_nothing_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = NoSandbox()
    calls = await sandbox_probes.system_calls(nothing)
    assert calls.passed is False
    assert "add_key" in calls.text
    rights = await sandbox_probes.capabilities(nothing)
    assert rights.passed is False or os.geteuid() != 0
    assert (await sandbox_probes.processes(nothing)).text == "NOT held"
    assert "for each process alone" in (await sandbox_probes.memory(nothing)).text


async def test_a_machine_without_isolation_fails_and_is_not_attacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "lacking", lambda machine: "there is no bwrap")
    monkeypatch.setenv("PATH", "/nowhere")

    async def never(sandbox: object) -> Any:
        raise AssertionError("a probe ran on the machine itself")

    monkeypatch.setattr(machine, "PROBES", (never,))
    open_settings = Settings(data_dir=tmp_path, sandboxes={"kind": "local", "allow_unisolated": True})
    report = await check_machine(open_settings)
    first, *others = report.findings
    assert not report.passed
    assert (first.name, first.passed) == ("sandboxes", False)
    assert "NO ISOLATION" in first.text
    assert [each.name for each in others] == ["descriptors", "journal", *GROUPS.values()]
    report = await check_machine(Settings(data_dir=tmp_path, sandboxes={"kind": "local"}))
    assert "there is no bwrap" in report.findings[0].text


async def test_a_sandbox_that_ends_while_it_is_tried_fails_and_keeps_what_was_found(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(sandbox: Any) -> Any:
        await sandbox.destroy()
        return await sandbox_probes.kernel(sandbox)

    monkeypatch.setattr(machine, "PROBES", (sandbox_probes.kernel, dies, sandbox_probes.disk))
    report = await check_machine(Settings(data_dir=tmp_path, sandboxes={"kind": "local", "run_dir": run_dir}))
    assert [(each.name, each.passed) for each in report.findings] == [
        ("sandboxes", True), ("kernel", None), ("held", False), ("descriptors", None), ("journal", True),
        *((word, None) for word in GROUPS.values()),
    ]  # fmt: skip
    assert not report.passed
    assert os.listdir(run_dir) == []


async def test_a_journal_that_takes_no_record_and_few_descriptors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PROBES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    settings = Settings(
        data_dir=tmp_path / "file" / "data",
        journal={"min_free_bytes": 1 << 60, "retention_share": 0.25},
        control={"max_connections": 10_000_000},
    )
    findings = {each.name: each for each in (await check_machine(settings)).findings}
    assert findings["journal"].passed is False
    assert "less is free than journal.min_free_bytes" in findings["journal"].text
    assert "the oldest ended episodes that a trainer has fetched are deleted" in findings["journal"].text
    assert "FEW: this process may open" in findings["descriptors"].text
    assert "control.max_connections: 10000000" in findings["descriptors"].text
    settings = Settings(data_dir="/proc/data")
    findings = {each.name: each for each in (await check_machine(settings)).findings}
    assert findings["journal"].passed is False
    assert "/proc takes no record" in findings["journal"].text


@pytest.mark.thorough
def test_the_command_prints_a_line_for_each_and_leaves_nothing(tmp_path: Path, run_dir: Path) -> None:
    environment = {**os.environ, "TURNSTILE_SANDBOXES__RUN_DIR": str(run_dir)}
    command = [str(TURNSTILE), "doctor", "--sandbox", "local", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["ok", "sandboxes", "local:"]
    names = ("users", "capabilities", "system calls", "kernel", "disk", "processes", "cpus", "memory", "journal")
    assert [name for name in names if f" {name}" not in done.stdout] == []
    assert lines[-1] == "All that was tried holds here."
    assert list(run_dir.iterdir()) == []
    assert not (tmp_path / "data").exists()
    done = subprocess.run(
        [*command, "--sandbox", "nonsense", "--json"], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "nonsense" in json.loads(done.stdout)["findings"][0]["text"]
