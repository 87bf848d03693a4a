"""The local backend's own: what it asks of the machine, what it does without, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import colorsys
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import wsgiref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process
from sandbox_providers import LIMITS, SPEC, local_traces

import turnstile_server
from turnstile_server.child_processes import start_process
from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.local import bubblewrap, cgroups, orphans
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import Command, Mount, SandboxSpec
from turnstile_server.sandboxes.sockets import SandboxSockets
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

ALLOWED = SandboxSettings(kind="local", allow_unisolated=True)


@pytest.fixture
def no_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


async def test_a_task_with_an_image_is_the_tasks_fault(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    for spec in (SandboxSpec(LIMITS, image="python:3.11"), SandboxSpec(LIMITS, image_files=True)):
        with pytest.raises(TaskFailed, match=r"no images|only sandboxes with images"):
            await provider.create(spec)
    await provider.close()


async def test_without_bubblewrap_local_sandboxes_are_refused_at_start(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks, no_bwrap: None
) -> None:
    with pytest.raises(StartupError, match="there is no `bwrap`"):
        await LocalProvider(sandbox_settings, run_dir).start(agents, tasks)


@pytest.mark.slow
async def test_a_bubblewrap_that_does_not_work_is_refused_with_what_it_said(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2; exit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(StartupError, match="No permissions to create new namespace"):
        await LocalProvider(sandbox_settings, run_dir).start(agents, tasks)
    fake.write_text("#!/bin/sh\nsleep 60\n")
    slow = sandbox_settings.model_copy(update={"start_timeout_s": 0.2})
    with pytest.raises(StartupError, match="does not end"):
        await LocalProvider(slow, run_dir).start(agents, tasks)


@pytest.mark.slow
async def test_the_servers_own_folders_are_not_among_what_is_shown_of_the_host(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the server is installed for its whole Python: the shipped tasks' solutions lie below it."""
    package = Path(turnstile_server.__file__).parent
    monkeypatch.setattr(bubblewrap, "_SYSTEM_FOLDERS", (*bubblewrap._SYSTEM_FOLDERS, str(package.parent)))
    folder, file = Path(wsgiref.__file__).parent, Path(colorsys.__file__)
    provider = LocalProvider(sandbox_settings, run_dir, as_root=False, hidden=(folder, file, run_dir / "none"))
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    script = (
        f"ls {package.parent}; echo ==; ls -A {package}; cat {file}; ls -A {folder}; touch {folder}/x || echo kept"
    )
    result = await sandbox.exec(Command(("sh", "-c", script)))
    await provider.close()
    beside, _, inside = result.stdout.decode().partition("==\n")
    if not package.is_relative_to("/tmp"):  # there the sandbox's own /tmp hides all of a checkout
        assert package.name in beside
    assert inside == "kept\n", result


def test_of_a_python_in_somebodys_home_the_python_alone_is_mounted() -> None:
    """As after ``./configure --prefix=$HOME``: all that the user has there would be readable inside."""
    python = bubblewrap.HostPython("/home/me/bin/python3", "/home/me")
    frame = bubblewrap.SandboxFrame("bwrap", python, privileged=True, agent_uid=1)
    words = bubblewrap.wrap(frame, Path("/etc-made"), SPEC, (), ["true"])
    mounted = {word for option, word in pairwise(words) if "bind" in option and word.startswith("/home")}
    assert "/home/me/bin" in mounted
    assert "/home/me/lib" in mounted
    assert not {"/home", "/home/me", "/home/me/share"} & mounted


