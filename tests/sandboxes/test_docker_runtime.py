"""Which kernel a runtime has, and what its containers get for it; without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docker_support import RUNSC, container_of, gvisor_provider
from echo_app import EchoApp, agents_of
from sandbox_providers import LIMITS, SPEC

from turnstile_server.errors import SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.inspected import Image
from turnstile_server.sandboxes.docker.runtime import ContainerRuntime
from turnstile_server.sandboxes.docker.transport import BIND, STREAM, EngineTransport
from turnstile_server.settings import SandboxSettings

pytestmark = pytest.mark.anyio

IMAGE = Image("sha256:1", (), "/bin", "amd64")
OVERHEAD = {"Memory": 256 << 20, "MemorySwap": 256 << 20, "PidsLimit": 2048}


class TellingEngine(DockerEngine):
    """``says``: what the container prints; an error is raised where it would start."""

    def __init__(self, settings: SandboxSettings, says: str | Exception, default: str = "runc") -> None:
        super().__init__(settings)
        self.says = says
        self.default = default
        self.made: list[dict[str, Any]] = []
        self.removed: list[str] = []

    async def default_runtime(self) -> str:
        return self.default

    async def runtimes(self) -> list[str]:
        return ["runc", "runsc"]

    async def kernel(self) -> str:
        return "6.1.0"

    async def create(self, name: str, body: Mapping[str, Any], *, image_name: str) -> str:
        self.made.append({**body["HostConfig"], "overhead": dict(self.overhead)})
        return name

    async def start(self, container: str, *, image_name: str) -> None:
        if isinstance(self.says, Exception):
            raise self.says

    async def wait(self, container: str) -> int:
        return 0

    async def log(self, container: str, max_chars: int = 2000) -> str:
        return str(self.says)

    async def remove(self, container: str) -> None:
        self.removed.append(container)


def made(
    says: str | Exception, default: str = "runc", **settings: Any
) -> tuple[TellingEngine, ContainerRuntime, SandboxSettings]:
    chosen = SandboxSettings(**settings)
    engine = TellingEngine(chosen, says, default)
    return engine, ContainerRuntime(engine, chosen, {}), chosen


@pytest.mark.parametrize("settings", [{}, {"docker_runtime": "runc"}])
async def test_runc_is_not_tried_and_gets_nothing_more(settings: dict[str, str]) -> None:
    engine, runtime, _ = made("", **settings)
    await runtime.check()
    assert not (await runtime.kernel(IMAGE)).own
    assert (engine.made, engine.overhead, runtime.description) == ([], {}, "runc")


async def test_a_runtime_that_shares_the_kernel_gets_nothing_more() -> None:
    engine, runtime, _ = made("6.1.0", docker_runtime="runsc")
    await runtime.check()
    assert not (await runtime.kernel(IMAGE)).own
    assert engine.overhead == {}


@pytest.mark.parametrize("default", ["runc", "runsc"])
async def test_a_runtime_with_its_own_kernel_gets_room_for_it(default: str) -> None:
    named = {} if default == "runsc" else {"docker_runtime": "runsc"}
    engine, runtime, _ = made("4.4.0", default, **named)
    await runtime.check()
    for _ in range(2):
        assert (await runtime.kernel(IMAGE)).own
    assert [each["overhead"] for each in engine.made] == [OVERHEAD]  # what asks needs the room, too
    assert engine.overhead == OVERHEAD
    assert len(engine.removed) == 1
    assert runtime.description == "runsc with a kernel of its own (4.4.0)"


async def test_an_image_that_cannot_tell_is_taken_for_a_kernel_of_its_own() -> None:
    engine, runtime, _ = made(TaskFailed("no python3"), docker_runtime="runsc")
    await runtime.check()
    assert (await runtime.kernel(IMAGE)).own
    assert engine.overhead == OVERHEAD
    assert len(engine.removed) == 1


async def test_a_runtime_that_starts_nothing_is_named_with_what_it_said() -> None:
    engine, runtime, _ = made(SandboxUnavailable("OCI runtime start failed: EOF"), docker_runtime="runsc")
    await runtime.check()
    with pytest.raises(SandboxUnavailable, match=r"runtime runsc .*docker_runtime.* no container: .*EOF"):
        await runtime.kernel(IMAGE)
    assert len(engine.removed) == 1


async def test_an_unknown_runtime_is_a_start_error_that_names_those_that_are_there() -> None:
    _, runtime, _ = made("", docker_runtime="kata")
    with pytest.raises(StartupError, match=r"no runtime kata .*only runc, runsc\. .*daemon\.json"):
        await runtime.check()


@pytest.mark.parametrize(
    ("wanted", "says", "transport"),
    [("auto", "6.1.0", BIND), ("auto", "4.4.0", STREAM), ("bind", "4.4.0", BIND), ("stream", "6.1.0", STREAM)],
)
async def test_a_kernel_of_its_own_is_reached_by_the_stream_unless_a_transport_is_named(
    wanted: str, says: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runtime, _ = made(says, docker_runtime="runsc")
    await runtime.check()
    chooser = EngineTransport(engine, runtime, None, wanted, tmp_path)  # type: ignore[arg-type]

    async def sees(image: Image) -> str | None:
        return None

    monkeypatch.setattr(chooser, "_why_blind", sees)
    assert (await chooser.choose(IMAGE)).transport == transport


@pytest.mark.docker
@pytest.mark.runsc
@pytest.mark.skipif(not RUNSC, reason="needs an engine with runsc: scripts/ci_runsc.sh test")
async def test_gvisor_is_recognized_and_its_containers_have_room_for_it(
    sandbox_settings: SandboxSettings, run_dir: Path, tasks: BackgroundTasks
) -> None:
    provider = gvisor_provider(sandbox_settings, run_dir)
    try:
        await provider.start(agents_of(EchoApp()), tasks)
        sandbox = await provider.create(SPEC)
        host = container_of(sandbox.sandbox_id).attrs["HostConfig"]
        assert host["Runtime"] == RUNSC
        assert host["Memory"] == host["MemorySwap"] == LIMITS.memory_bytes + OVERHEAD["Memory"]
        assert host["PidsLimit"] == LIMITS.pids + OVERHEAD["PidsLimit"]
        assert f"runtime {RUNSC} with a kernel of its own (4." in provider.description
        assert "transport stream" in provider.description
    finally:
        await provider.close()
