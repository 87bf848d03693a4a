"""What a worker sees of a request that is passed to it, and what the caller sees of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bounded import bounded
from turnstile_server.errors import TurnstileError
from turnstile_server.http.listeners import Listener
from turnstile_server.settings import WorkerSettings
from turnstile_server.workers.child import WorkerChild
from turnstile_server.workers.forward import ForwardedResponse
from turnstile_server.workers.link import WorkerLink, WorkerRestarting
from turnstile_server.workers.orders import WorkerOrders
from turnstile_server.workers.socket_folder import private_folder, unix_socket
from waiting import wait_until

pytestmark = pytest.mark.anyio

KEY = "a-control-key-of-a-test"


class Worker:
    """A worker's control API: it tells what it was asked."""

    def __init__(self) -> None:
        self.waits = anyio.Event()
        """A call to ``/waits`` has come."""
        self.hung_up = anyio.Event()
        self.let_go = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        match request.url.path:
            case "/waits":
                self.waits.set()
                while (await receive())["type"] != "http.disconnect":
                    continue
                self.hung_up.set()
                return
            case "/streams":
                await StreamingResponse(self.pieces(), media_type="text/event-stream")(scope, receive, send)
                return
            case "/breaks":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
                return
        headers = [(name.decode(), value.decode()) for name, value in request.headers.raw]
        body = (await request.body()).decode()
        told = {
            "target": f"{request.scope['raw_path'].decode()}?{request.url.query}",
            "headers": headers,
            "body": body,
        }
        response: Response = JSONResponse(told, 418)
        response.raw_headers += [(b"x-two", b"1"), (b"x-two", b"2"), (b"keep-alive", b"timeout=5")]
        await response(scope, receive, send)

    async def pieces(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await self.let_go.wait()
        yield b"data: 2\n\n"


@asynccontextmanager
async def linked(worker: Worker, **settings: Any) -> AsyncIterator[WorkerLink]:
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(ExitStack())
        path = private_folder(sockets) / "w0"
        listener = Listener(worker, unix_socket(path, sockets), idle_s=5, grace_s=0.1, access_log=False)
        limits = bounded(WorkerSettings, **settings)
        child = WorkerChild(0, WorkerOrders({}, "", 0, 0, "", KEY), (), limits, 0, lambda _: None)
        child.up.set()
        link = WorkerLink(child, path, KEY, limits)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(listener.serve)
        stack.callback(listener.stop)
        stack.push_async_callback(link.close)
        yield link


def caller(link: WorkerLink, **how: Any) -> httpx.AsyncClient:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await ForwardedResponse(link, **{"trust_forwarded": False, **how})(scope, receive, send)
        except TurnstileError as error:
            await JSONResponse({"type": error.type}, error.status)(scope, receive, send)

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://trainer.example:8000")


async def test_path_query_headers_and_body_pass_as_they_are_without_those_of_the_connection() -> None:
    async with linked(Worker()) as link, caller(link) as http:
        given = {
            "authorization": "Bearer theirs",
            "connection": "x-hop, keep-alive",
            "x-hop": "1",
            "te": "trailers",
            "x-forwarded-host": "evil.example",
            "x-own": "kept",
        }
        answer = await http.post("/a%2Fb/c?x=1&x=%C3%A4", headers=given, content=b"{\xc3\xa4}")
    told = answer.json()
    headers = dict(told["headers"])
    assert (answer.status_code, told["target"], told["body"]) == (418, "/a%2Fb/c?x=1&x=%C3%A4", "{ä}")
    assert headers["authorization"] == f"Bearer {KEY}", "the front has checked theirs"
    assert headers["host"] == headers["x-forwarded-host"] == "trainer.example:8000"
    assert headers["x-own"] == "kept"
    assert headers["content-length"] == "4"
    assert not headers.keys() & {"x-hop", "te", "transfer-encoding"}
    assert answer.headers.get_list("x-two") == ["1", "2"]
    assert "keep-alive" not in answer.headers


async def test_a_trusted_proxy_says_by_whom_the_caller_called() -> None:
    async with linked(Worker()) as link, caller(link, trust_forwarded=True) as http:
        given = {"x-forwarded-host": "public.example", "x-forwarded-proto": "https"}
        headers = dict((await http.get("/", headers=given)).json()["headers"])
    assert headers["x-forwarded-host"] == "public.example"
    assert headers["x-forwarded-proto"] == "https"


async def test_a_body_that_comes_in_pieces_passes_whole() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for part in (b"one ", b"two ", b"three"):
            yield part

    async with linked(Worker()) as link, caller(link) as http:
        assert (await http.post("/", content=pieces())).json()["body"] == "one two three"
        assert (await http.post("/", content=b"known")).json()["body"] == "known"
    async with linked(Worker()) as link, caller(link, body=b"read before") as http:
        assert (await http.post("/", content=b"what was read")).json()["body"] == "read before"


async def test_each_piece_of_a_stream_is_sent_when_it_comes() -> None:
    worker, sent = Worker(), list[bytes]()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if b"1" in sent[-1]:
            worker.let_go.set()  # the second piece is made only now

    scope = {"type": "http", "method": "GET", "path": "/streams", "query_string": b"", "headers": []}
    async with linked(worker) as link:
        with anyio.fail_after(30):
            await ForwardedResponse(link, trust_forwarded=False)(scope, anyio.sleep_forever, send)  # type: ignore[arg-type]
    assert b"".join(sent) == b"data: 1\n\ndata: 2\n\n"


async def test_a_caller_that_hangs_up_is_hung_up_on_at_the_worker() -> None:
    worker = Worker()

    async def receive() -> Any:
        await worker.waits.wait()
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise AssertionError("nobody is there")

    scope = {"type": "http", "method": "GET", "path": "/waits", "query_string": b"", "headers": []}
    async with linked(worker) as link:
        with anyio.fail_after(30):
            await ForwardedResponse(link, trust_forwarded=False)(scope, receive, send)
            await worker.hung_up.wait()


async def test_an_answer_that_breaks_off_does_not_end_as_if_it_were_whole() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/breaks", "query_string": b"", "headers": []}
    async with linked(Worker()) as link:
        with anyio.fail_after(30):
            await ForwardedResponse(link, trust_forwarded=False)(scope, anyio.sleep_forever, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 200
    assert all(message.get("more_body", True) for message in sent)


async def test_a_request_waits_for_a_worker_that_comes_and_not_for_ever(tmp_path: Path) -> None:
    async with linked(Worker(), wait_s=30) as link, caller(link) as http, anyio.create_task_group() as tasks:
        up, link.child.up = link.child.up, anyio.Event()
        assert up.is_set()

        async def come() -> None:
            await wait_until(lambda: link.child.up.statistics().tasks_waiting)
            link.child.up.set()

        tasks.start_soon(come)
        assert (await http.get("/")).status_code == 418
    async with linked(Worker(), wait_s=0.1) as link, caller(link) as http:
        link.child.up = anyio.Event()
        answer = await http.get("/")
        assert (answer.status_code, answer.json()["type"]) == (503, "worker_restarting")
        link.child.given_up = "it died too often"
        with pytest.raises(WorkerRestarting, match="it died too often"):
            await link.fetched("GET", "/")
