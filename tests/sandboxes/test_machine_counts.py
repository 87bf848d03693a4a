"""What the kernel counts for a user or for the whole machine: no sandbox uses it up for the others.

In each test code in one sandbox takes all that it can get and keeps it; then another sandbox must work."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import pytest
from attack import PRELUDE
from sandbox_providers import LOCAL, SPEC, Backend
from test_launcher import as_tests

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox, SandboxBounds
from turnstile_server.sandboxes.protocol import Command, SandboxProvider, User
from turnstile_server.settings import SandboxSettings

pytestmark = pytest.mark.anyio

_ALL_DESCRIPTORS = (
    "resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)"
)
_KEEP = """
print(taken, flush=True)
if os.fork():
    os._exit(0)
os.setsid()
for fd in range(3):
    os.close(fd)
time.sleep(600)
"""
_SEND = """
import array
taken, ends, most = 0, [], 30000
null = os.open("/dev/null", os.O_RDONLY)
def more():
    ends.append(socket.socketpair())
    ends[-1][0].setblocking(False)
more()
while taken < most:
    try:
        ends[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 253))])
        taken += 253
    except BlockingIOError:
        more()
    except OSError:
        break
"""
_SEND_AT_ONCE = """
import array
null = os.open("/dev/null", os.O_RDONLY)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 253))]
taken, receivers, groups, senders = 0, [], 11, 11
def sender(name, blocking):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.connect(name)
    made.setblocking(blocking)
    return made
for group in range(groups):
    name = f"\\0{group}"
    receivers.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    receivers[-1].bind(name)
    try:
        while True:
            sender(name, False).send(b"nothing else fits")
    except BlockingIOError:
        pass
    for _ in range(senders):
        if os.fork() == 0:
            sender(name, True).sendmsg([b"x"], rights)
            time.sleep(600)
        taken += 1
time.sleep(1)
for receiver in receivers:
    for _ in range(senders):
        receiver.recv(20)
"""
_WATCH = """
taken = 0
try:
    while True:
        call(294, 0)  # inotify_init1
        taken += 1
except OSError:
    pass
"""
_OPEN_TERMINALS = """
taken = 0
try:
    while True:
        os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
        taken += 1
except OSError as error:
    assert error.errno == errno.ENOSPC, error
"""
_FILL_SOCKETS = """
taken = 0
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(1000)
def tcp():
    sender = socket.create_connection(listener.getsockname())
    return sender, listener.accept()[0]
def udp():
    receiver, sender = socket.socket(type=socket.SOCK_DGRAM), socket.socket(type=socket.SOCK_DGRAM)
    receiver.bind(("127.0.0.1", 0))
    sender.connect(receiver.getsockname())
    return sender, receiver
told, tell = os.pipe()
for kind in (tcp, udp) * 3:
    if os.fork() == 0:
        kept = []
        try:
            while True:
                kept.append(kind())
                sender = kept[-1][0]
                sender.setblocking(False)
                try:
                    for _ in range(16):
                        sender.send(bytes(60000 if kind is udp else 1 << 20))
                except BlockingIOError:
                    pass
        except OSError:
            pass
        os.write(tell, b".")
        time.sleep(600)
while taken < 6:
    taken += len(os.read(told, 6))
