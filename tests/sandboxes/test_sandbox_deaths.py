"""What ended a sandbox is told, on every backend: its memory, something outside, or else something inside."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest
from sandbox_providers import SPEC, Backend, children

from turnstile.models import Fault
from turnstile_server.errors import SandboxDeath, SandboxFailed, error_of_type
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.inspected import ContainerState, Image
from turnstile_server.sandboxes.docker.launch import Launcher, NewSandbox
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper.turnstile_helper.frames import CONNECTION_LOST
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.local import cgroups, machine_kills
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.protocol import Command, SandboxProvider, User
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def test_a_kill_from_outside_is_told_and_open_commands_know_it(
    sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    process = await sandbox.start(Command(("sleep", "600")))
    await sandbox.exec(Command(("true",)))
    backend.kill_helper(sandbox, run_dir)
    assert await sandbox.died() is SandboxDeath.OUTSIDE
    with pytest.raises(SandboxFailed) as waiting:
        await process.wait()
    with pytest.raises(SandboxFailed) as later:
        await sandbox.exec(Command(("true",)))
    assert waiting.value.death is later.value.death is SandboxDeath.OUTSIDE


async def test_a_cut_connection_came_from_outside(sandbox: HelperSandbox) -> None:
    await sandbox._client._stream.aclose()
    assert await sandbox.died() is SandboxDeath.OUTSIDE


async def test_a_sandbox_that_the_server_destroys_ended_from_outside(sandbox: HelperSandbox) -> None:
    process = await sandbox.start(Command(("sleep", "600")))
    await sandbox.destroy()
    with pytest.raises(SandboxFailed) as waiting:
        await process.wait()
    assert waiting.value.death is SandboxDeath.OUTSIDE


_HIDDEN_MEMORY = r"""
import os, sys
for name in ("oom_score_adj", "oom_adj"):
    try:
        with open(f"/proc/self/{name}", "w", buffering=1) as score:
            score.write("0")
        print("chosen last by", name, flush=True)
    except OSError as error:
        print("refused", flush=True)
# No process has these pages mapped, so the kernel counts them to none when it chooses which to kill.
chunk = bytes(8 << 20)
for _ in range(64):
    os.write(os.memfd_create("held"), chunk)
print("DONE")
"""


def choose_first(helper: int) -> None:
    Path(f"/proc/{helper}/oom_score_adj").write_text("1000")


def say(count: Path, kills: int) -> None:
    count.write_text(f"nr_free_pages 1\noom_kill {kills}\n")


def needs_memory_limit(provider: SandboxProvider) -> None:
    """These programs take twice what a sandbox may have."""
    assert isinstance(provider, LocalProvider)
    if provider._cgroups is None:
        pytest.skip("no control group can be made here")


@pytest.mark.slow
@pytest.mark.parametrize("user", [User.AGENT, User.WORK])
async def test_a_command_cannot_have_the_helper_killed_for_the_memory_that_it_took(
    provider: SandboxProvider, sandbox: HelperSandbox, backend: Backend, user: User
) -> None:
    if "docker" in backend.name:
        # Its /proc can be written, so the command can be the last to be killed: it has ended its own sandbox.
        with pytest.raises(SandboxFailed) as failed:
            await sandbox.exec(Command(("python3", "-c", _HIDDEN_MEMORY), user=user, timeout_s=60))
        assert failed.value.death is SandboxDeath.MEMORY
        return
    needs_memory_limit(provider)
    result = await sandbox.exec(Command(("python3", "-c", _HIDDEN_MEMORY), user=user, timeout_s=60))
    assert result.stdout.split() == [b"refused", b"refused"], result
    assert result.exit_code == 137 or b"No space left" in result.stderr or b"Cannot allocate" in result.stderr
    after = await sandbox.exec(Command(("echo", "well")))
    assert after.stdout == b"well\n"


class TestLocally:
    @pytest.fixture
    def sandbox_settings(self) -> SandboxSettings:
        return SandboxSettings(kind="local", call_timeout_s=1.0)

    @pytest.fixture(params=[False], ids=["local"])
    def backend(self) -> Backend:
        return Backend("local", LocalProvider, True, lambda *_: None, lambda *_: [])

    @pytest.mark.slow
    async def test_a_helper_that_the_kernel_chose_when_memory_ran_out_is_known_by_that(
        self, provider: SandboxProvider, run_dir: Path
    ) -> None:
        needs_memory_limit(provider)
        sandbox = await provider.create(SPEC)
        (bwrap,) = [int(word) for word in (run_dir / f"{sandbox.sandbox_id}.pid").read_text().split()[:1]]
        (helper,) = children(bwrap)
        choose_first(helper)
        with pytest.raises(SandboxFailed) as failed:
            await sandbox.exec(Command(("python3", "-c", _HIDDEN_MEMORY), timeout_s=60))
        assert failed.value.death is SandboxDeath.MEMORY

    @pytest.mark.slow
    async def test_a_helper_that_is_stopped_was_stopped_from_outside(
        self, provider: SandboxProvider, run_dir: Path
    ) -> None:
        sandbox = await provider.create(SPEC)
        (bwrap,) = [int(word) for word in (run_dir / f"{sandbox.sandbox_id}.pid").read_text().split()[:1]]
        (helper,) = children(bwrap)
        if os.geteuid() != 0:  # where there are compartments the helper is the child of another (helper_depth)
            (helper,) = children(helper)
        os.kill(helper, signal.SIGSTOP)
        with pytest.raises(SandboxFailed) as failed:
            await sandbox.exec(Command(("true",), timeout_s=0.1))
        assert failed.value.death is SandboxDeath.OUTSIDE


@pytest.mark.parametrize(
    ("file", "text", "killed"),
    [
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n", True),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 1\noom_kill 0\n", False),
        ("memory.events", "low 0\nhigh 0\nmax 31\noom 1\noom_kill 1\noom_group_kill 0\n", True),
        ("memory.events", "low 0\nhigh 0\nmax 31\noom 1\noom_kill 0\noom_group_kill 0\n", False),
        ("pids.events", "max 9\n", False),
    ],
)
def test_a_control_group_shows_what_the_kernel_killed(tmp_path: Path, file: str, text: str, killed: bool) -> None:
    (tmp_path / file).write_text(text)
    assert cgroups.ControlGroup((tmp_path,)).killed_for_memory() is killed


class TestWithoutControlGroups:
    """The kernel's count of the whole machine says that somebody was killed for memory, not who."""

    @pytest.fixture
    def count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        file = tmp_path / "vmstat"
        say(file, 3)
        monkeypatch.setattr(machine_kills, "VMSTAT", file)
        return file

    async def test_a_rise_is_lately_for_a_while_and_then_a_neighbours(self, count: Path) -> None:
        now = 100.0
        kills = machine_kills.MachineKills(clock=lambda: now)
        assert not kills.rose_lately()
        say(count, 4)
        assert kills.rose_lately()
        now += machine_kills.LATELY_S - 0.1
        assert kills.rose_lately()
        now += 0.2
        assert not kills.rose_lately()

    async def test_a_rise_that_was_seen_long_before_the_death_is_a_neighbours(
        self, count: Path, tasks: BackgroundTasks
    ) -> None:
        now = 100.0
        kills = machine_kills.MachineKills(clock=lambda: now)
        watching = tasks.start(kills.watch, name="watch")
        say(count, 4)
        await wait_until(lambda: kills.seen == 4)
        now += 60.0
        assert not kills.rose_lately()
        watching.cancel()

    @pytest.mark.slow
    @pytest.mark.parametrize("as_root", [True, False] if os.geteuid() == 0 else [False])
    @pytest.mark.parametrize("when", ["before", "now"])
    async def test_a_kill_from_outside_is_the_kernels_only_where_it_killed_somebody_just_then(
        self,
        count: Path,
        as_root: bool,
        when: str,
        run_dir: Path,
        agents: AgentEndpoint,
        tasks: BackgroundTasks,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cgroups, "find", lambda _: None)
        monkeypatch.setattr(machine_kills, "LATELY_S", 0.0 if when == "before" else 600.0)
        provider = LocalProvider(SandboxSettings(kind="local"), run_dir, as_root=as_root)
        await provider.start(agents, tasks)
        try:
            sandbox = await provider.create(SPEC)
            say(count, 4)
            if when == "before":
                await wait_until(lambda: provider._kills.seen == 4)
            (bwrap,) = [int(word) for word in (run_dir / f"{sandbox.sandbox_id}.pid").read_text().split()[:1]]
            (helper,) = children(bwrap)
            os.kill(helper, signal.SIGKILL)
            assert await sandbox.died() is (SandboxDeath.OUTSIDE if when == "before" else SandboxDeath.MEMORY)
        finally:
            await provider.close()


