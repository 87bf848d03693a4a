"""Huge and hostile bodies of a Chat Completions call, and a client that sends one without Python's help.

Each body is made when it is asked for, because most are tens of megabytes.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

MB = 1_000_000
SEND_S = 600.0
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog;",
    "return",
    "0\n",
    "def",
    "f(a):",
    "#",
)
_HEAD = b'{"model":"tiny","messages":['


@dataclass(frozen=True, slots=True)
class HugeCall:
    """``name`` as the table shows it; ``body`` makes the bytes."""

    name: str
    body: Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Sent:
    """The reply to a huge call; ``status`` 0: the connection was closed or nothing came within ``SEND_S``."""

    status: int
    words: str
    seconds: float


def prose(size: int) -> str:
    """``size`` characters of words and numbers."""
    pick = random.Random(size)
    paragraph = " ".join(f"{pick.choice(_WORDS)} {pick.randrange(9999)}" for _ in range(20_000))
    return (paragraph * (size // len(paragraph) + 1))[:size]


def huge_calls() -> list[HugeCall]:
    """Those of the table in docs/performance.md, the plainest first."""
    return [
        HugeCall("28 MB of text", partial(_said, lambda: prose(28 * MB))),
        HugeCall("4 MB of text", partial(_said, lambda: prose(4 * MB))),
        HugeCall("2 MB of text", partial(_said, lambda: prose(2 * MB))),
        HugeCall("350 kB of text, which fits", partial(_said, lambda: prose(350_000))),
        HugeCall("28 MB without a space", partial(_said, lambda: "a1" * (14 * MB))),
        HugeCall("1 MB of spaces", partial(_said, lambda: " " * MB)),
        HugeCall("4 MB of spaces", partial(_said, lambda: " " * (4 * MB))),
        HugeCall(
            "4 MB of spaces, 60,000 at a time", partial(_said, lambda: (" " * 60_000 + "x\n") * (4 * MB // 60_002))
        ),
        HugeCall("4 MB of Chinese", partial(_said, lambda: "语言模型" * (MB // 3))),
        HugeCall("4 MB of one control token", partial(_said, lambda: "<|im_end|>" * (4 * MB // 10))),
        HugeCall("4 MB of `<`", partial(_said, lambda: "<" * (4 * MB))),
        HugeCall("4 MB, with half a surrogate pair", _half_surrogate),
        HugeCall("4 MB that are no JSON", lambda: b'{"messages":[' + b'"x",' * MB),
        HugeCall("4 MB of backslashes that are no JSON", lambda: b'{"messages":["' + b"\\\\" * (2 * MB)),
        HugeCall("700,000 messages", lambda: _many(b'{"role":"user","content":"x"},', 700_000)),
        HugeCall("200,000 messages", lambda: _many(b'{"role":"user","content":"x"},', 200_000)),
        HugeCall("5,000 messages", lambda: _many(b'{"role":"user","content":"x"},', 5_000)),
        HugeCall("4 MB of nested arrays", lambda: b"[" * (4 * MB)),
        HugeCall("60,000 tools", lambda: _with(tools=[_tool(f"t{index}") for index in range(60_000)])),
        HugeCall("4 tools of 900 kB", lambda: _with(tools=[_tool(f"t{n}", prose(900_000)) for n in range(4)])),
        HugeCall("a tool of 3 MB", lambda: _with(tools=[_tool("t", prose(3 * MB))])),
        HugeCall("4 MB of reasoning", lambda: _replied(reasoning_content=prose(4 * MB))),
        HugeCall("4 MB of arguments", lambda: _replied(tool_calls=[_call(json.dumps({"a": prose(3 * MB)}))])),
        HugeCall(
            "4 × 900 kB of arguments", lambda: _replied(tool_calls=[_call(json.dumps({"a": prose(900_000)}))] * 4)
        ),
        HugeCall("4 MB of deep arguments", lambda: _replied(tool_calls=[_call('{"a":' * (MB // 2) + "1")])),
        HugeCall("1 million stop strings", lambda: _with(stop=["stop"] * MB)),
        HugeCall("a stop string of 4 MB", lambda: _with(stop=[prose(4 * MB)])),
        HugeCall("an image of 4 MB", _image),
        HugeCall("4 MB of an unknown field", lambda: _with(metadata={"x": prose(4 * MB)})),
    ]


def send(host: str, port: int, path: str, headers: dict[str, str], body: bytes) -> Sent:
    """Sends one call and reads the whole reply. Blocks, mostly in the kernel: run it in a thread."""
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", "content-type: application/json", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"content-length: {len(body)}", "", ""]
    began, reply = time.perf_counter(), b""
    try:
        with socket.create_connection((host, port), SEND_S) as connection:
            connection.sendall("\r\n".join(lines).encode())
            connection.sendall(body)
            while part := connection.recv(1 << 16):
                reply += part
    except OSError as error:
        reply = reply or str(error).encode()
    status = int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0
    return Sent(
        status, reply.partition(b"\r\n\r\n")[2][:300].decode(errors="replace"), time.perf_counter() - began
    )


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _with(**fields: Any) -> bytes:
    return _dumps({"messages": [{"role": "user", "content": "Hello"}], **fields})


def _said(text: Callable[[], str]) -> bytes:
    return _with(messages=[{"role": "user", "content": text()}])


def _replied(**fields: Any) -> bytes:
    user = {"role": "user", "content": "Hello"}
    return _with(messages=[user, {"role": "assistant", "content": "", **fields}, user])


def _many(message: bytes, count: int) -> bytes:
    return _HEAD + (message * count)[:-1] + b"]}"


def _half_surrogate() -> bytes:
    return _said(lambda: prose(4 * MB))[:-4] + rb'\ud83d"}]}'


def _tool(name: str, description: str = "d") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": "t", "arguments": arguments}}


def _image() -> bytes:
    url = "data:image/png;base64," + "iVBORw0KGgo" * (4 * MB // 11)
    return _with(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
