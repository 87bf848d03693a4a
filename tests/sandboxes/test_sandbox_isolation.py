"""What code inside a sandbox cannot reach, on every backend: the network, the host, its neighbours, the helper,
other episodes. Each is tried for real."""

from __future__ import annotations

import asyncio
import itertools
import socket
from pathlib import Path

import pytest
from echo_app import EchoApp
from sandbox_providers import LIMITS, SPEC, Backend

from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.sandboxes.protocol import Command, ExecResult, Mount, SandboxProvider, SandboxSpec, User
from waiting import wait_until

pytestmark = pytest.mark.anyio

_GET = """
import http.client, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
for path in sys.argv[2:]:
    connection.request("GET", path)
    response = connection.getresponse()
    print(response.status, response.read().decode())
"""

_CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print("REACHED", address)
    except OSError as error:
        print("refused", address, type(error).__name__)
"""


async def python(sandbox: HelperSandbox, script: str, *arguments: str, user: User = User.AGENT) -> ExecResult:
    return await sandbox.exec(Command(("python3", "-c", script, *arguments), user=user, timeout_s=60))


async def get(sandbox: HelperSandbox, *paths: str) -> list[str]:
    assert sandbox.agent_url is not None
    result = await python(sandbox, _GET, sandbox.agent_url, *paths)
    assert result.exit_code == 0, result
    return result.stdout.decode().splitlines()


@pytest.mark.slow
async def test_the_door_serves_the_admitted_episode_and_no_other(
    sandbox: HelperSandbox, echo_app: EchoApp
) -> None:
    (answer,) = await get(sandbox, "/e/one/v1/models")
    assert answer.startswith("404")
    sandbox.admit("one")
    paths = [
        "/e/one/mcp",
        "/e/two/mcp",
        "/e/one",
        "/e/onetwo/mcp",
        "/e//one/mcp",
        "/health",
        "/episodes",
        "/x/e/one/",
    ]
    answers = await get(sandbox, *paths)
    assert answers[0] == "200 GET /e/one/mcp 0"
    assert [answer[:3] for answer in answers[1:]] == ["404"] * 7
    assert echo_app.paths == ["/e/one/mcp"]
    # What the app behind reads as the episode is what was compared, however it was written.
    await get(sandbox, "/e/one/../two/mcp", "/e/%6fne/mcp", "/e/one/%2e%2e/two")
    assert {path.split("/")[2] for path in echo_app.paths} == {"one"}
    sandbox.admit(None)
    assert (await get(sandbox, "/e/one/mcp"))[0].startswith("404")


async def test_the_door_streams(sandbox: HelperSandbox, echo_app: EchoApp) -> None:
    sandbox.admit("one")
    script = _GET.replace(
        "print(response.status, response.read().decode())",
        "open('first', 'wb').write(response.read1(5)); print(response.read().decode())",
    )
    assert sandbox.agent_url is not None
    asking = asyncio.create_task(python(sandbox, script, sandbox.agent_url, "/e/one/stream"))

    async def first_half_came() -> bool:
        return (await sandbox.exec(Command(("cat", "first")))).stdout == b"first"

    await wait_until(first_half_came, "the first half comes before the second is sent")
    echo_app.go_on.set()
    assert (await asking).stdout == b"second\n"


@pytest.mark.slow
async def test_a_caller_that_is_killed_is_seen_to_have_left(sandbox: HelperSandbox, echo_app: EchoApp) -> None:
    sandbox.admit("one")
    assert sandbox.agent_url is not None
    asking = await sandbox.start(Command(("python3", "-c", _GET, sandbox.agent_url, "/e/one/stream")))
    await wait_until(lambda: echo_app.paths)
    await asking.kill()
    await echo_app.caller_left.wait()


@pytest.mark.slow
async def test_a_large_body_passes_the_door_both_ways_at_once(sandbox: HelperSandbox) -> None:
    sandbox.admit("one")
    script = """
import http.client, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
connection.request("POST", "/e/one/mcp", body=bytes(5_000_000))
print(connection.getresponse().read().decode())
"""
    assert sandbox.agent_url is not None
    results = await asyncio.gather(*(python(sandbox, script, sandbox.agent_url) for _ in range(4)))
    assert [result.stdout for result in results] == [b"POST /e/one/mcp 5000000\n"] * 4


@pytest.mark.slow
async def test_an_answer_arrives_that_comes_before_its_request_was_read(sandbox: HelperSandbox) -> None:
    sandbox.admit("one")
    script = """
import http.client, sys, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
for size in (100, 70_000, 5_000_000):
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.request("POST", "/e/one/early", body=bytes(size), headers={"connection": "close"})
    print(connection.getresponse().read().decode())
