"""What the two flags of the container open and what they do not, and what the server says without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from container_support import HARDENED, PATHS, PROFILE, Container, started
from image_builds import base_image, run

import seccomp_profile

pytestmark = [pytest.mark.docker, pytest.mark.container, pytest.mark.anyio, pytest.mark.timeout(1500)]

WITHOUT_MODEL_CALLS = {"MODEL": "tiny", "ENGINE__KIND": "trainer"}
"""A server that starts at once: the training loop would be its engine."""

# Numbers of x86-64 (asm/unistd_64.h) and of aarch64 (asm-generic/unistd.h). ENOSYS also counts as refused: newer
# engines answer so for calls that are newer than the profile.
CALLS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fsopen": (430, 430),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "request_key": (249, 218),
    "setns": (308, 268),
    "userfaultfd": (323, 282),
}
ATTEMPTS = f"""
import ctypes, errno, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if platform.machine() == "x86_64" else 1
clone, unshare, mount, umount2 = ((56, 220), (272, 97), (165, 40), (166, 39))
def tried(number, *arguments):
    ctypes.set_errno(0)
    answer = libc.syscall(number, *(ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments))
    if answer == 0 and number == clone[column]:
        os._exit(0)
    return errno.errorcode[ctypes.get_errno()] if answer == -1 else "done"
found = {{name: tried(numbers[column], 0, 0, 0, 0, 0) for name, numbers in {CALLS!r}.items()}}
USER, MOUNTS, NET, PID = 0x10000000, 0x20000, 0x40000000, 0x20000000
found["unshare mounts"] = tried(unshare[column], MOUNTS)
found["unshare user and mounts"] = tried(unshare[column], USER | MOUNTS)
found["clone user"] = tried(clone[column], 17 | USER, 0, 0, 0, 0)
found["clone user, mounts, net, pid"] = tried(clone[column], 17 | USER | MOUNTS | NET | PID, 0, 0, 0, 0)
found["mount --move"] = tried(mount[column], b"/tmp", b"/tmp", b"", 0x2000, 0)
found["mount --make-shared"] = tried(mount[column], b"none", b"/", b"", 1 << 20, 0)
found["mount in the container's own name space"] = tried(mount[column], b"none", b"/tmp", b"tmpfs", 0, 0)
found["umount"] = tried(umount2[column], b"/tmp", 0)
found["socket to the hypervisor"] = "done"
try:
    import socket
    socket.socket(40, socket.SOCK_STREAM)
except OSError as error:
    found["socket to the hypervisor"] = errno.errorcode[error.errno]
found["clone"] = tried(clone[column], 17, 0, 0, 0, 0)
found["unshare user"] = tried(unshare[column], USER)
print(json.dumps(found))
"""


@pytest.mark.thorough
def test_the_flags_open_user_name_spaces_and_not_keys_newer_mounts_or_name_spaces_alone() -> None:
    flags = ("--security-opt", PROFILE, "--security-opt", PATHS)
    printed = run("docker", "run", "--rm", *HARDENED, *flags, base_image(), "python3", "-c", ATTEMPTS)
    found: dict[str, str] = json.loads(printed)
    assert (found.pop("clone"), found.pop("unshare user")) == ("done", "done")
    assert {name: answer for name, answer in found.items() if answer not in {"EPERM", "ENOSYS"}} == {}


SANDBOX = """
import os, pathlib, subprocess, sys
from turnstile_server.sandboxes.local import bubblewrap
from turnstile_server.sandboxes.protocol import SandboxLimits, SandboxSpec
from turnstile_server.sandboxes.users import uids_of
from turnstile_server.settings import SandboxSettings
etc = pathlib.Path("/tmp/etc")
bubblewrap.write_etc(etc, uids_of(SandboxSettings()))
python = bubblewrap.HostPython(os.path.realpath(sys.executable), sys.base_prefix)
frame = bubblewrap.SandboxFrame("bwrap", python, False, 61001, compartments=True)
spec = SandboxSpec(SandboxLimits(64 << 20, 1.0, 16, 1 << 20))
sys.exit(subprocess.run(bubblewrap.probe_command(frame, etc, spec)).returncode)
"""


@pytest.mark.thorough
def test_every_rule_that_the_profile_opens_is_needed_for_a_sandbox(server_image: str, tmp_path: Path) -> None:
    """Rule by rule, not call by call: each name space that may be made or entered is one of its own."""
    shipped = json.loads(seccomp_profile.PROFILE.read_text())
    opened = [rule for rule in seccomp_profile.OPENED if not rule["includes"]]  # without that of other machines
    worked = {}
    for number, left_out in enumerate([None, *opened]):
        profile = tmp_path / f"{number}.json"
        rules = [rule for rule in shipped["syscalls"] if rule != left_out]
        profile.write_text(json.dumps({**shipped, "syscalls": rules}))
        flags = ("--security-opt", f"seccomp={profile}", "--security-opt", PATHS)
        done = run("docker", "run", "--rm", *HARDENED, *flags, server_image, "python3", "-c", SANDBOX, ok=False)
        worked[number] = done == ""
    assert worked == {0: True, **dict.fromkeys(range(1, len(opened) + 1), False)}, opened


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Likely cause: the container's system call filter."),
        ((PATHS,), "Likely cause: the container's system call filter."),
        ((PROFILE,), "Likely cause: the container hides parts of /proc ("),
    ],
)
async def test_without_a_flag_it_serves_on_and_says_which_to_add(
    server_image: str, options: tuple[str, ...], said: str
) -> None:
    flags = [word for option in options for word in ("--security-opt", option)]
    with started(server_image, *flags, **WITHOUT_MODEL_CALLS) as container:
        await container.ready()
        found, refused = _asked(container)
        log = container.log
    assert found["kind"] == "none"
    assert said in found["missing"]
    assert "--security-opt seccomp=server/seccomp.json --security-opt systempaths=unconfined" in found["missing"]
    assert f"WARNING turnstile_server.sandboxes.pool: sandboxes: none: {found['missing']}" in log
    assert found["missing"] in refused["error"]["message"]


async def test_local_sandboxes_that_were_asked_for_by_name_stop_the_start(server_image: str) -> None:
    with started(server_image, SANDBOXES__KIND="local", **WITHOUT_MODEL_CALLS) as container:
        assert run("docker", "wait", container.name) == "2"
        (line,) = [line for line in container.log.splitlines() if line.startswith("turnstile: ")]
    assert line.startswith("turnstile: local sandboxes need bubblewrap: `bwrap` does not work here: ")
    assert "--security-opt seccomp=server/seccomp.json" in line


def test_the_profile_that_the_image_holds_is_the_one_that_ships(server_image: str) -> None:
    held = run("docker", "run", "--rm", server_image, "cat", "/opt/turnstile/seccomp.json")
    assert json.loads(held) == json.loads(Path(PROFILE.removeprefix("seccomp=")).read_text())


def _asked(container: Container) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its state, and its refusal of an episode that needs a sandbox."""
    with httpx.Client(base_url=f"{container.control_url}/k/{container.key}", timeout=60) as http:
        refused = http.post("/episodes", json={"task": {"id": "add-slugify"}, "agent": "tool-loop"})
        assert refused.status_code == 422
        return http.get("/sandboxes").json(), refused.json()