@pytest.fixture
def other_prefix() -> Iterator[bubblewrap.HostPython]:
    """The same Python in a folder with something else beside it."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as prefix:
        for part in ("bin", "lib"):
            Path(prefix, part).symlink_to(Path(sys.base_prefix, part))
        Path(prefix, "secret").write_text("a secret")
        Path(prefix).chmod(0o755)
        yield bubblewrap.HostPython(f"{prefix}/bin/{Path(os.path.realpath(sys.executable)).name}", prefix)


@pytest.mark.slow
async def test_a_python_works_without_the_rest_of_its_prefix(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    other_prefix: bubblewrap.HostPython,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    monkeypatch.setattr(provider, "_python", other_prefix)
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    prefix = other_prefix.prefix
    program = f"import os, sys; print(sys.prefix == {prefix!r}, *sorted(os.listdir({prefix!r})))"
    said = await sandbox.exec(Command(("python3", "-c", program)))
    await provider.close()
    assert said.stdout.decode().split() == ["True", "bin", "lib", "share"], said


async def test_without_isolation_it_works_and_says_so(
    run_dir: Path, agents: AgentEndpoint, tasks: BackgroundTasks, no_bwrap: None, caplog: pytest.LogCaptureFixture
) -> None:
    provider = LocalProvider(ALLOWED, run_dir)
    with caplog.at_level(logging.WARNING):
        await SandboxPool(provider, ALLOWED).start(agents, tasks)
    assert not provider.isolated
    assert "sandboxes: local: NO ISOLATION" in caplog.text
    assert "there is no `bwrap`" in caplog.text
    sandbox = await provider.create(SPEC)
    assert Path(sandbox.workdir).is_relative_to(run_dir)
    await sandbox.write(f"{sandbox.workdir}/file", b"text")
    result = await sandbox.exec(Command(("sh", "-c", "cat file; echo $HOME $TMPDIR; touch $TMPDIR/x $HOME/x")))
    assert result.stdout.startswith(b"text")
    assert result.stdout.count(bytes(run_dir)) == 2
    sandbox.admit("one")
    assert sandbox.agent_url is not None
    fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
    answer = await sandbox.exec(Command(("python3", "-c", fetch, f"{sandbox.agent_url}/e/one/mcp")))
    assert answer.stdout == b"GET /e/one/mcp 0\n"
    await provider.close()
    assert os.listdir(run_dir) == []


async def test_without_isolation_what_was_left_behind_is_found_and_killed(
    run_dir: Path, agents: AgentEndpoint, tasks: BackgroundTasks, no_bwrap: None
) -> None:
    provider = LocalProvider(ALLOWED, run_dir)
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    neighbour = await provider.create(SPEC)
    word = f"6{os.getpid()}.25"
    script = f"setsid sleep {word} </dev/null >/dev/null 2>&1 & (sleep {word} & ) >/dev/null 2>&1"
    for owner in (sandbox, neighbour):
        await owner.exec(Command(("sh", "-c", script)))
    await wait_until(lambda: running(word) == 4)
    await sandbox.stop_all()
    assert running(word) == 2
    # Killed from outside, the helper can end nothing any more.
    (pid, _) = (run_dir / f"{neighbour.sandbox_id}.pid").read_text().split()
    os.kill(int(pid), signal.SIGKILL)
    await neighbour.lost.wait()
    await neighbour.destroy()
    await wait_until(lambda: running(word) == 0)
    await provider.close()


def running(word: str) -> int:
    return sum(word.encode() in words.split(b"\0") for words in command_lines())


def command_lines() -> list[bytes]:
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit():
                found.append((process / "cmdline").read_bytes())
    return found


async def test_without_isolation_a_folder_can_only_be_where_it_is(
    run_dir: Path, agents: AgentEndpoint, tasks: BackgroundTasks, no_bwrap: None, tmp_path: Path
) -> None:
    provider = LocalProvider(ALLOWED, run_dir)
    await provider.start(agents, tasks)
    with pytest.raises(TaskFailed, match="the host's own paths"):
        await provider.create(SandboxSpec(LIMITS, mounts=(Mount(tmp_path, "/opt/agents"),)))
    await provider.create(SandboxSpec(LIMITS, mounts=(Mount(tmp_path, str(tmp_path)),)))
    await provider.close()


async def test_a_mount_that_is_not_there_is_named(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks, tmp_path: Path
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    with pytest.raises(SandboxUnavailable, match="gone"):
        await provider.create(SandboxSpec(LIMITS, mounts=(Mount(tmp_path / "gone", "/opt/agents"),)))
    await provider.close()


async def test_a_sandbox_that_cannot_start_says_why_at_once_and_leaves_nothing(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    with pytest.raises(SandboxUnavailable, match=r"bwrap: .*|ended before it was ready"):
        await provider.create(SandboxSpec(LIMITS, workdir="/usr/share/work"))
    assert local_traces("sb-", run_dir) == []
    await provider.close()


@pytest.mark.slow
async def test_a_helper_that_never_calls_is_given_up_in_its_time_and_leaves_nothing(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    impatient = sandbox_settings.model_copy(update={"start_timeout_s": 0.5})
    monkeypatch.setattr(provider, "_settings", impatient)
    monkeypatch.setattr(bubblewrap, "HELPER_FLAGS", ("-c", "import time; time.sleep(60)"))
    with pytest.raises(SandboxUnavailable, match=r"did not call within 0\.5 s"):
        await provider.create(SPEC)
    assert local_traces("sb-", run_dir) == []
    await provider.close()


async def test_creating_after_close_is_refused(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    with pytest.raises(SandboxUnavailable):
        await provider.create(SPEC)
    await provider.start(agents, tasks)
    await provider.close()
    with pytest.raises(SandboxUnavailable):
        await provider.create(SPEC)


async def test_the_token_is_in_no_command_line(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    assert isinstance(sandbox._link, SandboxSockets)
    token = sandbox._link.token.encode()
    assert not any(token in words for words in command_lines())
    inside = await sandbox.exec(Command(("sh", "-c", "cat /proc/*/environ /proc/*/cmdline 2>/dev/null")))
    assert token not in inside.stdout
    await provider.close()


async def test_nothing_but_its_own_is_swept(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    (run_dir / "notes").mkdir()
    (run_dir / "notes" / "kept").touch()
    (run_dir / "sb-0123456789ab").mkdir()
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    await provider.close()
    assert os.listdir(run_dir) == ["notes"]
    assert (run_dir / "notes" / "kept").exists()


@pytest.mark.slow
async def test_a_run_folder_has_one_server_at_a_time(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    first, second = (LocalProvider(sandbox_settings, run_dir) for _ in range(2))
    await first.start(agents, tasks)
    sandbox = await first.create(SPEC)
    with pytest.raises(StartupError, match="another server"):
        await second.start(agents, tasks)
    await second.close()
    assert (await sandbox.exec(Command(("true",)))).exit_code == 0
    await first.close()
    await second.start(agents, tasks)
    await second.close()


async def test_a_run_folder_of_another_user_is_refused(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    folder = run_dir if os.geteuid() == 0 else Path("/usr")
    if folder == run_dir:
        os.chown(folder, 65534, 65534)
    with pytest.raises(StartupError, match="belongs to uid"):
        await LocalProvider(sandbox_settings, folder).start(agents, tasks)


async def test_a_run_folder_that_cannot_be_used_is_named(
    sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match="run_dir"):
        await LocalProvider(sandbox_settings, tmp_path / "file").start(agents, tasks)


async def start_server(run_dir: Path, kind: str) -> tuple[asyncio.subprocess.Process, str]:
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("local_server.py")),
        str(run_dir),
        kind,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    return server, (await server.stdout.readline()).decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["isolated", "unisolated"])
async def test_a_killed_server_leaves_no_sandbox_running(run_dir: Path, kind: str) -> None:
    server, sandbox_id = await start_server(run_dir, kind)
    assert sandbox_id.startswith("sb-")
    await wait_until(lambda: len(marked(run_dir)) >= 2)  # a process bears its mark only once it has been executed
    server.kill()
    await server.wait()
    await wait_until(lambda: marked(run_dir) == [])


def marked(run_dir: Path) -> list[bytes]:
    return [words for words in command_lines() if f"sandbox-of-{run_dir.name}".encode() in words]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["isolated", "unisolated"])
async def test_the_next_start_sweeps_what_a_killed_server_left(
    run_dir: Path, kind: str, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    server, sandbox_id = await start_server(run_dir, kind)
    (pid, _) = (run_dir / f"{sandbox_id}.pid").read_text().split()
    # A helper that is stopped does not notice that its server is gone.
    os.kill(int(pid), signal.SIGSTOP)
    server.kill()
    await server.wait()
    assert (run_dir / sandbox_id).exists()
    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    await wait_until(lambda: marked(run_dir) == [] and local_traces(sandbox_id, run_dir) == [])
    await provider.close()


def test_a_record_of_a_pid_that_is_another_process_by_now_kills_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record = tmp_path / "x.pid"
        record.write_text(f"{process.pid} 12345\n")
        orphans.kill_recorded(record)
        for nonsense in ("", "-1 gone", "0 gone", "1 gone", "word"):
            (tmp_path / "y.pid").write_text(nonsense)
            orphans.kill_recorded(tmp_path / "y.pid")
        assert process.poll() is None
        orphans.write_record(record, process.pid)
        orphans.kill_recorded(record)
        assert process.wait() == -signal.SIGKILL


FORKER = """
import subprocess, sys, time
for _ in range(400):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
"""


@pytest.mark.slow
def test_processes_that_are_made_while_the_marked_ones_are_killed_are_killed_too(run_dir: Path) -> None:
    name = f"sb-{run_dir.name}"
    environment = {**os.environ, orphans.MARK_VARIABLE: name}
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", FORKER], env=environment) as forker:
            while len(of_mark(name)) < 20:
                time.sleep(0.001)
            orphans.kill_marked(name)
            forker.wait()
            assert of_mark(name) == []


@pytest.mark.slow
def test_a_marked_process_that_does_not_go_is_told_in_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, orphans.MARK_VARIABLE: f"sb-{run_dir.name}"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        with monkeypatch.context() as stuck:
            stuck.setattr(orphans.os, "kill", lambda pid, number: None)
            assert not orphans.kill_marked(f"sb-{run_dir.name}")
        assert process.poll() is None
        process.kill()


def of_mark(name: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and name.encode() in (process / "environ").read_bytes():
                found.append(process.name)
    return found


async def test_without_control_groups_each_process_is_bounded(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", run_dir / "no-control-groups")
    provider = LocalProvider(sandbox_settings, run_dir, as_root=False)
    await provider.start(agents, tasks)
    assert "no control group" in provider.description
    sandbox = await provider.create(SPEC)
    grab = f"x = bytearray({LIMITS.memory_bytes * 2})"
    result = await sandbox.exec(Command(("python3", "-c", grab)))
    assert b"MemoryError" in result.stderr
    limits = (await sandbox.exec(Command(("sh", "-c", "ulimit -c; ulimit -f")))).stdout.split()
    assert [int(limit) for limit in limits] == [0, LIMITS.disk_bytes // 512]
    await provider.close()


def test_control_groups_of_version_2_are_written_as_the_kernel_reads_them(tmp_path: Path) -> None:
    group = cgroups.Cgroups((tmp_path,), 2, "turnstile-x-").make("one", LIMITS)
    (folder,) = group.folders
    written = {file.name: file.read_text() for file in folder.iterdir()}
    assert written == {
        "memory.max": str(LIMITS.memory_bytes),
        "pids.max": str(LIMITS.pids),
        "cpu.max": "100000 100000",
    }


def test_where_no_control_group_can_be_made_there_are_none(tmp_path: Path) -> None:
    assert cgroups.find("turnstile-x-", tmp_path) is None


async def test_code_inside_can_make_no_user_name_space_of_its_own(
    run_dir: Path, sandbox_settings: SandboxSettings, agents: AgentEndpoint, tasks: BackgroundTasks
) -> None:
    """In one it would have every capability, and with them much of the kernel."""
    provider = LocalProvider(sandbox_settings, run_dir, as_root=False)
    await provider.start(agents, tasks)
    try:
        sandbox = await provider.create(SPEC)
        code = "import ctypes as c; print(c.CDLL(None, use_errno=True).unshare(0x10000000), c.get_errno())"
        result = await sandbox.exec(Command(("python3", "-c", code)))
        assert result.stdout == b"-1 1\n", result  # EPERM, of the filter
    finally:
        await provider.close()


async def test_a_creation_that_is_cancelled_before_its_process_was_started_leaves_nothing(
    run_dir: Path,
    sandbox_settings: SandboxSettings,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def late(*arguments: Any, **options: Any) -> Process:
        begun.set()
        await go.wait()
        return await start_process(*arguments, **options)

    provider = LocalProvider(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    monkeypatch.setattr("turnstile_server.sandboxes.local.process.start_process", late)
    creating = asyncio.create_task(provider.create(SPEC))
    await begun.wait()
    creating.cancel()
    await anyio.wait_all_tasks_blocked()  # its caller has gone
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await provider.close()
    assert local_traces("sb-", run_dir) == []
