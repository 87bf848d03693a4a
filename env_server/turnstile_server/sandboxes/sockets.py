"""A sandbox's folder on the host: the two sockets that lead out of the sandbox, and nothing else.

``gate.sock`` serves the agent door, restricted to the one episode admitted; ``helper.sock`` waits for the helper's
one call and is then gone. Owns the folder, both listeners and all connections; ``close`` releases them. The
folder is mounted into its own sandbox only, and lies in a folder that only the server's user can enter: so the
sockets'
modes let any uid inside connect, and nobody else.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import shutil
from pathlib import Path

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.endpoint import AgentEndpoint, EpisodeListener
from turnstile_server.sandboxes.helper import SOCKET_TARGET, SOCKET_VARIABLE, TOKEN_VARIABLE
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperLink

GATE_SOCKET = "gate.sock"
HELPER_SOCKET = "helper.sock"
MAX_SOCKET_PATH = 107
"""unix(7): ``sun_path`` holds 108 bytes with the closing NUL."""
_HELLO_BYTES = 4096


class SandboxSockets:
    """``open``, launch the helper with ``environment`` and ``folder`` mounted at ``mounted_at``, ``dialed_in``,
    and at
    the end ``close``, whatever happened before."""

    def __init__(self, folder: Path, agents: AgentEndpoint, *, name: str, mounted_at: str = SOCKET_TARGET) -> None:
        self.folder = folder
        self._agents = agents
        self._mounted_at = mounted_at
        self._name = name
        self._gate: EpisodeListener | None = None
        self._helper: asyncio.Server | None = None
        self._token = secrets.token_urlsafe(32)
        self._link: asyncio.Future[HelperLink] = asyncio.get_running_loop().create_future()
        self._callers: set[asyncio.StreamWriter] = set()

    @property
    def environment(self) -> dict[str, str]:
        """What the helper's process needs to dial in; the token is good for one call. Never put it in an argv."""
        return {TOKEN_VARIABLE: self._token, SOCKET_VARIABLE: f"{self._mounted_at}/{HELPER_SOCKET}"}

    @property
    def gate_inside(self) -> str:
        """Path of the agent door's socket inside the sandbox."""
        return f"{self._mounted_at}/{GATE_SOCKET}"

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
            self._helper = await asyncio.start_unix_server(self._answer, path=str(helper))
            helper.chmod(0o666)
        except OSError as error:
            await self.close()
            raise SandboxUnavailable(f"no sockets could be made in {self.folder}: {error.strerror}") from error

    async def dialed_in(self, timeout_s: float) -> HelperLink:
        """Waits for the helper's call. Raises SandboxUnavailable when none comes."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._link)
        except TimeoutError as error:
            raise SandboxUnavailable(f"the sandbox's helper did not call within {timeout_s:g} s") from error
        finally:
            self._stop_listening()

    async def close(self) -> None:
        """Cuts every connection, the link too, and removes the folder."""
        self._stop_listening()
        if self._link.done():
            await self._link.result().close()
        if self._gate is not None:
            await self._gate.close()
        await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def _stop_listening(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None
            (self.folder / HELPER_SOCKET).unlink(missing_ok=True)
        for writer in self._callers:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One call: the right token makes it the link, anything else ends it."""
        self._callers.add(writer)
        decoder = frames.Decoder()
        try:
            read = 0
            hello: list[frames.Frame] = []
            while not hello and read <= _HELLO_BYTES and (data := await reader.read(_HELLO_BYTES)):
                read += len(data)
                hello.extend(decoder.feed(data))
            known = bool(hello) and hmac.compare_digest(
                str(hello[0][0].get("token")).encode(), self._token.encode()
            )
            if not known or self._link.done():
                writer.transport.abort()
                return
        except (frames.FrameError, OSError):
            writer.transport.abort()
            return
        finally:
            self._callers.discard(writer)
        self._link.set_result(HelperLink(reader, writer, decoder, self._name))
        self._stop_listening()