"""
    assert sandbox.agent_url is not None
    results = await asyncio.gather(*(python(sandbox, script, sandbox.agent_url) for _ in range(4)))
    assert [result.stdout for result in results] == [b"POST /e/one/early 0\n" * 3] * 4


@pytest.mark.slow
async def test_connections_without_end_take_nothing_from_commands(sandbox: HelperSandbox) -> None:
    script = """
import socket, sys, time, urllib.parse
url = urllib.parse.urlsplit(sys.argv[1])
held = []
for _ in range(900):
    try:
        held.append(socket.create_connection((url.hostname, url.port), timeout=5))
    except OSError:
        break
print(len(held), flush=True)
open("held", "w").close()
time.sleep(60)
"""
    assert sandbox.agent_url is not None
    sandbox.admit("one")
    holder = await sandbox.start(Command(("python3", "-c", script, sandbox.agent_url)))
    for _ in range(1000):
        if (await sandbox.exec(Command(("test", "-e", "held")))).exit_code == 0:
            break
    await sandbox.write(f"{sandbox.workdir}/file", b"still")
    assert await sandbox.read(f"{sandbox.workdir}/file", 10) == b"still"
    await holder.kill()
    assert (await get(sandbox, "/e/one/mcp"))[0].startswith("200")


@pytest.mark.slow
async def test_no_network_is_reached(sandbox: HelperSandbox) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        host = socket.gethostbyname(socket.gethostname())
        addresses = [
            f"127.0.0.1:{port}",
            f"{host}:{port}",
            f"172.17.0.1:{port}",
            "1.1.1.1:53",
            "169.254.169.254:80",
        ]
        result = await python(sandbox, _CONNECT, *addresses)
    assert result.stdout.count(b"refused") == len(addresses), result
    lookup = await python(sandbox, "import socket; print(socket.getaddrinfo('example.com', 80))")
    assert lookup.exit_code != 0
    listed = await sandbox.exec(Command(("sh", "-c", "cat /etc/resolv.conf 2>/dev/null || true")))
    told = {line.split()[-1] for line in listed.stdout.decode().splitlines() if line and not line.startswith("#")}
    assert told <= {"127.0.0.1", "."}, "name servers and domains of the machine's network"


async def test_the_hosts_sockets_are_out_of_reach(sandbox: HelperSandbox) -> None:
    name = "\0turnstile-test-abstract"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        script = "import socket; socket.socket(socket.AF_UNIX).connect('\\0turnstile-test-abstract')"
        assert (await python(sandbox, script)).exit_code != 0
    find = "find / -xdev -type s 2>/dev/null; find /run /tmp /var -type s 2>/dev/null"
    found = await sandbox.exec(Command(("sh", "-c", find)))
    # The endpoint's; the helper's is gone since it was used.
    assert set(found.stdout.split()) <= {b"/run/turnstile/gate.sock"}
    assert (await sandbox.exec(Command(("ls", "/run/turnstile/helper.sock")))).exit_code != 0


async def test_the_list_of_sockets_names_no_folder_of_the_machine(sandbox: HelperSandbox, run_dir: Path) -> None:
    """The server's ends of the sandbox's connections are in the sandbox's own list, as they were bound."""
    script = """
import socket
with socket.socket(socket.AF_UNIX) as gate:
    try:
        gate.connect("/run/turnstile/gate.sock")
    except FileNotFoundError:
        pass  # carried: the server has no socket in there
    print(open("/proc/net/unix").read())
"""
    listed = (await python(sandbox, script)).stdout.decode()
    assert listed.startswith("Num ")
    names = {line.split()[7] for line in listed.splitlines()[1:] if len(line.split()) > 7}
    folders = ("/proc/self/fd/", "/run/turnstile/")
    assert [name for name in names if not name.startswith(folders)] == []
    assert run_dir.name not in listed


async def test_the_system_cannot_be_written_to(sandbox: HelperSandbox) -> None:
    for path in (
        "/planted",
        "/usr/planted",
        "/etc/planted",
        "/dev/planted",
        "/run/planted",
        "/turnstile/helper/x",
    ):
        assert (await sandbox.exec(Command(("touch", path)))).exit_code != 0, path


