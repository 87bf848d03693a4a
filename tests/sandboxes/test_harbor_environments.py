"""The adapter of Harbor's environments, with a provider that fails in each way, and a network that is open.

Harbor's own docker environment is played in ``tests/cluster/test_harbor.py``.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from dialled_hosts import Relay, free_port
from echo_app import EchoApp, agents_of
from namespace_environment import NamespaceEnvironment, NamespaceKind
from sandbox_providers import SPEC

from bounded import bounded
from turnstile_server.errors import (
    Fault,
    SandboxDeath,
    SandboxFailed,
    SandboxUnavailable,
    StartupError,
    TaskFailed,
)
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.dial_out.listener import LinkAddress
from turnstile_server.sandboxes.harbor.backend import HarborBackend
from turnstile_server.sandboxes.helper_sandbox import Layout
from turnstile_server.sandboxes.protocol import Command, Mount, ProviderSetup, User
from turnstile_server.sandboxes.stream_provider import StreamProvider
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.cluster]


class PortlessBackend(HarborBackend):
    """Takes a free port in each environment: they share this machine's."""

    def _layout(self, *given: Any) -> Layout:
        return replace(super()._layout(*given), forward_port=0)


@asynccontextmanager
async def started(
    run_dir: Path, kind: NamespaceKind, *, outside: tuple[str, ...] = (), **changes: Any
) -> AsyncIterator[StreamProvider]:
    given = {"kind": "harbor:namespaces", "link_address": f"127.0.0.1:{free_port()}", "docker_python": "image"}
    setup = ProviderSetup(bounded(SandboxSettings, **{**given, **changes}), run_dir, "owner")
    provider = StreamProvider(PortlessBackend(setup, kind, outside=outside), setup)
    async with BackgroundTasks() as tasks:
        try:
            await provider.start(agents_of(EchoApp()), tasks)
            yield provider
        finally:
            await provider.close()


def left_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.rglob("*"))


async def sh(sandbox: Any, script: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))
    assert done.exit_code == 0, done
    return str(done.stdout.decode(errors="replace"))


