"""A sandbox's folder on the host: the sockets that lead out of the sandbox, and nothing else.

``gate.sock`` is the listener of the agent endpoint, restricted to the one episode admitted; ``helper.sock`` waits
for the helper's one call and is then removed; ``net.sock`` is there only where the sandbox may reach hosts
(``network.py``). Owns the folder, the listeners and the helper's connection;
``close`` releases them. The folder is mounted into its own sandbox only, and lies in a folder that only the
server's user can enter: so the sockets' modes let every uid inside connect, and nobody else.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import ByteStream, Listener, SocketStream

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.endpoint import AgentEndpoint, EpisodeListener
from turnstile_server.sandboxes.helper import SOCKET_TARGET, SOCKET_VARIABLE, TOKEN_VARIABLE
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.network import NETWORK_SOCKET, SandboxNetwork
from turnstile_server.sandboxes.run_folder import remove_folder
from turnstile_server.unix_streams import listener_for_sandbox, serve_unix

GATE_SOCKET = "gate.sock"
HELPER_SOCKET = "helper.sock"
MAX_SOCKET_PATH = 107
"""unix(7): ``sun_path`` holds 108 bytes with the closing NUL."""
_HELLO_BYTES = 4096


class SandboxSockets:
    """Call ``open``, launch the helper with ``environment`` and with ``folder`` mounted at ``mounted_at``, wait in
    ``dialed_in``, and at the end ``close``, whatever happened before."""

    carried = False

    def __init__(
        self,
        folder: Path,
        agents: AgentEndpoint,
        tasks: BackgroundTasks,
        *,
        name: str,
        mounted_at: str = SOCKET_TARGET,
        network: SandboxNetwork | None = None,
    ) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(32)
        """Opens the helper's connection, once."""
        self.network = network
        self._agents = agents
        self._tasks = tasks
        self._mounted_at = mounted_at
        self._name = name
        self._gate: EpisodeListener | None = None
        self._answering: BackgroundTask[None] | None = None
        self._called = anyio.Event()
        """Set when ``_client`` is there: the helper has called."""
        self._client: HelperClient | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the helper's process needs to dial in. The token may never be in an argv."""
        return {TOKEN_VARIABLE: self.token, SOCKET_VARIABLE: f"{self._mounted_at}/{HELPER_SOCKET}"}

    @property
    def gate_inside(self) -> str:
        """Path of the agent endpoint's socket inside the sandbox."""
        return f"{self._mounted_at}/{GATE_SOCKET}"

    @property
    def network_inside(self) -> str:
        """The same of the proxy's."""
        return f"{self._mounted_at}/{NETWORK_SOCKET}"

    def admit(self, episode_id: str | None) -> None:
        """From now on ``gate.sock`` serves this episode's paths only; None serves none."""
        if self._gate is not None:
            self._gate.admit(episode_id)

    async def open(self) -> None:
        """Makes the folder and listens. Raises SandboxUnavailable; then nothing is left."""
        gate, helper = self.folder / GATE_SOCKET, self.folder / HELPER_SOCKET
        if len(os.fsencode(helper)) > MAX_SOCKET_PATH:
            raise SandboxUnavailable(
                f"{self.folder} is too long for Unix sockets; choose a shorter sandboxes.run_dir"
            )
        try:
            self.folder.mkdir(mode=0o755)
            self._gate = await self._agents.listen_unix(gate)
            if self.network is not None:
                await self.network.open(self.folder)
            listener = await listener_for_sandbox(helper)
        except OSError as error:
            await self.close()
            raise SandboxUnavailable(f"no sockets could be made in {self.folder}: {error.strerror}") from error
        answer = partial(self._answer_calls, listener)
        self._answering = self._tasks.start(answer, name=f"helper call {self._name}", shielded=False)

    async def dialed_in(self, timeout_s: float) -> HelperClient:
        """Waits for the helper's call. Raises SandboxUnavailable when none comes."""
        try:
            with anyio.move_on_after(timeout_s):
                await self._called.wait()
        finally:
            await self._stop_answering()
        if self._client is None:
            raise SandboxUnavailable(f"the sandbox's helper did not call within {timeout_s:g} s")
        return self._client

    async def close(self) -> None:
        """Cuts every connection, the helper's too, and removes the folder."""
        with anyio.CancelScope(shield=True):
            await self._stop_answering()
            if self._client is not None:
                await self._client.close()
            if self._gate is not None:
                await self._gate.close()
            if self.network is not None:
                await self.network.close()
            await remove_folder(self.folder)

    async def _stop_answering(self) -> None:
        """Closes the helper's socket and every call that was not accepted."""
        if self._answering is not None:
            with anyio.CancelScope(shield=True):
                await self._answering.stop()

    async def _answer_calls(self, listener: Listener[SocketStream]) -> None:
        """Answers calls until one is accepted, then removes the socket."""
        try:
            async with anyio.create_task_group() as calls:
                await serve_unix(listener, partial(self._answer, calls.cancel_scope), calls)
        finally:
            (self.folder / HELPER_SOCKET).unlink(missing_ok=True)
            with anyio.CancelScope(shield=True):
                await listener.aclose()

    async def _answer(self, calls: anyio.CancelScope, stream: SocketStream) -> None:
        """One call: the right token makes it the helper's connection, anything else ends it."""
        decoder = frames.Decoder()
        accepted = False
        try:
            accepted = await self._knows_token(stream, decoder) and self._client is None
        finally:
            if not accepted:
                with anyio.CancelScope(shield=True):
                    await anyio.aclose_forcefully(stream)
        if accepted:
            self._client = HelperClient(stream, decoder, self._name, self._tasks)
            self._called.set()
            calls.cancel()

    async def _knows_token(self, stream: ByteStream, decoder: frames.Decoder) -> bool:
        hello: list[frames.Frame] = []
        read = 0
        try:
            while not hello and read <= _HELLO_BYTES:
                data = await stream.receive(_HELLO_BYTES)
                read += len(data)
                hello.extend(decoder.feed(data))
        except (frames.FrameError, anyio.EndOfStream, anyio.BrokenResourceError):
            return False
        return bool(hello) and hmac.compare_digest(str(hello[0][0].get("token")).encode(), self.token.encode())
