"""Users of one sandbox are kept apart: what one runs can read, trace, signal and change nothing of another.

Each is tried for real, on every backend: by uids where the helper has them, by compartments where it has not."""

from __future__ import annotations

import json
import signal

import anyio
import pytest
from sandbox_providers import Backend

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import HOMES, Command, ExecResult, Process, User
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio

_SECRET = "sk-turnstile-a-secret"

_VICTIM = """
import os, socket, sys, tempfile, time
secret = os.environ["KEY"]
os.umask(0o077)
home = os.path.expanduser("~")
open(home + "/note", "w").write(secret)
os.makedirs(home + "/deep/folder", exist_ok=True)
open(home + "/deep/folder/note", "w").write(secret)
with tempfile.NamedTemporaryFile("w", delete=False) as file:
    file.write(secret)
kept = open(home + "/note")
os.unlink(home + "/note")
print("ready", os.getpid(), flush=True)
time.sleep(600)
"""

_ATTACK = r"""
import ctypes, glob, json, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
found = []
def look(what, data):
    if b"sk-turnstile-a" + b"-secret" in data:
        found.append(what)
def read(path, most=1 << 20):
    try:  # not blocking: some descriptors are pipes
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb", 0) as file:
            return file.read(most) or b""
    except OSError:
        return b""
homes = os.environ["VICTIMS"].split(":")
mine = {os.getpid(), os.getppid()}
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
others = [pid for pid in [*pids, *range(1, 300)] if pid not in mine]
for pid in set(others):
    for name in ("environ", "cmdline", "auxv", "stack", "mountinfo"):
        look(f"/proc/{pid}/{name}", read(f"/proc/{pid}/{name}"))
    for path in glob.glob(f"/proc/{pid}/fd/*") + glob.glob(f"/proc/{pid}/task/*/environ"):
        look(path, read(path))
    for path in [f"/proc/{pid}/{place}/deep/folder/note" for place in ("cwd", *(f"root{home}" for home in homes))]:
        look(path, read(path))
    for line in read(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
        start, _, end = line.split()[0].partition("-")
        try:
            with open(f"/proc/{pid}/mem", "rb") as memory:
                memory.seek(int(start, 16))
                look(f"/proc/{pid}/mem", memory.read(int(end, 16) - int(start, 16)))
        except (OSError, OverflowError, ValueError):
            pass
    if os.path.exists(f"/proc/{pid}") and pid in pids:
        comm = read(f"/proc/{pid}/comm").strip()
        if libc.ptrace(16, pid, None, None) == 0:
            found.append(f"ptrace {pid} {comm}")
            libc.ptrace(17, pid, None, None)
        pidfd = libc.syscall(434, pid, 0)
        if pidfd >= 0:
            for fd in range(20):
                if libc.syscall(438, pidfd, fd, 0) >= 0:
                    found.append(f"pidfd_getfd {pid} {comm}")
for top in ("/home", "/tmp", "/dev/shm", "/run", "/var/tmp", *homes):
    for folder, names, files in os.walk(top):
        for file in files:
            look(f"{folder}/{file}", read(f"{folder}/{file}"))
def attempt(what, act):
    try:
        act()
        found.append(what)
    except OSError:
        pass
for home in homes:
    attempt("write into its home", lambda: open(home + "/planted", "w"))
    attempt("move its home", lambda: os.rename(home, "/home/moved"))
attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0 or os.open("/", os.O_RDWR))
print(json.dumps(found), flush=True)
for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
    for pid in others:
        try:
            os.kill(pid, number)
        except OSError:
            pass
    try:
        os.kill(-1, number) if number != signal.SIGSTOP else None
    except OSError:
        pass
"""


async def sh(sandbox: HelperSandbox, script: str, user: User) -> ExecResult:
    return await sandbox.exec(Command(("sh", "-c", script), user=user, timeout_s=30))


async def start_victim(sandbox: HelperSandbox, victim: User) -> tuple[Process, str]:
    """A process with a secret in its environment, memory, files and descriptors; its pid as it sees it."""
    lines: list[bytes] = []
    process = await sandbox.start(
        Command(
            ("python3", "-c", _VICTIM),
            cwd=HOMES[victim],
            env={"KEY": _SECRET},
            user=victim,
            on_line=lines.append,
            line_s=0.01,
        )
    )
    await wait_until(lambda: bool(lines))
    return process, lines[0].split()[1].decode()


