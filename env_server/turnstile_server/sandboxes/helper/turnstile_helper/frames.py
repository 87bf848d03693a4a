"""The wire format between the server and the helper in a sandbox, used by both. Pure: bytes in, frames out.

Everything goes over one connection, both ways. The helper dials the server's Unix socket for it, once; or, where
no socket of the server is mounted, it is the helper's own standard input and output, or TLS to the server
(``dial.py``). In frames::

    uint32 header length | uint32 payload length | header (a JSON object, UTF-8) | payload (bytes)

both lengths big-endian, bounded by ``MAX_HEADER`` and ``MAX_PAYLOAD``; a frame beyond them ends the connection.

First frame, helper to server: ``{"hello": VERSION, "token"}``; a token on the Unix socket only. Elsewhere
``GREETING`` comes before it, from the server: what a program says before somebody listens is lost in most engines.
Then the server asks, ``id`` being its own number::

    {"id", "op": "facts"}                what the helper was started with: cwd, env, machine (by uname)
    {"id", "op": "setup", …}             once, before anything else (fields: ``setup.py``)
    {"id", "op": "run", argv, cwd, env, user, timeout_s, max_output, stdin_size, line_s?, launches?, network?,
     passed?}
    {"id", "op": "file", action: read|write|unpack|pack, path, user, max_bytes, mode, timeout_s, stdin_size}
    {"id", "op": "stop_all"}
    {"op": "data", "id", "last"?} + payload      a part of that request's standard input (file contents, a tar);
                                         "last": there is no more, whatever "stdin_size" said
    {"op": "kill", "id"}                 kills that request's processes; its "end" follows

and the helper answers, parts of different requests in any order::

    {"id", "ev": "ack", "n"}             n bytes of standard input were taken; at most ``WINDOW`` are under way
    {"id", "ev": "out", "stream"} + payload     a part of stdout (1) or stderr (2): when a "run" has ended; with
                                         "passed" stdout as it is written
    {"id", "ev": "line"} + payload       the latest line of a "run" with "line_s", at most once in so many seconds
    {"id", "ev": "end", …}               the last frame of a request: exit_code, timed_out, dropped, duration_s for
                                         "run" and "file"; the request's own fields, or "error", for the others

Where "setup" says so, connections inside to the agent endpoint are carried by the same connection, as streams that
the helper numbers 1, 2, 3, …; the same frames go both ways::

    {"conn", "do": "open"}               helper only: a client has connected
    {"conn", "do": "data"} + payload     bytes; at most ``CARRY_WINDOW`` of a stream are under way each way
    {"conn", "do": "took", "n"}          n bytes were passed on, so as many more may come
    {"conn", "do": "end"}                no more bytes from this side; the stream is over when both have said so
    {"conn", "do": "cut"}                it is over at once

Those with "net" in the header are of connections to the server's proxy, which have numbers of their own.
"""

from __future__ import annotations

import json
import struct
from typing import Any, Dict, Iterator, Tuple  # noqa: UP035 - Python 3.8

VERSION = 1
GREETING = b"\n"
"""The server's first byte on a helper's standard input, or on a link that it dialled."""
TAKEN = b"+"
"""The server's answer to the token of a helper that dials out. ``GREETING`` follows."""
MAX_HEADER = 8 << 20
MAX_PAYLOAD = 1 << 20
CHUNK = 256 << 10
"""Size of the parts that long payloads are sent in, so that requests share the connection."""
WINDOW = 1 << 20
"""Bytes of standard input of one request that are sent and not yet taken."""
MAX_LINE = 512
"""Bytes of the latest line of output; of a longer line, its end."""
CARRY_WINDOW = 128 << 10
"""Bytes of one carried connection, in one direction, that are sent and not yet passed on."""
CONNECTION_LOST = 70
"""Exit code of a helper whose connection has ended, or brings what is no frame."""
FILE_PROBLEM = 3
"""Exit code of a file operation that was refused; its stderr is the sentence why."""

_LENGTHS = struct.Struct("!II")

Frame = Tuple[Dict[str, Any], bytes]  # noqa: UP006 - evaluated on Python 3.8


class FrameError(Exception):
    """The data is not in this format."""


def encode(header: dict[str, Any], payload: bytes | bytearray | memoryview = b"") -> bytes:
    """One frame. Raises FrameError when it is larger than the other side takes."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise FrameError(f"a frame of {len(text)} + {len(payload)} bytes is too large")
    return b"".join((_LENGTHS.pack(len(text), len(payload)), text, payload))


class Decoder:
    """Cuts what a connection delivers into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that is now whole. Raises FrameError; the connection is then of no use."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTHS.size:
                head, body = _LENGTHS.unpack_from(buffer, start)
                if head > MAX_HEADER or body > MAX_PAYLOAD:
                    raise FrameError(f"a frame of {head} + {body} bytes was announced")
                end = start + _LENGTHS.size + head + body
                if len(buffer) < end:
                    break
                text = bytes(buffer[start + _LENGTHS.size : end - body])
                payload = bytes(buffer[end - body : end])
                start = end
                yield _object(text), payload
        finally:
            del buffer[:start]


def _object(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError("a header is not JSON") from error
    if not isinstance(header, dict):
        raise FrameError("a header is not a JSON object")
    return header
