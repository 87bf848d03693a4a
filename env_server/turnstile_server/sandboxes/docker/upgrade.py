"""The request that turns an HTTP connection to the engine into a stream of bytes. Pure: bytes in, bytes out.

The SDK reads such a reply through a buffer that it then leaves behind: bytes that come together with the reply, as
they do over a slow network, would be lost. Here they are handed on.
"""

from __future__ import annotations

import h11

from turnstile_server.errors import SandboxUnavailable

_MAX_SAID = 2000


class UpgradeRequest:
    """One request. Send ``to_send``, then ``feed`` what comes until it returns."""

    def __init__(self, target: str, body: bytes = b"") -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._target = target
        self._refused: int | None = None
        self._said = b""
        headers = [
            ("Host", "docker"),
            ("Connection", "Upgrade"),
            ("Upgrade", "tcp"),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
        ]
        events = [h11.Request(method="POST", target=target, headers=headers)]
        parts = [self._http.send(event) or b"" for event in events]
        parts += [self._http.send(h11.Data(data=body)) or b"", self._http.send(h11.EndOfMessage()) or b""]
        self.to_send = b"".join(parts)

    def feed(self, data: bytes) -> bytes | None:
        """Take received data. Returns what came after the reply; None: more of the reply is to come. ``data``
        empty: the engine has closed.

        Raises SandboxUnavailable where the engine refuses, or answers something else.
        """
        try:
            self._http.receive_data(data)
            return self._next()
        except h11.ProtocolError as error:
            raise SandboxUnavailable(
                f"the Docker engine's reply to {self._target} is not HTTP: {error}"
            ) from error

    def _next(self) -> bytes | None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                return None
            if isinstance(event, h11.InformationalResponse) and event.status_code == 101:
                return bytes(self._http.trailing_data[0])
            if isinstance(event, h11.Response):
                self._refused = event.status_code
            elif isinstance(event, h11.Data):
                self._said = (self._said + bytes(event.data))[:_MAX_SAID]
            elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                said = self._said.decode(errors="replace").strip()
                raise SandboxUnavailable(f"the Docker engine refuses {self._target} ({self._refused}): {said}")