async def attack(sandbox: HelperSandbox, attacker: User, victims: list[User]) -> list[str]:
    homes = ":".join(HOMES[victim] for victim in victims)
    command = Command(("python3", "-c", _ATTACK), cwd="/", env={"VICTIMS": homes}, user=attacker, timeout_s=60)
    result = await sandbox.exec(command)
    assert result.stdout, result.stderr.decode()
    found: list[str] = json.loads(result.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("attacker", list(User))
async def test_a_user_can_reach_no_process_and_no_file_of_another(sandbox: HelperSandbox, attacker: User) -> None:
    assert sandbox.users_apart
    victims = [user for user in User if user is not attacker]
    started = {victim: await start_victim(sandbox, victim) for victim in victims}
    found = await attack(sandbox, attacker, victims)
    if sandbox.compartments and attacker in (User.AGENT, User.TESTS):
        # The task's set-up and the tests: they have temporary folders together.
        found = [path for path in found if not path.startswith("/tmp/")]
    assert found == []
    for victim, (process, pid) in started.items():
        # It was sent SIGSTOP, SIGTERM and SIGKILL, and is as it was.
        alive = await sh(sandbox, f"kill -0 {pid} && cat ~/deep/folder/note", victim)
        assert alive.stdout.decode() == _SECRET, victim
        await process.kill()


async def test_the_victim_is_one_that_the_attack_would_find(sandbox: HelperSandbox) -> None:
    """The attack, on a process of its own user: it finds what it looks for."""
    await start_victim(sandbox, User.WORK)
    found = " ".join(await attack(sandbox, User.WORK, [User.WORK]))
    for what in ("environ", "/mem", "/fd/", "/home/work/deep/folder/note", "write into its home"):
        assert what in found


@pytest.mark.slow
async def test_code_in_a_compartment_has_no_capability_and_can_make_no_name_space(sandbox: HelperSandbox) -> None:
    if not sandbox.compartments:
        pytest.skip("the users have uids of their own")
    for user in User:
        status = (await sh(sandbox, "cat /proc/self/status", user)).stdout.decode()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert {int(value, 16) for name, value in fields.items() if name.startswith("Cap")} == {0}
        assert fields["NoNewPrivs"] == "1"
        for kind in ("--user", "--user --map-root-user --mount", "--mount", "--pid --fork", "--net", "--ipc"):
            assert (await sh(sandbox, f"unshare {kind} true", user)).exit_code != 0
        bound = "/proc/sys/user/max_user_namespaces"
        assert (await sh(sandbox, f"cat {bound}; echo 9 > {bound}", user)).stdout == b"0\n"


async def test_a_process_that_a_command_leaves_is_seen_by_the_next_of_its_user(sandbox: HelperSandbox) -> None:
    started = await sh(sandbox, "sleep 1000 > /dev/null 2>&1 & echo $!", User.AGENT)
    assert (await sh(sandbox, f"kill {started.stdout.decode()}", User.AGENT)).exit_code == 0


@pytest.mark.slow
async def test_a_kill_of_everything_ends_its_own_user_only_and_no_later_command(sandbox: HelperSandbox) -> None:
    others, other_pid = await start_victim(sandbox, User.HARNESS)
    own, _ = await start_victim(sandbox, User.AGENT)
    killer = Command(("python3", "-c", "import os; os.kill(-1, 9)"), user=User.AGENT, timeout_s=30)
    killed = await sandbox.exec(killer)
    assert killed.exit_code == 0, killed
    with anyio.fail_after(PATIENCE_S):
        assert (await own.wait()).exit_code == 128 + signal.SIGKILL
    after = await sh(sandbox, "echo well", User.AGENT)
    assert after.stdout == b"well\n", after
    alive = await sh(sandbox, f"kill -0 {other_pid}", User.HARNESS)
    assert alive.exit_code == 0, alive
    await others.kill()


async def test_orphans_are_reaped(sandbox: HelperSandbox) -> None:
    await sh(
        sandbox, "for i in 1 2 3 4 5; do (sh -c 'sleep 0.05' > /dev/null 2>&1 &); done; sleep 0.2", User.AGENT
    )
    states = await sh(sandbox, "cat /proc/[0-9]*/status 2> /dev/null | grep ^State; true", User.AGENT)
    assert b"zombie" not in states.stdout


async def test_everything_is_stopped_whoever_runs_it_and_all_go_on(sandbox: HelperSandbox) -> None:
    for user in User:
        await sh(sandbox, "(trap '' TERM HUP; setsid sleep 1000 > /dev/null 2>&1 &)", user)
    await sandbox.stop_all()
    for user in User:
        left = await sh(sandbox, "for p in /proc/[0-9]*/comm; do cat $p; done; echo on", user)
        assert left.stdout.endswith(b"on\n")
        assert b"sleep" not in left.stdout


async def test_the_work_folder_is_read_by_all_and_never_written_by_the_harness(sandbox: HelperSandbox) -> None:
    """Only its owner writes it where there are uids. Where there is one, what judges and the work may: nothing of
    the agent runs beside them."""
    writers = {User.AGENT} if sandbox.own_uids else set(User) - {User.HARNESS}
    await sh(sandbox, "echo text > file", User.AGENT)
    for user in User:
        assert (await sh(sandbox, "cat file", user)).stdout == b"text\n"
        wrote = await sh(sandbox, "echo more > other; echo more >> file; rm -f file", user)
        assert (wrote.exit_code == 0) == (user in writers), user
        await sh(sandbox, "echo text > file", User.AGENT)


async def test_a_file_of_one_user_in_the_temporary_folder_cannot_be_changed_by_another(
    sandbox: HelperSandbox, backend: Backend
) -> None:
    for owner, other in ((User.HARNESS, User.AGENT), (User.TESTS, User.WORK)):
        await sh(sandbox, f"umask 022; echo mine > /tmp/{owner}; echo mine > /dev/shm/{owner}", owner)
        for folder in ("/tmp", "/dev/shm"):
            path = f"{folder}/{owner}"
            await sh(sandbox, f"echo other >> {path}; rm -f {path}; mv {path} {path}-gone", other)
            assert (await sh(sandbox, f"cat {path}", owner)).stdout == b"mine\n"
