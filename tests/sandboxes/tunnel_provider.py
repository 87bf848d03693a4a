"""A sandbox backend without a shared file system: plain processes that reach the agent app over TCP and a tunnel.

It stands for a remote backend and proves the seam: it mounts no socket, serves no HTTP and knows no agent app.
The near end of the tunnel connects to the listener with its token; the far end is a port of the sandbox.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import anyio
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.stapled import MultiListener

from turnstile_server.egress.log import NetworkLog
from turnstile_server.egress.policy import NetworkPhase
from turnstile_server.errors import SandboxDeath
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint, TcpEpisodeListener
from turnstile_server.sandboxes.protocol import (
    MADE_AT_ONCE,
    Command,
    ExecResult,
    ImageFacts,
    Process,
    ProviderSetup,
    SandboxSpec,
    User,
)


class Tunnel:
    """Carries every connection to ``port`` on to the listener's address."""

    def __init__(self, ears: MultiListener[anyio.abc.SocketStream], listener: TcpEpisodeListener) -> None:
        self._ears = ears
        self._listener = listener
        self.port = ears.extra(SocketAttribute.local_port)

    async def run(self) -> None:
        await self._ears.serve(self._carry)

    async def _carry(self, far: ByteStream) -> None:
        near = await anyio.connect_tcp(*self._listener.address)
        async with far, near, anyio.create_task_group() as both:
            await near.send(self._listener.token.encode() + b"\n")
            both.start_soon(_pump, far, near)
            both.start_soon(_pump, near, far)

    async def close(self) -> None:
        await self._ears.aclose()


async def _pump(source: ByteStream, target: ByteStream) -> None:
    try:
        async for data in source:
            await target.send(data)
        await target.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        await target.aclose()


class TunnelSandbox:
    origin = MADE_AT_ONCE

    def __init__(self, number: int, listener: TcpEpisodeListener, tunnel: Tunnel, tasks: BackgroundTasks) -> None:
        self.sandbox_id = f"tunnel-{number}"
        self._folder = TemporaryDirectory()
        self.workdir = self._folder.name
        self.agent_url: str | None = f"http://127.0.0.1:{tunnel.port}"
        self._listener = listener
        self._tunnel = tunnel
        self._dead = anyio.Event()
        self._tunnelling = tasks.start(tunnel.run, name=self.sandbox_id, shielded=False)

    def admit(self, episode_id: str | None) -> None:
        self._listener.admit(episode_id)

    def enter_phase(self, phase: NetworkPhase | None, log: NetworkLog | None = None) -> None:
        """It has no network."""

    async def exec(self, command: Command) -> ExecResult:
        done = await anyio.run_process(
            list(command.argv), input=command.stdin, cwd=command.cwd or self.workdir, env=command.env, check=False
        )
        return ExecResult(done.returncode, done.stdout, done.stderr, 0, timed_out=False, duration_s=0.0)

    async def start(self, command: Command) -> Process:
        raise NotImplementedError

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await anyio.Path(path).read_bytes()

    async def write(self, path: str, data: bytes, *, mode: int | None = None, user: User = User.AGENT) -> None:
        await anyio.Path(path).write_bytes(data)

    async def upload(self, archive: bytes, target: str, *, user: User = User.AGENT) -> None:
        await self.exec(Command(("tar", "-xf", "-", "-C", target), stdin=archive))

    async def download(self, path: str, max_bytes: int) -> bytes:
        return (await self.exec(Command(("tar", "-cf", "-", "-C", path, ".")))).stdout

    async def stop_all(self) -> None:
        """No command outlives its call."""

    async def died(self) -> SandboxDeath:
        await self._dead.wait()
        return SandboxDeath.OUTSIDE

    async def destroy(self) -> None:
        self._dead.set()
        self._tunnelling.cancel()
        await self._tunnel.close()
        await self._listener.close()
        self._folder.cleanup()


class TunnelProvider:
    name = "tunnel"
    isolated = False
    description = "tunnel: a process on this machine, without isolation"
    missing: str | None = None
    carries_runtime = False

    def __init__(self, setup: ProviderSetup) -> None:
        self._agents: AgentEndpoint | None = None
        self._tasks: BackgroundTasks | None = None
        self.made: list[TunnelSandbox] = []

    async def start(self, agents: AgentEndpoint, tasks: BackgroundTasks) -> None:
        self._agents, self._tasks = agents, tasks

    async def create(self, spec: SandboxSpec) -> TunnelSandbox:
        assert self._agents is not None
        assert self._tasks is not None
        listener = await self._agents.listen_tcp()
        tunnel = Tunnel(await anyio.create_tcp_listener(local_host="127.0.0.1"), listener)
        self.made.append(TunnelSandbox(len(self.made), listener, tunnel, self._tasks))
        return self.made[-1]

    async def image_facts(self, image: str | None) -> ImageFacts | None:
        return None

    async def close(self) -> None:
        for sandbox in self.made:
            await sandbox.destroy()