def helper_of(environment: NamespaceEnvironment) -> int:
    [pid] = [pid for pid in environment.pids() if b"LINK" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


async def test_a_sandbox_has_its_users_its_folders_and_no_token(run_dir: Path, tmp_path: Path) -> None:
    kind, agent = NamespaceKind(), tmp_path / "agent"
    agent.mkdir(mode=0o700)
    (agent / "program").write_text("echo $0")
    (agent / "program").chmod(0o700)
    spec = replace(SPEC, mounts=(Mount(agent, "/opt/agent"),), folders=("/var/own",))
    async with started(run_dir, kind, outside=("192.0.2.1:9",)) as provider:
        assert provider.isolated
        for words in ("harbor:namespaces: network shut", "a uid for each user", "limits: none"):
            assert words in provider.description
        sandbox = await provider.create(spec)
        assert sandbox.users_apart
        assert await sh(sandbox, "/opt/agent/program; echo x >/var/own/x") == "/opt/agent/program\n"
        assert kind.asked[-1][2:] == (SPEC.limits, "127.0.0.1")
        for user in User:
            seen = await sh(
                sandbox, "cat /turnstile/* /*.tgz /proc/[0-9]*/environ 2>/dev/null; ls / /turnstile", user
            )
            assert "token" not in seen
            assert "link" not in seen.split()
        await sandbox.stop_all()
        assert await sh(sandbox, "echo on") == "on\n"
        size = await sh(sandbox, "head -c 99000000 /dev/zero >big; wc -c <big; rm big")
        assert int(size) == SPEC.limits.disk_bytes
        await sandbox.destroy()
        assert [each.stopped for each in kind.made] == [1, 1]
    assert left_in(run_dir) == []


async def test_an_open_network_stops_the_start_unless_it_is_wanted(run_dir: Path) -> None:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    reached = f"127.0.0.1:{listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)}"
    for kind in (NamespaceKind(), NamespaceKind(shuts=False)):
        with pytest.raises(StartupError, match=f"harbor:namespaces is open: a sandbox reached {reached}. Have"):
            async with started(run_dir, kind, outside=("192.0.2.1:9", reached)):
                pass
        assert left_in(run_dir) == []
    async with started(run_dir, kind, outside=(reached,), allow_unisolated=True) as provider:
        assert not provider.isolated
        assert f"network OPEN ({reached})" in provider.description
    await listener.aclose()


async def test_a_trial_that_shows_nothing_stops_the_start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnstile_server.sandboxes.reached._CONNECT", "raise OSError('no network here')")
    with pytest.raises(
        StartupError, match=r"not possible: it could not be tried .*\(exit code 1\): OSError: no net"
    ):
        async with started(run_dir, NamespaceKind()):
            pass
    monkeypatch.setattr("turnstile_server.sandboxes.reached._CONNECT", "pass")
    with pytest.raises(StartupError, match=r"does not reach 127\.0\.0\.1:\d+ a second time"):
        async with started(run_dir, NamespaceKind()):
            pass
    assert left_in(run_dir) == []


async def test_a_provider_that_fails_is_the_infrastructures_fault_and_nothing_is_left(run_dir: Path) -> None:
    kind = NamespaceKind()
    async with started(run_dir, kind) as provider:
        for what, said in (
            ("make", "takes no environment like this: ConnectionError: the provider does not make"),
            ("start", "did not start: ConnectionError: the provider does not start"),
            ("upload_file", "did not take the server's files: ConnectionError"),
            ("exec", "did not start the helper: ConnectionError"),
        ):
            kind.fails = {what}
            with pytest.raises(SandboxUnavailable, match=said) as failed:
                await provider.create(SPEC)
            assert failed.value.fault is Fault.INFRASTRUCTURE
        assert all(each.stopped == 1 for each in kind.made)
        assert list((run_dir / "harbor").glob("*/")) == []
        kind.fails = set()
        await (await provider.create(SPEC)).destroy()
    assert left_in(run_dir) == []


@pytest.mark.thorough
async def test_a_provider_that_hangs_is_not_waited_for_for_ever(run_dir: Path) -> None:
    kind = NamespaceKind()
    async with started(run_dir, kind, dial_s=1) as provider:
        kind.hangs = {"exec"}
        with pytest.raises(SandboxUnavailable, match="did not start the helper within 2 s"):
            await provider.create(SPEC)
    assert left_in(run_dir) == []


async def test_an_image_that_cannot_run_the_helper_is_the_tasks_fault(run_dir: Path) -> None:
    kind = NamespaceKind()
    async with started(run_dir, kind) as provider:
        kind.path = "/nowhere"
        with pytest.raises(
            TaskFailed, match=r"the image cannot run the helper \(exit code 127\): .*tar: not found"
        ):
            await provider.create(SPEC)
        assert [each.stopped for each in kind.made] == [1, 1]


async def test_what_ended_a_sandbox_is_told_apart(run_dir: Path) -> None:
    """A helper that was killed is charged to its agent, as in every backend; what was cut is not."""
    kind = NamespaceKind()
    async with started(run_dir, kind) as provider:
        killed, removed = await provider.create(SPEC), await provider.create(SPEC)
        one, other = kind.made[1:]
        process = await removed.start(Command(("sleep", "600")))
        os.kill(helper_of(one), signal.SIGKILL)
        assert await killed.died() is SandboxDeath.INSIDE
        os.kill(other.first, signal.SIGKILL)
        with pytest.raises(SandboxFailed, match="its environment does not answer any more") as failed:
            await process.wait()
        assert failed.value.death is SandboxDeath.OUTSIDE


async def test_a_cut_link_is_told_as_one_and_the_helper_ends(run_dir: Path) -> None:
    kind = NamespaceKind()
    async with BackgroundTasks() as tasks:
        port = free_port()
        relay = Relay(LinkAddress("127.0.0.1", port))
        await relay.run(tasks)
        # What is dialled leads to the relay, and what it leads to is the listener.
        async with started(run_dir, kind, link_address=f"127.0.0.1:{port}") as provider:
            backend = provider.backend
            assert isinstance(backend, HarborBackend)
            assert backend._listener is not None
            backend._listener.address = relay.address
            sandbox = await provider.create(SPEC)
            process = await sandbox.start(Command(("sleep", "600")))
            relay.cut()
            with pytest.raises(
                SandboxFailed, match="its link to the server was cut, and no link is made"
            ) as failed:
                await process.wait()
            assert failed.value.death is SandboxDeath.OUTSIDE
            await wait_until(lambda: len(kind.made[-1].pids()) == 1, "only its first process is left")


async def test_what_a_provider_did_not_remove_is_removed_by_the_next_start(run_dir: Path) -> None:
    kind = NamespaceKind()
    async with started(run_dir, kind) as provider:
        sandbox = await provider.create(SPEC)
        left = kind.made[-1]
        kind.fails = {"stop"}
        await sandbox.destroy()
        kind.fails = set()
    assert [path.name for path in (run_dir / "harbor").iterdir()] == [left.session]
    again = NamespaceKind()
    async with started(run_dir, again):
        assert next(each.session for each in again.made if each.stopped) == left.session
    assert left_in(run_dir) == []
    await left.stop(delete=True)


async def test_a_start_that_cannot_work_says_why(run_dir: Path) -> None:
    with pytest.raises(StartupError, match=r"harbor:namespaces needs sandboxes\.link_address: HOST:PORT"):
        async with started(run_dir, NamespaceKind(), link_address=None):
            pass
    kind = NamespaceKind()
    kind.fails = {"start"}
    with pytest.raises(StartupError, match=r"sandboxes of harbor:namespaces are not possible: .*does not start"):
        async with started(run_dir, kind):
            pass
    assert left_in(run_dir) == []
