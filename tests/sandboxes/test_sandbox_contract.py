"""What every sandbox does, on every backend: commands, their ends, their bounds; the attacker is inside."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import anyio
import pytest
from sandbox_providers import LIMITS, SPEC, Backend

from bounded import rebounded
from turnstile_server.errors import SandboxFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, ExecResult, SandboxProvider, User
from turnstile_server.settings import SandboxSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio

_SECONDS = "5471"
"""An argument of `sleep` by which its processes are found."""

_LIST = """
import os, sys
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\\0")
        except OSError:
            continue
        if sys.argv[1].encode() in words and int(name) != os.getpid():
            print(name)
"""


async def sh(sandbox: HelperSandbox, script: str, *, user: User = User.AGENT) -> ExecResult:
    return await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=30))


async def python(sandbox: HelperSandbox, script: str, *arguments: str) -> ExecResult:
    return await sandbox.exec(Command(("python3", "-c", script, *arguments), timeout_s=60))


async def sleepers(sandbox: HelperSandbox) -> int:
    result = await python(sandbox, _LIST, _SECONDS)
    assert result.exit_code == 0, result
    return len(result.stdout.split())


async def sleepers_become(sandbox: HelperSandbox, number: int) -> None:
    async def as_many() -> bool:
        return await sleepers(sandbox) == number

    await wait_until(as_many, f"{number} of them")


async def test_a_command_says_its_exit_code_and_both_outputs(sandbox: HelperSandbox) -> None:
    result = await sh(sandbox, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not result.timed_out
    assert result.dropped_bytes == 0


async def test_a_command_runs_in_the_work_folder_with_an_environment_made_from_nothing(
    sandbox: HelperSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "x")
    result = await sandbox.exec(Command(("env",), env={"MINE": "1"}))
    names = {line.split(b"=")[0] for line in result.stdout.splitlines()}
    assert names == {b"PATH", b"HOME", b"LANG", b"TMPDIR", b"MINE"}
    assert (await sh(sandbox, "pwd")).stdout.decode().strip() == sandbox.workdir
    assert (await sandbox.exec(Command(("pwd",), cwd="/tmp"))).stdout == b"/tmp\n"


@pytest.mark.slow
async def test_each_user_has_a_home_of_its_own_and_the_agent_the_work_folder(sandbox: HelperSandbox) -> None:
    for user in User:
        result = await sh(sandbox, 'cd "$HOME" && touch mine && stat -c %a .', user=user)
        assert result.stdout == b"700\n", result
    assert (await sh(sandbox, "touch mine")).exit_code == 0


async def test_input_reaches_the_command_whole(sandbox: HelperSandbox) -> None:
    data = os.urandom(3 << 20)
    result = await sandbox.exec(Command(("cat",), stdin=data, max_output_bytes=4 << 20))
    assert result.stdout == data
    assert (await sandbox.exec(Command(("cat",)))).stdout == b""


async def test_a_command_that_reads_no_input_is_not_held_up_by_it(sandbox: HelperSandbox) -> None:
    assert (await sandbox.exec(Command(("true",), stdin=bytes(8 << 20)))).exit_code == 0


@pytest.mark.parametrize(
    ("argv", "cwd", "code"),
    [
        (("not-a-program",), None, 127),
        (("/etc/passwd",), None, 126),
        (("true",), "/not/there", 126),
        (("echo", "a\0b"), None, 126),
        (("echo", "x" * 200_000), None, 126),
        (("echo", "x" * (9 << 20)), None, 126),
        (("",), None, 126),
    ],
    ids=["missing", "not executable", "no such folder", "NUL", "long argument", "longer than a frame", "empty"],
)
async def test_what_cannot_be_run_is_an_exit_code_with_the_reason(
    sandbox: HelperSandbox, argv: tuple[str, ...], cwd: str | None, code: int
) -> None:
    result = await sandbox.exec(Command(argv, cwd=cwd))
    assert result.exit_code == code
    assert result.stderr


@pytest.mark.slow
async def test_a_started_command_that_cannot_be_run_ends_the_same_way(sandbox: HelperSandbox) -> None:
    for argv, code in ((("not-a-program",), 127), (("echo", "x" * (9 << 20)), 126)):
        process = await sandbox.start(Command(argv))
        assert (await process.wait()).exit_code == code
        await process.kill()


@pytest.mark.slow
async def test_a_process_ended_by_a_signal_has_128_and_its_number(sandbox: HelperSandbox) -> None:
    assert (await sh(sandbox, "kill -TERM $$")).exit_code == 143
    assert (await sh(sandbox, "kill -KILL $$")).exit_code == 137


@pytest.mark.slow
async def test_after_its_time_a_command_is_killed_with_all_it_started(sandbox: HelperSandbox) -> None:
    # A child in the group, one that ignores what it can, one in another process group of the session.
    script = f"""
    sleep {_SECONDS} &
    (trap '' TERM HUP INT; sleep {_SECONDS}; sleep {_SECONDS}) &
    set -m; sleep {_SECONDS} &
    echo begun; wait
    """
    result = await sandbox.exec(Command(("bash", "-c", script), timeout_s=2))
    assert (result.exit_code, result.timed_out, result.stdout) == (137, True, b"begun\n")
    assert await sleepers(sandbox) == 0


@pytest.mark.slow
async def test_a_child_that_keeps_the_output_open_neither_delays_the_result_nor_outlives_it(
    sandbox: HelperSandbox,
) -> None:
    result = await sh(sandbox, f"sleep {_SECONDS} & echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert await sleepers(sandbox) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("grace_s", "stdout"), [(0.0, b"now\n"), (60.0, b"now\nlate\n")])
async def test_output_of_children_is_waited_for_within_the_grace(
    backend: Backend,
    sandbox_settings: SandboxSettings,
    run_dir: Path,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    grace_s: float,
    stdout: bytes,
) -> None:
    provider = backend.make(rebounded(sandbox_settings, output_grace_s=grace_s), run_dir)
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    result = await sandbox.exec(Command(("sh", "-c", "(sleep 0.5; echo late) & echo now")))
    assert result.stdout == stdout
    await provider.close()


@pytest.mark.slow
async def test_what_was_written_before_the_end_is_kept_without_any_grace(
    backend: Backend,
    sandbox_settings: SandboxSettings,
    run_dir: Path,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
) -> None:
    provider = backend.make(rebounded(sandbox_settings, output_grace_s=0.0), run_dir)
    await provider.start(agents, tasks)
    sandbox = await provider.create(SPEC)
    held = Command(("sh", "-c", f"sleep {_SECONDS} & head -c 60000 /dev/zero; echo now >&2"))
    for _ in range(5):
        results = await asyncio.gather(*(sandbox.exec(held) for _ in range(10)))
        assert [(len(result.stdout), result.stderr) for result in results] == [(60_000, b"now\n")] * 10
    await provider.close()


@pytest.mark.parametrize("prefix", ["", "setsid "], ids=["in its group", "in a session of its own"])
async def test_a_server_left_behind_with_its_output_elsewhere_lives_until_stop_all(
    sandbox: HelperSandbox, prefix: str
) -> None:
    await sh(sandbox, f"{prefix}sleep {_SECONDS} >/dev/null 2>&1 &")
    await sh(sandbox, "true")
    await sleepers_become(sandbox, 1)
    await sandbox.stop_all()
    assert await sleepers(sandbox) == 0


@pytest.mark.slow
async def test_stop_all_ends_what_forks_faster_than_it_is_listed(sandbox: HelperSandbox) -> None:
    # Each process lives only until its child does, in a new session: never there when a list is worked off.
    script = "import os\nwhile True:\n  if os.fork(): os._exit(0)\n  os.setsid()"
    chain = await sandbox.start(Command(("python3", "-c", script)))
    bomb = await sandbox.start(Command(("bash", "-c", ":(){ :|:& };:; sleep 5471 2>/dev/null")))
    await asyncio.sleep(0.3)  # to fork in: nothing can be asked of the sandbox meanwhile
    await sandbox.stop_all()
    assert (await bomb.wait()).exit_code == 137
    await chain.wait()
    left = await python(sandbox, 'import os; print(*[n for n in os.listdir("/proc") if n.isdigit()])')
    # The helper, this listing, and on some backends the init that holds the name space.
    assert len(left.stdout.split()) <= 3, left


async def test_stop_all_ends_running_commands_with_a_result(sandbox: HelperSandbox) -> None:
    process = await sandbox.start(Command(("sleep", _SECONDS)))
    await sandbox.stop_all()
    assert (await process.wait()).exit_code == 137


async def test_of_a_flood_of_output_the_first_and_the_last_half_are_kept(sandbox: HelperSandbox) -> None:
    script = "import sys; sys.stdout.write('a' * 5_000_000 + 'b' * 5_000_000); sys.stderr.write('e' * 300)"
    result = await sandbox.exec(Command(("python3", "-c", script), max_output_bytes=1000))
    assert result.stdout == b"a" * 500 + b"b" * 500
    assert result.stderr == b"e" * 300
    assert result.dropped_bytes == 10_000_000 - 1000
    result = await sandbox.exec(Command(("python3", "-c", script), max_output_bytes=0))
    assert (result.stdout, result.stderr, result.dropped_bytes) == (b"", b"", 10_000_300)


@pytest.mark.slow
async def test_output_without_end_stays_within_the_helpers_memory(
    sandbox: HelperSandbox, backend: Backend
) -> None:
    process = await sandbox.start(Command(("sh", "-c", "yes & yes >&2"), max_output_bytes=1 << 20, timeout_s=3))
    result = await process.wait()
    assert result.dropped_bytes > 50 << 20
    assert len(result.stdout) == len(result.stderr) == 1 << 20
    status = (await sh(sandbox, "cat /proc/1/status")).stdout.decode()
    # gVisor tells no peak.
    word = "VmRSS" if backend.own_kernel else "VmHWM"
    (peak,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith(word)]
    assert peak < 48 << 10  # KiB


async def test_the_latest_line_of_output_is_told_while_the_command_runs(sandbox: HelperSandbox) -> None:
    lines: list[bytes] = []
    script = (
        "echo one; printf 'x%.0s' $(seq 2000); printf '\\rlast\\n\\n' >&2; while [ ! -e go ]; do sleep 0.01; done"
    )

    def keep(line: bytes) -> None:
        lines.append(line)
        told.set()

    told = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.exec, Command(("sh", "-c", script), on_line=keep, line_s=0.02))
        while lines[-1:] != [b"last"]:
            await told.wait()
            told = anyio.Event()
        said = len(lines)
        await anyio.sleep(0.1)  # a few times line_s, by the clock of the sandbox
        assert len(lines) == said  # what is not new is not told again
        await sandbox.write(f"{sandbox.workdir}/go", b"")
    assert all(0 < len(line) <= 512 for line in lines)


async def test_a_started_command_tells_its_latest_line_too(sandbox: HelperSandbox) -> None:
    told = anyio.Event()
    command = Command(("sh", "-c", "echo on; exec sleep 100"), on_line=lambda line: told.set(), line_s=0.02)
    process = await sandbox.start(command)
    await told.wait()
    await process.kill()
    assert (await process.wait()).stdout == b"on\n"


async def test_cancelling_a_command_kills_it(sandbox: HelperSandbox) -> None:
    running = asyncio.create_task(sandbox.exec(Command(("sh", "-c", f"sleep {_SECONDS} & sleep {_SECONDS}"))))
    await sleepers_become(sandbox, 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await sleepers_become(sandbox, 0)


async def test_a_started_command_gives_every_waiter_the_same_end(sandbox: HelperSandbox) -> None:
    process = await sandbox.start(Command(("sh", "-c", "cat; exit 5"), stdin=b"in"))
    first, second = await asyncio.gather(process.wait(), process.wait())
    assert first is second or first == second
    assert (first.exit_code, first.stdout) == (5, b"in")
    await process.kill()
    assert await process.wait() == first


async def test_a_waiter_that_gives_up_leaves_the_command_running(sandbox: HelperSandbox) -> None:
    process = await sandbox.start(Command(("sleep", _SECONDS)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.1)
    assert await sleepers(sandbox) == 1
    await process.kill()
    assert (await process.wait()).exit_code == 137
    assert await sleepers(sandbox) == 0


@pytest.mark.slow
async def test_many_commands_at_once_each_get_their_own_end(sandbox: HelperSandbox) -> None:
    slow = await sandbox.start(Command(("sleep", _SECONDS)))
    results = await asyncio.gather(*(sh(sandbox, f"echo {number}; exit {number}") for number in range(30)))
    assert [(result.exit_code, int(result.stdout)) for result in results] == [(n, n) for n in range(30)]
    await slow.kill()


@pytest.mark.slow
async def test_a_request_that_the_helper_cannot_serve_disturbs_no_other(sandbox: HelperSandbox) -> None:
    running = await sandbox.start(Command(("sh", "-c", "sleep 0.2; echo whole")))
    for nonsense in ({"op": "nothing"}, {"op": "run"}, {"op": "file", "action": "run"}):
        with pytest.raises(SandboxFailed, match="helper failed"):
            await sandbox._client.call(nonsense, timeout_s=10)
    assert (await running.wait()).stdout == b"whole\n"


@pytest.mark.slow
async def test_the_bounds_on_memory_processes_and_disk_hold(
    sandbox: HelperSandbox, backend: Backend, provider: SandboxProvider
) -> None:
    bomb = python(sandbox, f"x = bytearray({LIMITS.memory_bytes * 2}); print(len(x))")
    if backend.own_kernel:
        # The bound is that of the kernel itself: the whole sandbox ends.
        with pytest.raises(SandboxFailed) as caught:
            await bomb
        assert (caught.value.detail or {})["death"] == "memory"
        await provider.create(SPEC)
        return
    assert (await bomb).exit_code != 0
    result = await python(
        sandbox,
        f"""
