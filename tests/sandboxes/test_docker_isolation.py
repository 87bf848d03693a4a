"""From inside a Docker sandbox, try for all that must be out of reach; the same tries work where they may."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from docker_support import docker_provider, engine
from echo_app import EchoApp, agents_of
from sandbox_providers import SPEC

from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.helper import SOCKET_TARGET
from turnstile_server.sandboxes.protocol import Command, Sandbox, User
from turnstile_server.sandboxes.sockets import GATE_SOCKET, HELPER_SOCKET
from turnstile_server.settings import SandboxSettings

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

# Prints, per target, "reached" or why not. A target is [host, port], a socket's path, or a name to look up.
TRY = """
import json, socket, sys
answers = {}
for target in json.loads(sys.argv[1]):
    try:
        if isinstance(target, list):
            socket.create_connection(target, 3).close()
        elif target.startswith("dns:"):
            socket.getaddrinfo(target[4:], 80)
        else:
            s = socket.socket(socket.AF_UNIX)
            s.settimeout(3)
            s.connect("\\0" + target[1:] if target.startswith("@") else target)
    except OSError as error:
        answers[str(target)] = type(error).__name__
    else:
        answers[str(target)] = "reached"
print(json.dumps(answers))
"""

GET = """
import socket, sys
where, path = sys.argv[1:]
if where.startswith("/"):
    s = socket.socket(socket.AF_UNIX)
    s.connect(where)
else:
    host, port = where.rsplit(":", 1)
    s = socket.create_connection((host, int(port)), 5)
s.sendall(f"GET {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode())
answer = b""
while data := s.recv(4096):
    answer += data
print(answer.split()[1].decode())
"""


@pytest.fixture
async def pair(
    sandbox_settings: SandboxSettings, run_dir: Path, tasks: BackgroundTasks
) -> AsyncIterator[tuple[Sandbox, Sandbox]]:
    """Two sandboxes, of the episodes ep_one and ep_two."""
    provider = docker_provider(sandbox_settings, run_dir)
    try:
        await provider.start(agents_of(EchoApp()), tasks)
        one, two = await asyncio.gather(provider.create(SPEC), provider.create(SPEC))
        one.admit("ep_one")
        two.admit("ep_two")
        yield one, two
    finally:
        await provider.close()


async def python(sandbox: Sandbox, script: str, *arguments: str, user: User = User.AGENT) -> str:
    result = await sandbox.exec(Command(("python3", "-c", script, *arguments), user=user, timeout_s=100))
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def tried(sandbox: Sandbox, targets: list[object], user: User = User.AGENT) -> dict[str, str]:
    answers: dict[str, str] = json.loads(await python(sandbox, TRY, json.dumps(targets), user=user))
    return answers


def tried_here(targets: list[object]) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", TRY, json.dumps(targets)], capture_output=True, check=True)
    answers: dict[str, str] = json.loads(done.stdout)
    return answers


def own_addresses() -> set[str]:
    """Of this machine, the Docker bridge's among them."""
    listed = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    return {"127.0.0.1", *(address for address in listed if ":" not in address)}


@contextmanager
def listening() -> Iterator[tuple[int, str]]:
    """A TCP port on every address of the host, and an abstract Unix socket: a control API, an engine, …"""
    abstract = f"@turnstile-test-{os.getpid()}"
    with socket.create_server(("0.0.0.0", 0), backlog=64) as tcp, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + abstract[1:])
        unix.listen(64)
        yield tcp.getsockname()[1], abstract


@pytest.mark.parametrize("user", list(User))
async def test_no_listener_of_the_host_and_no_other_host_can_be_reached(
    pair: tuple[Sandbox, Sandbox], user: User
) -> None:
    with listening() as (port, abstract):
        here: list[object] = [*([address, port] for address in own_addresses()), abstract]
        assert set((await asyncio.to_thread(tried_here, here)).values()) == {"reached"}
        elsewhere: list[object] = [["1.1.1.1", 443], ["169.254.169.254", 80], ["172.17.0.1", 22]]
        names: list[object] = ["dns:example.com", "dns:host.docker.internal", "dns:pypi.org"]
        answers = await tried(pair[0], [*here, *elsewhere, *names], user)
    assert "reached" not in answers.values(), answers
    assert len(answers) == len(here) + len(elsewhere) + len(names)


