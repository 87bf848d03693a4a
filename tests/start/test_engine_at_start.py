"""An engine that is not there yet is waited for, visibly; one that never comes, or is the wrong one, is named."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from server_process import environment, refusal, serve_command

from turnstile_server.engines.embedded.process import WorkerProcess
from turnstile_server.settings import EngineSettings

LINE_BYTES = 1 << 16


@contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses connections until somebody listens there."""
    with socket.socket() as unused:
        unused.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


def arguments(model: Path, tmp_path: Path, url: str) -> tuple[str | Path, ...]:
    return ("--model", model, "--data-dir", tmp_path / "data", "--engine", "sglang", "--engine-url", url)


@pytest.mark.thorough
@pytest.mark.slow
def test_an_engine_that_never_comes(tiny_model: Path, tmp_path: Path) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}"
        line = refusal(*arguments(tiny_model, tmp_path, url), TURNSTILE_ENGINE__START_TIMEOUT_S="1")
    assert f"The engine at {url} was not ready within engine.start_timeout_s (1 s)" in line
    assert "GET /model_info, at last:" in line
    assert "Connect" in line
    assert "--engine-url" in line
    assert "In a container this address is the container itself." in line


@pytest.mark.thorough
@pytest.mark.slow
def test_a_host_name_that_is_unknown(tiny_model: Path, tmp_path: Path) -> None:
    url = "http://no-such-service.invalid:30000"
    line = refusal(*arguments(tiny_model, tmp_path, url), TURNSTILE_ENGINE__START_TIMEOUT_S="1")
    assert url in line
    assert "no-such-service.invalid" in line.partition("at last:")[2]
    assert "In a container" not in line


@pytest.mark.slow
def test_something_else_that_answers_is_refused_at_once(tiny_model: Path, tmp_path: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"nothing here")

        def log_message(self, format: str, *args: object) -> None:
            """Tests print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        line = refusal(*arguments(tiny_model, tmp_path, url))
        other.shutdown()
    assert f"The engine at {url} is no SGLang server that can be used" in line
    assert "404" in line


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_engine_that_comes_later_is_waited_for(tiny_model: Path, tmp_path: Path) -> None:
    with closed_port() as port:
        command = serve_command(*arguments(tiny_model, tmp_path, f"http://127.0.0.1:{port}"))
        async with await anyio.open_process(command, env=environment()) as server:
            assert server.stdout is not None
            assert server.stderr is not None
            said, ready = BufferedByteReceiveStream(server.stderr), BufferedByteReceiveStream(server.stdout)
            try:
                while b"waiting for the engine" not in (waiting := await said.receive_until(b"\n", LINE_BYTES)):
                    continue
                assert f"waiting for the engine at http://127.0.0.1:{port}, 0 of 600 s" in waiting.decode()
                async with engine_at(port, tiny_model):
                    assert json.loads(await ready.receive_until(b"\n", LINE_BYTES))["event"] == "ready"
                    server.terminate()
                    await server.wait()
            finally:
                if server.returncode is None:
                    server.kill()
    assert server.returncode == 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.anyio
async def test_another_model_at_the_address(tiny_model: Path, tmp_path: Path) -> None:
    shipped = "tiny"  # another vocabulary than that of the tests' model
    with closed_port() as port:
        async with engine_at(port, tiny_model):
            found = arguments(Path(shipped), tmp_path, f"http://127.0.0.1:{port}")
            line = await anyio.to_thread.run_sync(lambda: refusal(*found))
    assert "serves another model than --model: vocab_size" in line
    assert "--model" in line


@asynccontextmanager
async def engine_at(port: int, model: Path) -> AsyncIterator[None]:
    """The embedded engine's process on a TCP port: it speaks SGLang's interface, on a Unix socket."""
    worker = WorkerProcess(model, EngineSettings())

    async def forward(near: SocketStream) -> None:
        async with near, await anyio.connect_unix(worker.socket) as far, anyio.create_task_group() as both:
            both.start_soon(_copy, near, far)
            both.start_soon(_copy, far, near)

    try:
        await worker.start()
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port, reuse_port=True)
        async with listener, anyio.create_task_group() as serving:
            serving.start_soon(listener.serve, forward)
            yield
            serving.cancel_scope.cancel()
    finally:
        await worker.close()


async def _copy(source: ByteStream, sink: ByteStream) -> None:
    try:
        async for data in source:
            await sink.send(data)
        await sink.send_eof()
    except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        return
