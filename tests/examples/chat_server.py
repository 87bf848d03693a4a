"""A chat completions server that answers from a script: what the agent under test is talking to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Say:
    """A reply; ``cut``: a streamed one breaks off in the middle, as when a connection dies.

    ``calls``: tool calls by name and arguments as they are on the wire; ``command`` is one of bash."""

    text: str = ""
    command: str | None = None
    cut: bool = False
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        calls = self.calls
        if self.command is not None:
            calls = (("bash", json.dumps({"command": self.command})), *calls)
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for number, (name, arguments) in enumerate(calls, 1)
            ]
        return message

    @property
    def finish(self) -> str:
        return "tool_calls" if "tool_calls" in self.message else "stop"


@dataclass(frozen=True)
class Fail:
    status: int
    type: str = "error"


@dataclass(frozen=True)
class Raw:
    """An answer of no API: the body as it stands. ``promised``: more bytes than that are announced."""

    status: int
    body: bytes
    kind: str = "application/json"
    promised: int = 0


@dataclass
class ChatServer:
    """Answers the calls in the order of ``script``; ``calls`` are the bodies that came."""

    script: list[Say | Fail | Raw]
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answers = iter(self.script)
        calls = self.calls

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                calls.append(body)
                answer = next(answers)
                if isinstance(answer, Raw):
                    self.send_raw(answer)
                elif isinstance(answer, Fail):
                    self.send(
                        answer.status,
                        {"error": {"type": answer.type, "code": answer.type, "message": answer.type}},
                    )
                elif body.get("stream"):
                    self.stream(answer)
                else:
                    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish}
                    self.send(200, {**head("chat.completion"), "choices": [choice]})

            def send(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after-ms", "1")
                self.end_headers()
                self.wfile.write(data)

            def send_raw(self, answer: Raw) -> None:
                self.send_response(answer.status)
                self.send_header("content-type", answer.kind)
                self.send_header("content-length", str(len(answer.body) + answer.promised))
                self.end_headers()
                self.wfile.write(answer.body)

            def stream(self, answer: Say) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for delta, finish in deltas(answer):
                    if finish and answer.cut:
                        error = {"error": {"type": "engine_unavailable", "message": "the engine went away"}}
                        self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())
                        return
                    choice = {"index": 0, "delta": delta, "finish_reason": finish}
                    chunk = {**head("chat.completion.chunk"), "choices": [choice]}
                    self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, format: str, *_: object) -> None:
                pass

        return Handler


def head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 0, "model": "scripted"}


def deltas(answer: Say) -> Iterable[tuple[dict[str, Any], str | None]]:
    yield {"role": "assistant", "content": ""}, None
    for character in answer.text:
        yield {"content": character}, None
    for index, call in enumerate(answer.message.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}, None
        for start in range(0, len(arguments), 5):
            piece = arguments[start : start + 5]
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}, None
    yield {}, answer.finish
