"""The agent app of sandbox tests: it answers with the path it was asked for.

``/stream`` sends its second half when the test allows it, or notes that the caller has left; ``/early`` answers
before the body is read.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.http.agent_endpoint import HttpAgentEndpoint


class EchoApp:
    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.caller_left = asyncio.Event()
        self.paths: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        body = b""
        early = scope["path"].endswith("/early")
        while not early and (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        if not scope["path"].endswith("/stream"):
            answer = f"{scope['method']} {scope['path']} {len(body)}".encode()
            await send({"type": "http.response.body", "body": answer})
            return
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        leaving = asyncio.create_task(receive())
        going_on = asyncio.create_task(self.go_on.wait())
        await asyncio.wait([leaving, going_on], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.caller_left.set()
        await send({"type": "http.response.body", "body": b"second"})
        for task in (leaving, going_on):
            task.cancel()


def agents_of(app: ASGIApp | None, max_connections: int = 256) -> HttpAgentEndpoint:
    return HttpAgentEndpoint(app, idle_connection_s=5, max_connections=max_connections)
