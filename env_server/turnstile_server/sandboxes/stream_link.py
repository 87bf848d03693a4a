"""A sandbox that shares no file system with the server: everything goes over one stream to its helper.

The stream is the standard input and output of the sandbox's first program, the helper, so no token is needed:
nobody else has its other end. ``gate.sock`` is the listener of the agent endpoint, restricted to the one episode
admitted, in a folder that only the server's user can enter; the connections that the helper carries are joined to
it. Owns the folder, the listener, the helper's connection and what it carries; ``close`` releases them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.background import BackgroundTask, BackgroundTasks
from turnstile_server.sandboxes.carried import CarriedConnections, Send
from turnstile_server.sandboxes.endpoint import AgentEndpoint, EpisodeListener
from turnstile_server.sandboxes.helper import SOCKET_TARGET
from turnstile_server.sandboxes.helper.turnstile_helper import frames
from turnstile_server.sandboxes.helper_client import HelperClient
from turnstile_server.sandboxes.network import NETWORK_SOCKET, SandboxNetwork
from turnstile_server.sandboxes.run_folder import remove_folder
from turnstile_server.sandboxes.sockets import GATE_SOCKET, MAX_SOCKET_PATH

_HELLO_BYTES = 4096


class StreamLink:
    """A ``SandboxLink``. Call ``open``, connect with ``greeted``, and at the end ``close``, whatever happened
    before."""

    carried = True
    gate_inside = f"{SOCKET_TARGET}/{GATE_SOCKET}"
    """Path of the helper's own listener: backends give it an empty folder in memory there."""
    network_inside = f"{SOCKET_TARGET}/{NETWORK_SOCKET}"

    def __init__(
        self,
        folder: Path,
        agents: AgentEndpoint,
        tasks: BackgroundTasks,
        *,
        name: str,
        max_connections: int,
        network: SandboxNetwork | None = None,
    ) -> None:
        self.network = network
        self._folder = folder
        self._agents = agents
        self._tasks = tasks
        self._name = name
        self._max_connections = max_connections
        self._gate: EpisodeListener | None = None
        self._stream: ByteStream | None = None
        self._client: HelperClient | None = None
        self._watch: BackgroundTask[None] | None = None

    @property
    def _gate_path(self) -> Path:
        return self._folder / GATE_SOCKET

    async def open(self) -> None:
        """Makes the folder and the listener. Raises SandboxUnavailable; then nothing is left."""
        if len(os.fsencode(self._gate_path)) > MAX_SOCKET_PATH:
            raise SandboxUnavailable(
                f"{self._folder} is too long for Unix sockets; choose a shorter sandboxes.run_dir"
            )
        try:
            self._folder.mkdir(mode=0o700)
            self._gate = await self._agents.listen_unix(self._gate_path)
            if self.network is not None:
                await self.network.open(self._folder)
        except OSError as error:
            await self.close()
            raise SandboxUnavailable(f"no socket could be made in {self._folder}: {error.strerror}") from error

    def admit(self, episode_id: str | None) -> None:
        """Serve this episode from now on; None: none."""
        if self._gate is not None:
            self._gate.admit(episode_id)

    def take_stream(self, stream: ByteStream) -> None:
        """From now on the link closes ``stream``."""
        self._stream = stream

    async def greeted(self, timeout_s: float) -> HelperClient:
        """Greets the helper and waits for its first frame. Raises SandboxUnavailable where it does not come, or is
        another."""
        if self._stream is None:
            raise RuntimeError("the link has no stream")
        decoder = frames.Decoder()
        hello: list[frames.Frame] = []
        try:
            with anyio.fail_after(timeout_s):
                await self._stream.send(frames.GREETING)
                while not hello:
                    hello.extend(decoder.feed(await self._stream.receive(_HELLO_BYTES)))
        except TimeoutError as error:
            raise SandboxUnavailable(f"the sandbox's helper said nothing within {timeout_s:g} s") from error
        except (frames.FrameError, anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise SandboxUnavailable("the sandbox's helper ended, or is another program") from error
        if len(hello) != 1 or hello[0][0].get("hello") != frames.VERSION:
            raise SandboxUnavailable("the sandbox's first program is not this server's helper")
        client = HelperClient(self._stream, decoder, self._name, self._tasks)
        self._client = client
        gate = CarriedConnections(self._gate_path, self._max_connections, client.send, self._name, self._tasks)
        network: CarriedConnections | None = None
        if self.network is not None:
            socket, name = self._folder / NETWORK_SOCKET, f"network of {self._name}"
            send = partial(_to_network, client.send)
            network = CarriedConnections(socket, self.network.most, send, name, self._tasks)

        def take(header: Mapping[str, Any], payload: bytes) -> None:
            to = gate if "net" not in header else network
            if to is None:
                raise frames.FrameError("no connections to the network are carried")
            to.take(header, payload)

        client.carried = take

        async def cut_when_lost() -> None:
            await client.lost.wait()
            await gate.close()  # the agent app sees its callers gone, as when an agent dies
            if network is not None:
                await network.close()

        self._watch = self._tasks.start(cut_when_lost, name=f"connections of {self._name}")
        return client

    async def close(self) -> None:
        """Cuts every connection, the helper's too, and removes the folder. May be called twice."""
        with anyio.CancelScope(shield=True):
            if self._client is not None:
                await self._client.close()
            elif self._stream is not None:
                await anyio.aclose_forcefully(self._stream)
            if self._watch is not None:
                await self._watch.ended.wait()
            if self._gate is not None:
                await self._gate.close()
            if self.network is not None:
                await self.network.close()
            await remove_folder(self._folder)


def _to_network(send: Send, header: Mapping[str, Any], payload: bytes) -> None:
    """Sends a frame of a connection to the proxy, whose numbers are its own."""
    send({**header, "net": True}, payload)
