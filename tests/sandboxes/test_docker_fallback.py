"""Sandboxes of images without Python: the same contract by the engine's exec, as far as it goes."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from docker_support import bare_image, container_of, containers_of, docker_provider
from echo_app import EchoApp, agents_of
from sandbox_providers import LIMITS, SPEC

from turnstile_server.errors import FileProblem, SandboxFailed, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.fallback import ExecSandbox
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, User
from turnstile_server.settings import SandboxSettings, Settings
from turnstile_server.testing.doctor import check_agent

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

_SECONDS = "5473"


@pytest.fixture
async def bare_provider(
    sandbox_settings: SandboxSettings, run_dir: Path, tasks: BackgroundTasks
) -> AsyncIterator[DockerProvider]:
    provider = docker_provider(sandbox_settings, run_dir, bare_image())
    try:
        await provider.start(agents_of(EchoApp()), tasks)
        yield provider
    finally:
        await provider.close()


@pytest.fixture
async def bare(bare_provider: DockerProvider) -> Sandbox:
    made = await bare_provider.create(SPEC)
    assert isinstance(made, ExecSandbox)
    assert made.agent_url is None
    made.admit("ep_one")
    return made


@pytest.mark.parametrize("agent", ["plain-loop", "tool-loop"])
async def test_the_doctor_names_an_image_in_which_no_agent_can_run(tiny_model: Path, agent: str) -> None:
    settings = Settings(
        model=tiny_model, sandboxes={"kind": "docker", "docker_image": bare_image(), "docker_python": "image"}
    )
    with pytest.raises(StartupError, match=f"image {bare_image()} cannot run the sandbox helper"):
        await check_agent(settings, agent, wall_s=60)


async def test_a_command_can_open_only_so_many_files(bare: Sandbox, sandbox_settings: SandboxSettings) -> None:
    said = await sh(bare, "ulimit -Hn; ulimit -n 1000000 2> /dev/null && echo raised")
    assert said.stdout.decode().split() == [str(sandbox_settings.open_files)]


async def sh(sandbox: Sandbox, script: str, *, user: User = User.AGENT) -> ExecResult:
    return await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=60))


async def sleepers(sandbox: Sandbox) -> int:
    """Those that live: whoever is killed here may stay as a zombie for a moment."""
    listed = (await sh(sandbox, "ps -o stat,args")).stdout.decode().splitlines()
    return sum(line.split()[1:] == ["sleep", _SECONDS] and "Z" not in line.split()[0] for line in listed)


async def test_a_command_says_its_exit_code_and_both_outputs(bare: Sandbox) -> None:
    result = await sh(bare, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.timed_out, result.dropped_bytes) == (False, 0)


async def test_a_command_runs_in_the_work_folder_with_an_environment_made_from_nothing(bare: Sandbox) -> None:
    result = await bare.exec(Command(("env",), env={"MINE": "a b"}))
    names = {line.split(b"=")[0] for line in result.stdout.splitlines()}
    assert names == {b"PATH", b"HOME", b"LANG", b"TMPDIR", b"MINE"}
    assert b"MINE=a b\n" in result.stdout
    assert (await sh(bare, "pwd")).stdout == b"/workspace\n"
    assert (await bare.exec(Command(("pwd",), cwd="/tmp"))).stdout == b"/tmp\n"


async def test_the_users_differ_and_have_homes_of_their_own(bare: Sandbox) -> None:
    said = [(await sh(bare, 'id -u; cd "$HOME" && touch mine', user=user)).stdout for user in User]
    assert len({int(uid) for uid in said}) == len(User)
    assert (await sh(bare, "ls /home/tests")).exit_code != 0


async def test_what_cannot_be_run_is_an_exit_code_with_the_reason(bare: Sandbox) -> None:
    for argv, cwd, code in (
        (("not-a-program",), None, 127),
        (("/etc",), None, 126),
        (("true",), "/not/there", 126),
    ):
        result = await bare.exec(Command(argv, cwd=cwd))
        assert (result.exit_code, result.stdout) == (code, b""), result
        assert result.stderr


async def test_input_and_output_of_any_bytes_pass_whole_and_more_is_cut_in_the_middle(bare: Sandbox) -> None:
    data = bytes(range(256)) * 4096
    assert (await bare.exec(Command(("cat",), stdin=data, max_output_bytes=1 << 20))).stdout == data
    cut = await bare.exec(Command(("cat",), stdin=data, max_output_bytes=1000))
    assert (cut.stdout, cut.dropped_bytes) == (data[:500] + data[-500:], len(data) - 1000)
    assert (await bare.exec(Command(("true",), stdin=data))).exit_code == 0


async def test_after_its_time_a_command_is_killed_inside_with_its_group(bare: Sandbox) -> None:
    script = f"sleep {_SECONDS} & (trap '' TERM; sleep {_SECONDS}) & echo begun; wait"
    result = await bare.exec(Command(("sh", "-c", script), timeout_s=0.5))
    assert (result.exit_code, result.timed_out, result.stdout) == (137, True, b"begun\n")
    assert await sleepers(bare) == 0


async def test_a_child_with_redirected_output_runs_on_until_stop_all(bare: Sandbox) -> None:
    result = await sh(bare, f"sleep {_SECONDS} > /dev/null 2>&1 < /dev/null & echo done")
    assert result.stdout == b"done\n"
    assert await sleepers(bare) == 1
    await bare.stop_all()
    assert await sleepers(bare) == 0


async def test_cancelling_a_command_kills_it(bare: Sandbox) -> None:
    running = asyncio.create_task(bare.exec(Command(("sleep", _SECONDS))))
    while await sleepers(bare) == 0:
        pass
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    while await sleepers(bare):
        pass


async def test_a_started_command_gives_every_waiter_the_same_end_and_can_be_killed(bare: Sandbox) -> None:
    process = await bare.start(Command(("sh", "-c", "cat; exit 5"), stdin=b"in"))
    first, second = await asyncio.gather(process.wait(), process.wait())
    assert first == second
    assert (first.exit_code, first.stdout) == (5, b"in")
    process = await bare.start(Command(("sleep", _SECONDS)))
    await process.kill()
    killed = await process.wait()
    assert (killed.exit_code, killed.timed_out) == (137, False)
    await process.kill()


async def test_stop_all_ends_daemons_too_and_the_sandbox_works_on(bare: Sandbox) -> None:
    await sh(
        bare,
        f"setsid sleep {_SECONDS} </dev/null >/dev/null 2>&1 & while ! ps | grep -q '{_SECONDS}$'; do :; done",
    )
    for _ in range(5):  # each is stopped as soon as it is started
        running = await bare.start(Command(("sleep", _SECONDS)))
        await bare.stop_all()
        assert (await running.wait()).exit_code == 137
        assert await sleepers(bare) == 0
    assert (await sh(bare, "echo well")).stdout == b"well\n"


async def test_what_is_left_to_the_first_process_is_reaped(bare_provider: DockerProvider) -> None:
    few = await bare_provider.create(replace(SPEC, limits=replace(LIMITS, pids=24)))
    for _ in range(4):
        await sh(few, "for i in 1 2 3 4 5 6 7 8; do (setsid true &) ; done; sleep 0.2")
    assert (await sh(few, "echo well")).stdout == b"well\n"
    assert b" Z" not in (await sh(few, "ps -o stat,args")).stdout


async def test_files_are_written_whole_and_read_back_within_their_bound(bare: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    await bare.write("/workspace/a/b/file", data)
    assert await bare.read("/workspace/a/b/file", len(data)) == data
    assert (await sh(bare, "stat -c %a a/b/file; ls -A a/b")).stdout == b"644\nfile\n"
    await bare.write("/workspace/a/b/file", b"#!", mode=0o755)
    await bare.write("/workspace/a/b/file", b"")
    assert (await sh(bare, "stat -c '%a %s' a/b/file")).stdout == b"755 0\n"
    await bare.write("/workspace/-odd 'name'", b"x")
    assert await bare.read("/workspace/-odd 'name'", 1) == b"x"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/workspace/none", "no such file"),
        ("/workspace", "folder"),
        ("/workspace/pipe", "not a regular file"),
        ("/workspace/big", "more than the 100 bytes"),
        ("/workspace/secret", "denied"),
        ("relative", "not an absolute path"),
    ],
)
async def test_a_file_that_cannot_be_read_is_a_problem_that_says_why(bare: Sandbox, path: str, why: str) -> None:
    await sh(bare, "mkfifo pipe; head -c 101 /dev/zero > big; touch secret; chmod 0 secret")
    with pytest.raises(FileProblem, match=why):
        await bare.read(path, 100)


@pytest.mark.parametrize("path", ["/etc/file", "/workspace", "/home/tests/file"])
async def test_a_file_that_cannot_be_written_is_a_problem(bare: Sandbox, path: str) -> None:
    with pytest.raises(FileProblem):
        await bare.write(path, b"x")


async def test_a_folder_comes_out_and_goes_in_as_it_was_but_for_what_is_no_file(bare: Sandbox) -> None:
    await sh(bare, "mkdir -p d/e; echo one > d/one; ln -s /etc/passwd d/e/link; echo x > d/run; chmod 755 d/run")
    packed = await bare.download("/workspace/d", 1 << 20)
    await bare.upload(packed, "/workspace/copy")
    seen = await sh(bare, "cd copy && cat one && readlink e/link && stat -c %a run && find . -type f | wc -l")
    assert seen.stdout == b"one\n/etc/passwd\n755\n2\n"
    with pytest.raises(FileProblem, match="more than"):
        await bare.download("/workspace/d", 1024)
    with pytest.raises(FileProblem, match="not a directory"):
        await bare.download("/workspace/none", 1024)


def tar_of(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type = kind
        archive.addfile(member)
    return made.getvalue()


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        (tar_of("/etc/x"), "an absolute path"),
        (tar_of("a/../../x"), "leads out with"),
        (tar_of("dev", tarfile.CHRTYPE), "dev: a device"),
        (tar_of("pipe", tarfile.FIFOTYPE), "pipe: a device or a pipe"),
        (b"no tar" * 100, "not a whole tar"),
    ],
)
async def test_an_archive_that_leads_out_is_refused_and_nothing_is_made(
    bare: Sandbox, archive: bytes, why: str
) -> None:
    with pytest.raises(FileProblem, match=why):
        await bare.upload(archive, "/workspace/in")
    assert (await sh(bare, "ls -A . /tmp")).stdout == b".:\n\n/tmp:\n"


async def test_an_archive_that_leads_out_through_its_own_link_makes_nothing_there(bare: Sandbox) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/tmp"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("link/planted"))
    with pytest.raises(FileProblem):
        await bare.upload(made.getvalue(), "/workspace/in")
    assert (await sh(bare, "ls -A /tmp")).stdout == b""


async def test_destroy_ends_running_commands_as_failed_and_leaves_nothing(bare: Sandbox, run_dir: Path) -> None:
    process = await bare.start(Command(("sleep", _SECONDS)))
    waiting = asyncio.create_task(bare.exec(Command(("sleep", _SECONDS))))
    await asyncio.sleep(0.2)  # mostly enough for both to run; they fail all the same where it is not
    await asyncio.gather(bare.destroy(), bare.destroy())
    for ended in (process.wait(), waiting, sh(bare, "true")):
        with pytest.raises(SandboxFailed):
            await ended
    assert containers_of(run_dir.name) == []


async def test_a_container_that_dies_under_a_command_fails_it(bare: Sandbox) -> None:
    process = await bare.start(Command(("sleep", _SECONDS)))
    container_of(bare.sandbox_id).kill()
    with pytest.raises(SandboxFailed):
        await process.wait()
    with pytest.raises(SandboxFailed):
        await bare.stop_all()
    async with asyncio.timeout(60):
        await bare.died()


async def test_a_container_that_died_between_commands_is_found_by_the_next(bare: Sandbox) -> None:
    container_of(bare.sandbox_id).kill()
    with pytest.raises(SandboxFailed):
        await sh(bare, "true")
    async with asyncio.timeout(60):
        await bare.died()


async def test_no_network_and_the_same_limits_hold(bare: Sandbox) -> None:
    host = container_of(bare.sandbox_id).attrs["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert (host["Memory"], host["PidsLimit"], host["ReadonlyRootfs"]) == (LIMITS.memory_bytes, LIMITS.pids, True)
    status = (await sh(bare, "grep -E 'CapEff|NoNewPrivs' /proc/self/status")).stdout.split()
    assert (int(status[1], 16), status[3]) == (0, b"1")


async def test_the_files_of_an_image_are_the_agents_to_change(bare_provider: DockerProvider) -> None:
    sandbox = await bare_provider.create(replace(SPEC, workdir="/bin", image_files=True))
    uids = (await sh(sandbox, "echo x > /bin/mine && stat -c %u /bin /bin/mine; id -u")).stdout.split()
    assert len(set(uids)) == 1
