"""HTTP/1.1 on our listeners: uvicorn's protocol with a bound on what it keeps of a request besides its body.

Holds: an agent that sends headers, or one header, or trailers without end costs a connection, not the server's
memory (llhttp and uvicorn bound none of them).
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers together, and trailers; what h11 and most proxies take."""
_SAID = b"the headers of this request are larger than 64 KiB"
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n" + (
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_SAID), _SAID)
)


class BoundedHttp(HttpToolsProtocol):
    """Counts what came since the last end of a head and the last piece of a body."""

    _head_bytes = 0
    _in_body = False

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            if not self._in_body:
                self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_body = 0, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._in_body = 0, False
        super().on_message_complete()
