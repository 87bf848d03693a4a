"""The network as code inside a sandbox finds it: the hosts of its phase through the proxy, and nothing else."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from docker_support import KNOWN_IMAGES, OWNERS, bare_image, python_image, remove_volumes
from echo_app import EchoApp, agents_of
from egress_support import Hosts, Names
from sandbox_providers import LIMITS

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import HostRule, NetworkPhase, NetworkPolicy
from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.errors import SandboxUnavailable, TaskFailed
from turnstile_server.grading.inside import launch as launch_module
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.sandboxes.local.provider import LocalProvider
from turnstile_server.sandboxes.pool import SandboxPool
from turnstile_server.sandboxes.protocol import Command, Sandbox, SandboxProvider, SandboxSpec, User
from turnstile_server.settings import EgressSettings, SandboxSettings
from turnstile_server.settings.host_patterns import parse_pattern
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio
LAUNCH = Path(launch_module.__file__).read_bytes()
PROBE = Path(__file__).with_name("probe.py").read_text()
UNREACHABLE = f"OSError {errno.ENETUNREACH}"
REFUSED = f"ConnectionRefusedError {errno.ECONNREFUSED}"
Make = Callable[[SandboxSettings, Path, EgressProxy | None], SandboxProvider]


def _docker(transport: str) -> Make:
    def make(settings: SandboxSettings, run_dir: Path, egress: EgressProxy | None) -> SandboxProvider:
        OWNERS.add(run_dir.name)
        chosen = settings.model_copy(update={"docker_image": python_image(), "docker_transport": transport})
        return DockerProvider(chosen, run_dir, run_dir.name, known_images=KNOWN_IMAGES, egress=egress)

    return make


def _local(as_root: bool) -> Make:
    return lambda settings, run_dir, egress: LocalProvider(settings, run_dir, as_root=as_root, egress=egress)


LOCAL = {"local-one-uid": _local(False), **({"local": _local(True)} if os.geteuid() == 0 else {})}
BACKENDS = [
    *(pytest.param(make, id=name) for name, make in LOCAL.items()),
    pytest.param(_docker("bind"), id="docker", marks=pytest.mark.docker),
]
STREAM = pytest.param(_docker("stream"), id="docker-stream", marks=pytest.mark.docker)


@pytest.fixture(scope="module", autouse=True)
def no_volumes_left() -> Any:
    yield
    if OWNERS:
        remove_volumes()


@pytest.fixture
def settings() -> SandboxSettings:
    return SandboxSettings(kind="local")


@pytest.fixture
def echo_app() -> EchoApp:
    return EchoApp()


@pytest.fixture
def egress(names: Names) -> EgressProxy:
    return EgressProxy(EgressSettings(allow=("*",), allow_addresses=("127.0.0.0/8",), max_open=4), names)


@asynccontextmanager
async def started(
    make: Make, settings: SandboxSettings, folder: Path, echo_app: EchoApp, egress: EgressProxy
) -> AsyncIterator[SandboxProvider]:
    made = make(settings, folder / "run", egress)
    (folder / "run").mkdir()
    async with BackgroundTasks() as tasks:
        try:
            await made.start(agents_of(echo_app), tasks)
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.close()


@pytest.fixture(params=BACKENDS)
async def provider(
    request: pytest.FixtureRequest, settings: SandboxSettings, folder: Path, echo_app: EchoApp, egress: EgressProxy
) -> AsyncIterator[SandboxProvider]:
    async with started(request.param, settings, folder, echo_app, egress) as made:
        yield made


@pytest.fixture(params=[*BACKENDS, STREAM])
async def any_provider(
    request: pytest.FixtureRequest, settings: SandboxSettings, folder: Path, echo_app: EchoApp, egress: EgressProxy
) -> AsyncIterator[SandboxProvider]:
    """Also over the transport that shares no socket with the sandbox."""
    async with started(request.param, settings, folder, echo_app, egress) as made:
        yield made


def rules(*patterns: str) -> tuple[HostRule, ...]:
    parsed = map(parse_pattern, patterns)
    return tuple(HostRule(pattern, (443, 80) if pattern.port is None else (pattern.port,)) for pattern in parsed)


def spec(policy: NetworkPolicy | None) -> SandboxSpec:
    return SandboxSpec(LIMITS, network=policy)


async def probe(sandbox: Sandbox, *, user: User = User.AGENT, **wanted: Any) -> dict[str, Any]:
    asked = {"urls": [], "tunnels": [], "tcp": [], **wanted}
    argv = ("python3", "-c", PROBE, json.dumps(asked))
    done = await sandbox.exec(Command(argv, user=user, timeout_s=60))
    assert done.exit_code == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def environment(sandbox: Sandbox) -> bytes:
    """Of a command."""
    return (await sandbox.exec(Command(("env",)))).stdout


@pytest.mark.slow
async def test_only_the_hosts_of_the_list_are_reached_from_inside(
    any_provider: SandboxProvider, hosts: Hosts, names: Names, echo_app: EchoApp
) -> None:
    names.answers["rebind.test"] = [["169.254.169.254"]]
    mirror, secure = f"http://mirror.test:{hosts.http}/simple/", f"secure.test:{hosts.https}"
    listed = rules(f"*.test:{hosts.http}", secure, "169.254.169.254")
    sandbox = await any_provider.create(spec(NetworkPolicy(agent=listed)))
    log = NetworkLog(100)
    sandbox.admit("ep_1")
    sandbox.enter_phase(NetworkPhase.AGENT, log)
    assert sandbox.agent_url is not None
    gate, rebind = f"{sandbox.agent_url}/e/ep_1/hello", f"http://rebind.test:{hosts.http}/"
    metadata, evil, bare = "http://169.254.169.254/latest/", "http://evil.org/", f"http://test:{hosts.http}/"
    for user in (User.AGENT, User.HARNESS):
        found = await probe(
            sandbox,
            user=user,
            urls=[mirror, evil, bare, metadata, rebind, gate],
            tunnels=[(secure, "secure.test"), (secure, "evil.org"), ("evil.org:443", "evil.org")],
            tcp=[("1.1.1.1", 443), ("127.0.0.1", hosts.http), ("169.254.169.254", 80), ("172.17.0.1", 80)],
        )
        assert found[mirror][0] == 200
        assert found[gate] == [200, "GET /e/ep_1/hello 0"]
        for url, said in (
            (evil, "evil.org:80 is not on the allow-list of this task"),
            (bare, "is not on the allow-list"),
            (metadata, "is no public address"),
            (rebind, "is no public address"),
        ):
            assert found[url][0] == 403
            assert said in found[url][1]
        assert found[f"{secure} as secure.test"] == "through"
        assert re.search(r"(?i)alert", found[f"{secure} as evil.org"]), found
        assert found["evil.org:443 as evil.org"].startswith("HTTP/1.1 403 Refused by the network policy")
        assert found["tcp 1.1.1.1 443"] == UNREACHABLE
        assert found["tcp 169.254.169.254 80"] == UNREACHABLE
        assert found["tcp 172.17.0.1 80"] == UNREACHABLE
        assert found[f"tcp 127.0.0.1 {hosts.http}"] == REFUSED
        assert found["udp"] == UNREACHABLE
        assert found["dns"].startswith("gaierror ")
        for way in ("ping", "raw"):
            assert found[way] != "sent"
        address = found["environment"]["HTTP_PROXY"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address)
        assert found["environment"] == {
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address),
            **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
            "NODE_USE_ENV_PROXY": "1",
        }
        assert found["sockets"] == ["gate.sock", "net.sock"]
    assert [path for path in echo_app.paths if "hello" not in path] == []
    report = log.report("ep_1")
    assert {decision.host for decision in report.decisions} == {
        *("mirror.test", "evil.org", "test", "169.254.169.254", "rebind.test", "secure.test")
    }
    assert (report.allowed, report.refused) == (4, 12)


@pytest.mark.slow
async def test_a_phase_has_its_own_hosts_and_a_closed_one_has_none(
    provider: SandboxProvider, hosts: Hosts
) -> None:
    mirror, other = f"http://mirror.test:{hosts.http}/", f"http://other.test:{hosts.http}/"
    policy = NetworkPolicy(setup=rules(f"mirror.test:{hosts.http}"), tests=rules(f"other.test:{hosts.http}"))
    sandbox = await provider.create(spec(policy))
    assert b"PROXY" not in await environment(sandbox)
    found = {}
    for phase in (NetworkPhase.SETUP, NetworkPhase.TESTS):
        sandbox.enter_phase(phase)
        found[phase] = await probe(sandbox, urls=[mirror, other])
    assert (found[NetworkPhase.SETUP][mirror][0], found[NetworkPhase.SETUP][other][0]) == (200, 403)
    assert (found[NetworkPhase.TESTS][mirror][0], found[NetworkPhase.TESTS][other][0]) == (403, 200)
    assert b"HTTP_PROXY=http://127.0.0.1:" in await environment(sandbox)
    sandbox.enter_phase(NetworkPhase.AGENT)
    assert b"PROXY" not in await environment(sandbox)


@pytest.mark.slow
async def test_what_the_judge_runs_as_the_work_is_told_of_the_proxy(provider: SandboxProvider) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo("launch.py")
        info.size = len(LAUNCH)
        archive.addfile(info, io.BytesIO(LAUNCH))
    script = (
        "import sys; sys.path.insert(0, '/tmp/programs'); import launch\n"
        "print(launch.launch(['env'], stdio=(0, 1, 2)).wait())\n"
    )
    sandbox = await provider.create(spec(NetworkPolicy(tests=rules("a.test"))))
    await sandbox.upload(packed.getvalue(), "/tmp/programs")
    command = Command(("python3", "-c", script), user=User.TESTS, launches=User.WORK, timeout_s=60)
    assert b"PROXY" not in (await sandbox.exec(command)).stdout
    sandbox.enter_phase(NetworkPhase.TESTS)
    assert b"HTTP_PROXY=http://127.0.0.1:" in (await sandbox.exec(command)).stdout


async def test_what_a_phase_left_running_is_cut_with_it(provider: SandboxProvider, hosts: Hosts) -> None:
    authority = f"mirror.test:{hosts.http}"
    sandbox = await provider.create(spec(NetworkPolicy(setup=rules(authority))))
    log = NetworkLog(10)
    sandbox.enter_phase(NetworkPhase.SETUP, log)
    script = f"import urllib.request as u; print(len(u.urlopen('http://{authority}/silent').read()))"
    process = await sandbox.start(Command(("python3", "-c", script)))
    await wait_until(lambda: hosts.requests)
    sandbox.enter_phase(None)
    with anyio.fail_after(PATIENCE_S):
        assert (await process.wait()).exit_code == 1
    assert [decision.outcome for decision in log.report("ep").decisions] == ["ended"]


@pytest.mark.slow
async def test_a_sandbox_reaches_no_other_one_s_proxy(provider: SandboxProvider, hosts: Hosts) -> None:
    mirror = f"http://mirror.test:{hosts.http}/"
    first, second, third = [
        await provider.create(spec(policy))
        for policy in (
            NetworkPolicy(agent=rules(f"mirror.test:{hosts.http}")),
            NetworkPolicy(agent=rules("x.test")),
            None,
        )
    ]
    logs = [NetworkLog(10) for _ in range(3)]
    for sandbox, log in zip((first, second, third), logs, strict=True):
        sandbox.enter_phase(NetworkPhase.AGENT, log)
    assert (await probe(first, urls=[mirror]))[mirror][0] == 200
    assert (await probe(second, urls=[mirror]))[mirror][0] == 403
    found = await probe(third, urls=[mirror], tcp=[("127.0.0.1", 8002)])
    assert found["environment"] == {}
    assert found["sockets"] == ["gate.sock"]
    assert found["tcp 127.0.0.1 8002"] == REFUSED
    assert found[mirror].startswith("gaierror ")
    assert [log.report("ep").allowed + log.report("ep").refused for log in logs] == [1, 1, 0]


@pytest.mark.slow
async def test_connections_to_the_network_take_none_from_the_gate(
    any_provider: SandboxProvider, hosts: Hosts, egress: EgressProxy
) -> None:
    sandbox = await any_provider.create(spec(NetworkPolicy(agent=rules(f"mirror.test:{hosts.http}"))))
    sandbox.admit("ep_1")
    sandbox.enter_phase(NetworkPhase.AGENT)
    script = (
        "import os, socket, urllib.request as u\n"
        "port = int(os.environ['HTTP_PROXY'].rpartition(':')[2])\n"
        "held = [socket.create_connection(('127.0.0.1', port)) for _ in range(200)]\n"
        f"print(u.urlopen('{sandbox.agent_url}/e/ep_1/hello').status)\n"
    )
    done = await sandbox.exec(Command(("python3", "-c", script), timeout_s=60))
    assert done.stdout == b"200\n", done.stderr.decode()
    await sandbox.destroy()
    await wait_until(lambda: not egress.stats.open)


@pytest.mark.slow
async def test_sandboxes_in_a_pool_are_kept_apart_by_their_network(folder: Path, egress: EgressProxy) -> None:
    settings = SandboxSettings(kind="local", warm=1)
    pool = SandboxPool(LocalProvider(settings, folder / "run", egress=egress), settings)
    (folder / "run").mkdir()
    first, second = (spec(NetworkPolicy(agent=rules(host))) for host in ("a.test", "b.test"))
    assert first != second
    assert first == spec(NetworkPolicy(agent=rules("a.test")))
    async with BackgroundTasks() as tasks:
        try:
            await pool.start(agents_of(EchoApp()), tasks)
            await pool.create(first)
            sandbox = await pool.create(second)
            log = NetworkLog(5)
            sandbox.enter_phase(NetworkPhase.AGENT, log)
            found = await probe(sandbox, urls=["http://a.test/"])
            assert "b.test" in found["http://a.test/"][1]
        finally:
            with anyio.CancelScope(shield=True):
                await pool.close()


async def test_without_a_proxy_no_sandbox_with_a_network_is_made(folder: Path) -> None:
    provider = LocalProvider(SandboxSettings(), folder)
    async with BackgroundTasks() as tasks:
        await provider.start(agents_of(EchoApp()), tasks)
        with pytest.raises(SandboxUnavailable, match="no network for sandboxes"):
            await provider.create(spec(NetworkPolicy(agent=rules("a.test"))))
        await provider.close()


@pytest.mark.docker
async def test_an_image_without_python_gets_no_network(folder: Path, egress: EgressProxy) -> None:
    provider = _docker("bind")(SandboxSettings(docker_image=bare_image()), folder, egress)
    async with BackgroundTasks() as tasks:
        await provider.start(agents_of(EchoApp()), tasks)
        try:
            wanted = SandboxSpec(LIMITS, image=bare_image(), network=NetworkPolicy(agent=rules("a.test")))
            with pytest.raises(TaskFailed, match="cannot run the helper"):
                await provider.create(wanted)
        finally:
            await provider.close()