async def test_a_mounted_folder_is_read_only(
    provider: SandboxProvider, run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mounted")
    (folder / "file").write_text("given")
    for part in (folder, *folder.parents[:2]):
        part.chmod(0o755)
    sandbox = await provider.create(SandboxSpec(LIMITS, mounts=(Mount(folder, "/opt/agents/one"),)))
    assert await sandbox.read("/opt/agents/one/file", 10) == b"given"
    assert (await sandbox.exec(Command(("touch", "/opt/agents/one/planted")))).exit_code != 0
    assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.slow
async def test_sandboxes_see_nothing_of_each_other(provider: SandboxProvider) -> None:
    one, other = await asyncio.gather(provider.create(SPEC), provider.create(SPEC))
    for folder in (one.workdir, "/tmp", "/dev/shm"):
        await one.write(f"{folder}/note", b"mine")
        assert (await other.exec(Command(("ls", f"{folder}/note")))).exit_code != 0
    process = await one.start(Command(("sleep", "7654")))
    seen = await other.exec(Command(("sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")))
    assert b"7654" not in seen.stdout
    await other.stop_all()
    await one.exec(Command(("true",)))
    await process.kill()
    one.admit("one")
    other.admit("other")
    assert isinstance(other, HelperSandbox)
    assert (await get(other, "/e/one/mcp"))[0].startswith("404")


_ATTACK = """
import ctypes, os, signal, sys
helper = 1
def tried(what, action):
    try:
        action()
    except OSError as error:
        print("refused", what)
    else:
        print("DONE", what)
libc = ctypes.CDLL(None, use_errno=True)
def check(code):
    if code < 0:
        raise OSError(ctypes.get_errno(), "")
tried("trace", lambda: check(libc.ptrace(16, helper, 0, 0)))
tried("memory", lambda: open(f"/proc/{helper}/mem", "rb"))
tried("environment", lambda: open(f"/proc/{helper}/environ", "rb").read(1))
tried("descriptors", lambda: os.open(f"/proc/{helper}/fd/0", os.O_RDONLY))
tried("root", lambda: os.setuid(0))
tried("name space", lambda: check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
    try:
        os.kill(helper, number)
    except OSError:
        pass
"""


@pytest.mark.parametrize("user", list(User))
async def test_no_command_can_act_on_the_helper(sandbox: HelperSandbox, user: User) -> None:
    result = await python(sandbox, _ATTACK, user=user)
    assert result.exit_code == 0, result
    assert b"DONE" not in result.stdout, result
    assert result.stdout.count(b"refused") == 6
    # It was sent SIGKILL, SIGSTOP and SIGTERM.
    assert (await sandbox.exec(Command(("echo", "well"), timeout_s=30))).stdout == b"well\n"


@pytest.mark.slow
async def test_users_cannot_act_on_each_other(sandbox: HelperSandbox, backend: Backend) -> None:
    assert sandbox.own_uids == backend.own_uids
    for user, other in itertools.permutations(User, 2):
        process = await sandbox.start(
            Command(
                ("sh", "-c", "umask 077; echo secret > $HOME/note; echo $$ > /tmp/$0-$1; sleep 60", user, other),
                user=other,
            )
        )
        for _ in range(1000):
            pid = await sandbox.exec(Command(("cat", f"/tmp/{user}-{other}"), user=other))
            if pid.stdout:
                break
        killing = await sandbox.exec(Command(("sh", "-c", f"kill -9 {int(pid.stdout)}"), user=user))
        reading = await sandbox.exec(Command(("cat", f"/home/{other}/note"), user=user))
        assert killing.exit_code != 0
        assert reading.exit_code != 0
        await process.kill()


@pytest.mark.slow
async def test_each_sandbox_has_uids_of_its_own(provider: SandboxProvider, backend: Backend) -> None:
    """The kernel keeps some things per uid for the whole machine: keyrings, counts of processes, of watches."""
    seen = set()
    for _ in range(2):
        sandbox = await provider.create(SPEC)
        for user in User:
            ids = await sandbox.exec(Command(("sh", "-c", "id -u; id -g; id -G; stat -c %u ~"), user=user))
            (uid,) = set(ids.stdout.split())
            seen.add(uid)
    assert len(seen) == (2 * len(User) if backend.own_uids else 1)


async def test_no_command_has_a_capability_or_can_gain_one(sandbox: HelperSandbox) -> None:
    status = (await sandbox.exec(Command(("cat", "/proc/self/status")))).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert [int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")] == [0, 0, 0]
    assert fields["NoNewPrivs"] == "1"


async def test_losing_the_servers_connection_ends_everything_inside(
    sandbox: HelperSandbox, backend: Backend, run_dir: Path
) -> None:
    process = await sandbox.start(Command(("sleep", "7655")))
    await sandbox._client._stream.aclose()
    with pytest.raises(Exception, match="sandbox"):
        await process.wait()
    assert sandbox.lost.is_set()
    await sandbox.destroy()
    assert backend.traces(sandbox.sandbox_id, run_dir) == []


async def test_where_memory_runs_out_commands_are_killed_before_the_helper_and_the_server(
    sandbox: HelperSandbox,
) -> None:
    """Also where the helper may not write its own files in /proc: its user is not root, and its memory hidden."""
    score = "/proc/self/oom_score_adj"
    for user in User:
        command = Command(("sh", "-c", f"cat {score}; echo 0 > {score}; cat {score}"), user=user)
        first, *after = (await sandbox.exec(command)).stdout.decode().split()
        assert first == "900", user
        if sandbox.compartments:  # elsewhere it has a control group of its own, or a machine's memory
            assert after == ["900"], user