@pytest.mark.parametrize(
    ("state", "death"),
    [
        (ContainerState(False, False, 137, True, ""), SandboxDeath.MEMORY),
        (ContainerState(False, False, 137, False, ""), SandboxDeath.OUTSIDE),
        (ContainerState(False, False, CONNECTION_LOST, False, ""), SandboxDeath.OUTSIDE),
        (ContainerState(False, False, 1, False, ""), SandboxDeath.INSIDE),
        (ContainerState(True, True, 0, False, ""), SandboxDeath.OUTSIDE),
        (ContainerState(True, False, 0, False, ""), SandboxDeath.INSIDE),
    ],
)
def test_a_container_shows_what_ended_it(state: ContainerState, death: SandboxDeath) -> None:
    assert state.death is death


class _Engine:
    """Knows one container, whose helper has said something."""

    def __init__(self, state: ContainerState | None) -> None:
        self._state = state

    async def state(self, _container: str) -> ContainerState | None:
        return self._state

    async def log(self, _container: str) -> str:
        return "no module"


@pytest.mark.parametrize(
    ("state", "fault", "said"),
    [
        (ContainerState(True, False, 0, False, ""), None, ""),
        (ContainerState(False, False, 1, False, ""), Fault.TASK, "exit code 1): no module"),
        (ContainerState(False, False, 137, True, ""), Fault.TASK, "exit code 137"),
        (ContainerState(False, False, 137, False, ""), Fault.INFRASTRUCTURE, "from outside"),
        (None, Fault.INFRASTRUCTURE, "removed from outside"),
    ],
)
async def test_a_container_that_is_killed_before_its_helper_called_is_not_its_image_s_fault(
    state: ContainerState | None, fault: Fault | None, said: str
) -> None:
    image = Image("sha256:1", (), "/bin", "amd64")
    new = NewSandbox(SPEC, image, "task:1", "box", {}, {}, None)
    launcher = Launcher(cast("Any", _Engine(state)), cast("Any", None), SandboxSettings())
    ended = await launcher.early_end(new)
    assert (ended.fault if ended is not None else None) is fault
    assert ended is None or (said in ended.message and "task:1" in ended.message)


def test_a_record_of_the_error_keeps_what_ended_the_sandbox() -> None:
    failed = SandboxFailed.of(SandboxDeath.MEMORY, "the sandbox ended")
    restored = error_of_type(failed.type, failed.message, detail=failed.detail)
    assert isinstance(restored, SandboxFailed)
    assert restored.death is SandboxDeath.MEMORY
    assert SandboxFailed("nobody said").death is SandboxDeath.INSIDE