async def test_there_is_no_interface_but_the_loopback(pair: tuple[Sandbox, Sandbox]) -> None:
    assert await python(pair[0], "import socket; print([n for _, n in socket.if_nameindex()])") == "['lo']"


async def test_the_engines_socket_and_other_sandboxes_are_not_there(
    pair: tuple[Sandbox, Sandbox], run_dir: Path
) -> None:
    one, two = pair
    engine_socket = engine().api.base_url
    targets = ["/var/run/docker.sock", "/run/docker.sock", str(run_dir / two.sandbox_id / GATE_SOCKET)]
    if host := os.environ.get("DOCKER_HOST", "").removeprefix("unix://"):
        targets.append(host)
    answers = await tried(one, list(targets))
    assert set(answers.values()) == {"FileNotFoundError"}, (answers, engine_socket)
    listed = await python(one, f"import os; print(sorted(os.listdir({SOCKET_TARGET!r})))")
    assert listed == f"['{GATE_SOCKET}']"


async def test_the_door_serves_its_own_episode_and_no_other(pair: tuple[Sandbox, Sandbox]) -> None:
    one, two = pair
    gate = f"{SOCKET_TARGET}/{GATE_SOCKET}"
    for sandbox, own, other in ((one, "ep_one", "ep_two"), (two, "ep_two", "ep_one")):
        assert sandbox.agent_url is not None
        for where in (gate, sandbox.agent_url.removeprefix("http://")):
            assert await python(sandbox, GET, where, f"/e/{own}/v1/models") == "200"
            for path in (f"/e/{other}/v1/models", "/episodes", "/health", "/"):
                assert await python(sandbox, GET, where, path) == "404", path
    one.admit(None)
    assert await python(one, GET, gate, "/e/ep_one/v1/models") == "404"


@pytest.mark.parametrize("user", list(User))
async def test_the_helper_cannot_be_impersonated_killed_or_read(pair: tuple[Sandbox, Sandbox], user: User) -> None:
    answers = await tried(pair[0], [f"{SOCKET_TARGET}/{HELPER_SOCKET}"], user)
    assert set(answers.values()) == {"FileNotFoundError"}
    script = """
import os, signal
for name, attempt in {
    "environ": lambda: open("/proc/1/environ", "rb").read(),
    "mem": lambda: open("/proc/1/mem", "rb").read(1),
    "fd": lambda: os.listdir("/proc/1/fd"),
    "root": lambda: os.listdir("/proc/1/root"),
    "kill": lambda: os.kill(1, signal.SIGKILL),
    "stop": lambda: os.kill(1, signal.SIGSTOP),
    "setuid": lambda: os.setuid(0),
    "other user": lambda: os.setuid(os.getuid() ^ 1),
}.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""
    assert await python(pair[0], script, user=user) == ""


async def test_agent_and_tests_cannot_touch_each_others_processes_or_homes(pair: tuple[Sandbox, Sandbox]) -> None:
    sandbox = pair[0]
    running = await sandbox.start(Command(("sh", "-c", "echo s > ~/secret; exec sleep 1000"), user=User.TESTS))
    script = """
import os, signal, time
found = []
while not found:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{name}/cmdline").read().startswith("sleep"):
                found.append(int(name))
        except OSError:
            pass
for attempt in (
    lambda: os.kill(found[0], signal.SIGKILL),
    lambda: open(f"/proc/{found[0]}/environ").read(),
    lambda: os.listdir("/home/tests"),
    lambda: open("/home/tests/secret").read(),
):
    try:
        attempt()
    except PermissionError:
        continue
    print("it could")
"""
    assert await python(sandbox, script) == ""
    await running.kill()
    assert (await running.wait()).exit_code == 137