"""


async def python(sandbox: HelperSandbox, script: str, user: User = User.AGENT) -> str:
    done = await sandbox.exec(Command(("python3", "-c", PRELUDE + script), user=user, timeout_s=60))
    assert done.exit_code == 0, done
    return done.stdout.decode().strip()


async def take(sandbox: HelperSandbox, script: str, user: User = User.AGENT) -> int:
    """How many it got, which it keeps."""
    return int(await python(sandbox, _ALL_DESCRIPTORS + script + _KEEP, user))


async def second(provider: SandboxProvider) -> HelperSandbox:
    made = await provider.create(SPEC)
    assert isinstance(made, HelperSandbox)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("user", [User.AGENT, User.WORK])
async def test_descriptors_under_way_between_processes_stop_no_other_sandbox(
    provider: SandboxProvider, sandbox: HelperSandbox, user: User
) -> None:
    """The kernel counts them per user of the machine, and refuses more to a process whose own bound they pass."""
    assert await take(sandbox, _SEND, user) > 0
    other = await second(provider)
    for each in User:
        assert (await other.exec(Command(("echo", "well"), user=each, timeout_s=30))).stdout == b"well\n", each
    script = 'print(launch.launch(["true"], stdio=(0, 1, 2)).wait()["exit_code"])'
    launched = await as_tests(other, script)
    assert launched.stdout == b"0\n", launched


@pytest.mark.slow
async def test_a_compartment_is_made_whatever_number_of_descriptors_is_under_way(
    provider: SandboxProvider,
) -> None:
    """Senders that wait for room in a queue are past the kernel's look at their bound: more than a bound each."""
    limits = replace(SPEC.limits, memory_bytes=512 << 20, pids=200)
    attacker = await provider.create(replace(SPEC, limits=limits))
    assert isinstance(attacker, HelperSandbox)
    await take(attacker, _SEND_AT_ONCE)
    other = await second(provider)
    for user in User:
        assert (await other.exec(Command(("echo", "well"), user=user, timeout_s=30))).stdout == b"well\n", user


@pytest.mark.slow
async def test_watches_of_files_stop_no_other_sandbox(provider: SandboxProvider, sandbox: HelperSandbox) -> None:
    for user in User:
        await take(sandbox, _WATCH, user)
    assert (await python(await second(provider), "attempt(lambda: call(294, 0))")).startswith("DONE")


@pytest.mark.slow
@pytest.mark.parametrize("backend", LOCAL, indirect=True, ids=lambda each: each.name)
async def test_terminals_are_bounded_and_stop_no_other_sandbox(
    provider: SandboxProvider, sandbox: HelperSandbox, sandbox_settings: SandboxSettings
) -> None:
    """Docker has no bound for them (docs/security.md)."""
    for user in (User.AGENT, User.HARNESS):
        assert await take(sandbox, _OPEN_TERMINALS, user) <= sandbox_settings.bounds_of(SandboxBounds).terminals
        await sandbox.stop_all()
    script = "import pty; pty.spawn(['sh', '-c', 'test -t 0 && tty'])"
    assert (await python(await second(provider), script)).startswith("/dev/pts/")


@pytest.mark.slow
async def test_a_command_can_open_only_so_many_files_and_raise_no_bound(
    sandbox: HelperSandbox, sandbox_settings: SandboxSettings
) -> None:
    """All of a sandbox's processes together stay far below what the whole machine may open."""
    script = """
print(max(resource.getrlimit(resource.RLIMIT_NOFILE)))
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
    print("raised")
except (OSError, ValueError):
    pass
"""
    for user in User:
        bound = int(await python(sandbox, script, user))
        assert 0 < bound <= sandbox_settings.open_files


async def test_a_terminal_of_one_user_is_closed_to_the_others(sandbox: HelperSandbox, backend: Backend) -> None:
    typed = """
master, slave = os.openpty()
os.write(master, b"a secret that was typed\\n")
taken = os.ttyname(slave)
"""
    path = await python(sandbox, typed + _KEEP, User.HARNESS)
    look = f"""
try:
    print(os.read(os.open({path!r}, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK), 100))
except OSError as error:
    print("refused")
"""
    assert await python(sandbox, look, User.AGENT) == "refused"
    assert "a secret" in await python(sandbox, look, User.HARNESS)


def pages_in_sockets() -> int:
    """What TCP and UDP hold on the whole machine (proc_net(5), ``sockstat``)."""
    lines = [line.split() for line in Path("/proc/net/sockstat").read_text().splitlines()]
    return sum(int(words[words.index("mem") + 1]) for words in lines if words[0] in ("TCP:", "UDP:"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", LOCAL, indirect=True, ids=lambda each: each.name)
async def test_what_sockets_hold_is_bounded_too(provider: SandboxProvider, sandbox: HelperSandbox) -> None:
    """Control groups of version 1 do not count it to a group's memory, and runc does not bound it there."""
    if "by control groups" not in provider.description:
        pytest.skip("this user can make no control group, so memory is not held as a whole")
    before = pages_in_sockets()
    await take(sandbox, _FILL_SOCKETS)
    assert (pages_in_sockets() - before) * resource.getpagesize() < SPEC.limits.memory_bytes