import os, time
made = 0
try:
    for _ in range({LIMITS.pids * 3}):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        made += 1
except BlockingIOError:
    pass
print(made)
""",
    )
    assert 0 < int(result.stdout) < LIMITS.pids
    for folder in (".", "/tmp"):
        result = await sh(sandbox, f"head -c {LIMITS.disk_bytes * 2} /dev/zero > {folder}/big; rm {folder}/big")
        assert result.stderr


@pytest.mark.slow
async def test_a_sandbox_full_of_processes_still_answers_and_recovers(sandbox: HelperSandbox) -> None:
    bomb = await sandbox.start(Command(("bash", "-c", f"while :; do sleep {_SECONDS} & done 2>/dev/null")))
    await asyncio.sleep(0.5)  # to fork in: nothing can be asked of the sandbox meanwhile
    assert (await sh(sandbox, "true")).exit_code in (0, 2, 126, 137)
    await sandbox.stop_all()
    assert (await bomb.wait()).exit_code != 0
    assert (await sh(sandbox, "echo well")).stdout == b"well\n"


@pytest.mark.slow
async def test_a_command_right_after_stop_all_runs(sandbox: HelperSandbox) -> None:
    for _ in range(20):
        await sandbox.start(Command(("sleep", _SECONDS)))
        await sandbox.stop_all()
        after = await sandbox.exec(Command(("echo", "well")))
        assert after.stdout == b"well\n", after


@pytest.mark.slow
async def test_destroy_may_be_called_often_and_at_once(
    provider: SandboxProvider, sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    await asyncio.gather(sandbox.destroy(), sandbox.destroy())
    await sandbox.destroy()
    assert backend.traces(sandbox.sandbox_id, run_dir) == []
    with pytest.raises(SandboxFailed):
        await sh(sandbox, "true")


async def test_destroy_ends_running_commands_as_failed_and_leaves_nothing(
    sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    process = await sandbox.start(Command(("sh", "-c", f"setsid sleep {_SECONDS} & sleep {_SECONDS}")))
    waiting = asyncio.create_task(sandbox.exec(Command(("sleep", _SECONDS))))
    await sleepers_become(sandbox, 3)
    await sandbox.destroy()
    with pytest.raises(SandboxFailed, match="destroyed"):
        await process.wait()
    with pytest.raises(SandboxFailed, match="destroyed"):
        await waiting
    assert backend.traces(sandbox.sandbox_id, run_dir) == []


async def test_a_destroy_that_is_not_waited_for_goes_on(
    sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    destroying = asyncio.create_task(sandbox.destroy())
    await asyncio.sleep(0)
    destroying.cancel()
    await wait_until(lambda: not backend.traces(sandbox.sandbox_id, run_dir))


@pytest.mark.slow
async def test_a_killed_helper_fails_its_commands_and_leaves_nothing_after_destroy(
    sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    process = await sandbox.start(Command(("sleep", _SECONDS)))
    backend.kill_helper(sandbox, run_dir)
    with pytest.raises(SandboxFailed):
        await process.wait()
    with pytest.raises(SandboxFailed):
        await sh(sandbox, "true")
    async with asyncio.timeout(60):
        await sandbox.died()
    await sandbox.destroy()
    assert backend.traces(sandbox.sandbox_id, run_dir) == []


@pytest.mark.slow
async def test_a_helper_that_no_longer_answers_is_given_up(
    backend: Backend,
    sandbox_settings: SandboxSettings,
    run_dir: Path,
    agents: AgentEndpoint,
    tasks: BackgroundTasks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = backend.make(sandbox_settings, run_dir)
    await provider.start(agents, tasks)
    try:
        sandbox = await provider.create(SPEC)
        assert isinstance(sandbox, HelperSandbox)
        impatient = sandbox_settings.model_copy(update={"call_timeout_s": 0.3})
        monkeypatch.setattr(sandbox, "_settings", impatient)
        # Nothing that the helper says arrives any more; the connection lives.
        monkeypatch.setattr(sandbox._client, "_take", lambda header, payload: None)
        with pytest.raises(SandboxFailed, match="did not answer"):
            await sandbox.exec(Command(("true",), timeout_s=0.1))
    finally:
        await provider.close()


@pytest.mark.slow
async def test_close_destroys_what_is_left(provider: SandboxProvider, backend: Backend, run_dir: Path) -> None:
    made = await asyncio.gather(*(provider.create(SPEC) for _ in range(3)))
    await provider.close()
    for sandbox in made:
        assert backend.traces(sandbox.sandbox_id, run_dir) == []


async def test_a_creation_that_is_cancelled_leaves_nothing(
    provider: SandboxProvider, backend: Backend, run_dir: Path
) -> None:
    for delay in (0, 0.005, 0.02, 0.05):
        creating = asyncio.create_task(provider.create(SPEC))
        await asyncio.sleep(delay)  # so that it is cancelled at different moments
        if creating.cancel():
            with pytest.raises(asyncio.CancelledError):
                await creating
    await provider.close()
    assert backend.traces("sb-", run_dir) == []
