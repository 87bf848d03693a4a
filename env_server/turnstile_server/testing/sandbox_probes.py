"""Probes of a sandbox's isolation, from inside: one function for each line of ``turnstile doctor``.

Each runs small programs in a sandbox and judges what they could do. None trusts a setting, or what a backend says
of itself. They fill the sandbox's memory, disk and processes and kill what they can reach, so they run only in a
sandbox that is isolated and of no other use, in the order of ``PROBES``.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from turnstile_server.sandboxes.protocol import Command, ExecResult, Sandbox, SandboxLimits, User
from turnstile_server.testing.doctor import Finding

LIMITS = SandboxLimits(memory_bytes=192 << 20, cpus=0.25, pids=40, disk_bytes=24 << 20, files=4096)
"""Small, so that they are reached soon."""
PROBE_S = 60.0
"""For one program: with a quarter of a CPU, on a busy machine."""
READY_S = 0.5
"""A harness that was started has its key by then."""
ALIVE_S = 0.3
"""A process that was killed is gone by then."""
SPARE = 1.6
"""A rate that is measured may be this much above its limit."""

_CALLS = """
import ctypes, errno, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
tried = {
    "add_key": lambda: libc.syscall(248 if x86 else 217, 0, 0, 0, 0, 0),
    "keyctl": lambda: libc.syscall(250 if x86 else 219, 0, 0, 0, 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "ptrace": lambda: libc.syscall(101 if x86 else 117, 0, 0, 0, 0),
    "bpf": lambda: libc.syscall(321 if x86 else 280, 0, 0, 0),
    "perf_event_open": lambda: libc.syscall(298 if x86 else 241, 0, 0, -1, -1, 0),
    "io_uring_setup": lambda: libc.syscall(425, 0, 0),
}
found = {}
for name, call in tried.items():
    ctypes.set_errno(0)
    found[name] = 0 if call() >= 0 else ctypes.get_errno()
refused = {name for name, number in found.items() if number in (errno.EPERM, errno.ENOSYS)}
print(json.dumps({"tried": len(tried), "passed": sorted(set(tried) - refused)}))
"""
_MEMORY = """
import json, os, sys
held, wall = os.pipe(), os.pipe()
pids = []
for _ in range(3):
    if not (pid := os.fork()):
        os.close(wall[1])
        try:
            kept = b"x" * int(sys.argv[1])
        except MemoryError:
            os._exit(1)
        os.write(held[1], b"x")
        os.read(wall[0], 1)
        os._exit(0)
    pids.append(pid)
os.close(held[1])
import select
count = 0
for _ in pids:
    if select.select([held[0]], [], [], 10)[0]:
        count += len(os.read(held[0], 1))
os.close(wall[1])
print(json.dumps({"held": count, "ended": [os.waitpid(pid, 0)[1] for pid in pids]}))
"""
_PROCESSES = """
import json, os, signal, sys
made = []
try:
    for _ in range(int(sys.argv[1])):
        if not (pid := os.fork()):
            signal.pause()
        made.append(pid)
except OSError:
    pass
for pid in made:
    os.kill(pid, signal.SIGKILL)
print(json.dumps({"made": len(made)}))
"""
_PROCESSORS = """
import json, os, time
end = time.monotonic() + 1.0
pids = []
for _ in range(4):
    if not (pid := os.fork()):
        while time.monotonic() < end:
            pass
        os._exit(0)
    pids.append(pid)
began = time.monotonic()
for pid in pids:
    os.waitpid(pid, 0)
used = os.times()
print(json.dumps({"cpus": (used.children_user + used.children_system) / (time.monotonic() - began)}))
"""
_DISK = """
import json, os
written = 0
for folder in ("/tmp", "/dev/shm", os.environ["HOME"], os.getcwd()):
    path = os.path.join(folder, "doctor.full")
    try:
        with open(path, "wb", buffering=0) as file:
            while part := file.write(bytes(1 << 16)):
                written += part
                if written > 1 << 28:
                    break
    except OSError:
        pass
for folder in ("/tmp", "/dev/shm", os.environ["HOME"], os.getcwd()):
    try:
        os.unlink(os.path.join(folder, "doctor.full"))
    except OSError:
        pass
print(json.dumps({"written": written}))
"""


async def users(sandbox: Sandbox) -> Finding:
    """A harness holds a key in its environment and its home; the model's commands try to read and to kill it."""
    key = secrets.token_hex(16)
    shell = ("sh", "-c", 'umask 077; printf %s "$DOCTOR_KEY" >~/doctor-key; exec sleep 60')
    harness = await sandbox.start(
        Command(shell, cwd="/", user=User.HARNESS, env={"DOCTOR_KEY": key}, timeout_s=PROBE_S)
    )
    try:
        await anyio.sleep(READY_S)
        look = "cat /proc/[0-9]*/environ /home/harness/doctor-key 2>/dev/null | tr '\\0' '\\n'; true"
        seen = await _run(sandbox, "sh", "-c", look)
        await _run(sandbox, "sh", "-c", "kill -9 -1")
        killed = False
        with anyio.move_on_after(ALIVE_S):
            await harness.wait()
            killed = True
    finally:
        await harness.kill()
    uids = [(await _run(sandbox, "id", "-u", user=user)).stdout.strip().decode() for user in User]
    how = f"a uid each ({', '.join(uids)})" if len(set(uids)) == len(uids) else f"one uid ({uids[0]})"
    read = key.encode() in seen.stdout
    if not read and not killed:
        return Finding(name="users", passed=True, text=f"kept apart; {how}")
    could = " and ".join(word for word, did in (("read its key", read), ("kill it", killed)) if did)
    return Finding(
        name="users", passed=False, text=f"NOT kept apart: beside a harness, a command could {could}; {how}"
    )


async def capabilities(sandbox: Sandbox) -> Finding:
    """The model's commands have no right of root, and a set-uid program gives none."""
    done = await _run(sandbox, "cat", "/proc/self/status")
    status = dict(line.split(":\t", 1) for line in done.stdout.decode().splitlines() if ":\t" in line)
    has = int(status.get("CapEff", "0"), 16) | int(status.get("CapPrm", "0"), 16)
    bound = int(status.get("CapBnd", "0"), 16)
    gains = status.get("NoNewPrivs", "1").strip() != "1"
    text = "none, and none can be gained" if not has and not gains else f"CapEff {has:x}, new ones {gains}"
    if bound:
        text += f"; the bounding set is not empty ({bound:x})"
    return Finding(name="capabilities", passed=not has and not gains, text=text)


async def system_calls(sandbox: Sandbox) -> Finding:
    """Calls that the list does not have are refused, whatever their arguments."""
    found, why = await _python(sandbox, _CALLS)
    if found is None:
        return Finding(name="system calls", passed=None, text=why)
    if found["passed"]:
        return Finding(name="system calls", passed=False, text=f"NOT refused: {', '.join(found['passed'])}")
    return Finding(
        name="system calls", passed=True, text=f"an allow-list; {found['tried']} calls tried and refused"
    )


async def disk(sandbox: Sandbox) -> Finding:
    """All that a user can write is filled."""
    found, why = await _python(sandbox, _DISK)
    if found is None:
        return Finding(name="disk", passed=None, text=why)
    written, most = found["written"] / (1 << 20), LIMITS.disk_bytes / (1 << 20)
    text = f"work folder, home, /tmp and /dev/shm took {written:.0f} MiB together, of {most:.0f} MiB"
    held = 0 < written <= most
    return Finding(name="disk", passed=held, text=text if held else f"NOT bounded together: {text}")


async def processes(sandbox: Sandbox) -> Finding:
    found, why = await _python(sandbox, _PROCESSES, str(LIMITS.pids + 20))
    if found is None:
        return Finding(name="processes", passed=None, text=why)
    held = found["made"] <= LIMITS.pids
    text = f"held: {found['made']} of {LIMITS.pids} could be made" if held else "NOT held"
    return Finding(name="processes", passed=held, text=text)


async def memory(sandbox: Sandbox) -> Finding:
    """Three processes hold more together than the sandbox may, and each alone less."""
    each = LIMITS.memory_bytes * 2 // 5
    done = await _run(sandbox, sandbox.python, "-I", "-c", _MEMORY, str(each))
    found = _result(done)
    if found is None and done.exit_code != 137:
        return Finding(name="memory", passed=None, text=_not_tried(done))
    if found is None or found["held"] < 3 or any(found["ended"]):  # the kernel may end one that had its memory
        return Finding(name="memory", passed=None, text="held for the sandbox as a whole")
    return Finding(
        name="memory", passed=None, text="held for each process alone: no control group holds the sandbox"
    )


async def processors(sandbox: Sandbox) -> Finding:
    """Four processes spin. A busy machine may give them less than their limit, which then shows nothing."""
    found, why = await _python(sandbox, _PROCESSORS)
    if found is None:
        return Finding(name="cpus", passed=None, text=why)
    text = f"four spinning processes got {found['cpus']:.2f} of a CPU, of {LIMITS.cpus}"
    held = found["cpus"] <= LIMITS.cpus * SPARE
    return Finding(name="cpus", passed=None, text=f"held: {text}" if held else f"NOT held: {text}")


async def kernel(sandbox: Sandbox) -> Finding:
    """Whose kernel answers inside."""
    inside = (await _run(sandbox, "cat", "/proc/sys/kernel/osrelease")).stdout.decode().strip()
    own = os.uname().release
    text = (
        f"this machine's ({own}), shared with every sandbox"
        if inside == own
        else f"another than this machine's ({inside})"
    )
    return Finding(name="kernel", passed=None, text=text)


PROBES: tuple[Callable[[Sandbox], Awaitable[Finding]], ...] = (
    users,
    capabilities,
    system_calls,
    kernel,
    disk,
    processes,
    processors,
    memory,
)


async def _run(sandbox: Sandbox, *argv: str, user: User = User.AGENT) -> ExecResult:
    return await sandbox.exec(Command(argv, user=user, timeout_s=PROBE_S))


async def _python(sandbox: Sandbox, program: str, *arguments: str) -> tuple[dict[str, Any] | None, str]:
    """The JSON that the program printed, else the reason why it could not be tried."""
    done = await _run(sandbox, sandbox.python, "-I", "-c", program, *arguments)
    return _result(done), _not_tried(done)


def _result(done: ExecResult) -> dict[str, Any] | None:
    try:
        return dict(json.loads(done.stdout)) if done.exit_code == 0 else None
    except ValueError:
        return None


def _not_tried(done: ExecResult) -> str:
    if done.exit_code == 127:
        return "not tried: there is no python3 in the image"
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return f"not tried: the program ended with {done.exit_code} {last}".rstrip()
