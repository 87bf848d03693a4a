"""Both clients over TLS: whose certificates they believe, and all APIs through nginx (examples/nginx.conf)."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import httpx2
import pytest
from mcp import Client as McpClient
from mcp.client.streamable_http import streamable_http_client
from test_clients import Make, free_socket
from websockets.asyncio.client import connect

from control_support import Door, OpenDoor
from local import ROOT
from tls_support import certificates
from turnstile import AsyncClient, ClientSettings
from turnstile.errors import InvalidRequest, ServerUnavailable
from waiting import wait_until

pytestmark = pytest.mark.anyio

GATE_BODY = 4 << 20
NAME = "turnstile.example"
"""Of the proxy, as clients call it."""


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a certificate that no client believes yet."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tls").mkdir()
    folder = certificates(tmp_path / "tls")
    (folder / "authorities").mkdir()
    (folder / "authorities" / "ca.pem").symlink_to(folder / "ca.pem")
    subprocess.run(["openssl", "rehash", folder / "authorities"], check=True, capture_output=True)
    return folder


# Whose certificates are believed.


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"status": "healthy"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def https_server(folder: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_an_authority_that_nobody_knows_is_not_believed(make: Make, certificate: Path) -> None:
    with https_server(certificate) as url:
        async with make(url) as client:
            found = (await client.health())[url]
    assert isinstance(found, ServerUnavailable)
    assert "CERTIFICATE_VERIFY_FAILED" in str(found)


@pytest.mark.parametrize("named", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_the_environment_names_an_authority_of_ones_own(
    make: Make, certificate: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proxies are for ``trust_env`` only."""
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(named, str(certificate / ("ca.pem" if named == "SSL_CERT_FILE" else "authorities")))
    with https_server(certificate) as url:
        async with make(url) as client:
            assert await client.health() == {url: None}
        async with AsyncClient(url, settings=ClientSettings(retries=0, trust_env=True)) as client:
            assert isinstance((await client.health())[url], ServerUnavailable)


async def test_certificates_that_cannot_be_read_are_named(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    with pytest.raises(InvalidRequest, match=r"SSL_CERT_FILE.*missing\.pem.*No such file"):
        async with make("https://127.0.0.1:1"):
            pass
    (tmp_path / "text.pem").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "text.pem"))
    with pytest.raises(InvalidRequest, match=r"SSL_CERT_FILE.*text\.pem"):
        async with make("https://127.0.0.1:1"):
            pass


# Behind nginx.


@contextmanager
def nginx(folder: Path, tls: Path, control: tuple[str, int], agents: tuple[str, int]) -> Iterator[None]:
    """examples/nginx.conf, with each listener's upstream URL and the port where nginx takes its place."""
    conf = (ROOT / "examples" / "nginx.conf").read_text()
    for upstream, name, (url, port) in (
        ("127.0.0.1:8000", "turnstile.example", control),
        ("127.0.0.1:8001", "agents.example", agents),
    ):
        conf = conf.replace(f"http://{upstream}", url)
        conf = conf.replace(f"listen 443 ssl;\n    server_name {name}", f"listen 127.0.0.1:{port} ssl")
    conf = conf.replace("/etc/ssl/turnstile", str(tls))
    assert "listen 443" not in conf
    assert "example;" not in conf
    (folder / "turnstile.conf").write_text(conf)
    user = "user root;" if os.geteuid() == 0 else ""
    paths = "".join(f"{kind}_temp_path {folder};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"{user} daemon off; worker_processes 1; pid {folder}/pid; error_log stderr;"
        f"events {{}} http {{ {paths} include {folder}/turnstile.conf; }}"
    )
    process = subprocess.Popen(["nginx", "-e", "stderr", "-c", folder / "nginx.conf"])
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def behind(
    open_door: OpenDoor, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Door]:
    """A server whose addresses are those of nginx before it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "ca.pem"))
    with free_socket() as first, free_socket() as second:
        ports = first.getsockname()[1], second.getsockname()[1]
    gate = {"public_url": f"https://127.0.0.1:{ports[1]}", "max_body_bytes": GATE_BODY, "status_hold_s": 0.2}
    bounds = {"max_turns": 2, "max_completion_tokens": 16}  # the model's weights are random: it may never stop
    with (
        open_door(
            gate=gate, control={"allowed_hosts": [NAME]}, sandboxes={"kind": "local"}, episodes=bounds
        ) as door,
        nginx(tmp_path, certificate, (door.url, ports[0]), (door.agent_url, ports[1])),
    ):
        yield Door(f"https://127.0.0.1:{ports[0]}", door.key, f"https://127.0.0.1:{ports[1]}", door.other_model)


async def _reached(url: str, context: ssl.SSLContext) -> None:
    """nginx listens a moment after its start."""
    async with httpx.AsyncClient(verify=context, timeout=60) as http:

        async def answers() -> bool:
            try:
                return (await http.get(f"{url}/health")).status_code == 200
            except httpx.ConnectError:
                return False

        await wait_until(answers)


@pytest.mark.slow
async def test_everything_is_reached_through_nginx(behind: Door, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=certificate / "ca.pem")
    await _reached(behind.url, context)
    async with AsyncClient(behind.url, key=behind.key) as client:
        episode = await client.create_episode("Say something.")
        assert episode.model_url.startswith(f"{behind.agent_url}/e/")
        key = {"authorization": f"Bearer {episode.episode_key}"}
        async with httpx.AsyncClient(headers=key, verify=context, timeout=60) as http:
            call = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello."}]}
            url = f"{episode.model_url}/v1/chat/completions"
            # What there is comes at once: the stream has begun while the engine still holds its first token.
            await client.pause("in_place")
            try:
                async with http.stream("POST", url, json={**call, "stream": True}) as streamed:
                    pieces = streamed.aiter_raw()
                    parts = [await anext(pieces)]
                    await client.resume()
                    parts += [piece async for piece in pieces]
            finally:
                await client.resume()
            assert streamed.status_code == 200
            assert b"[DONE]" in b"".join(parts)
            # Bodies above nginx's usual 1 MB, and above the server's limit: the server says what is wrong.
            for size, status in ((3 << 20, 200), (5 << 20, 413)):
                answer = await http.post(url, content=json.dumps(call).ljust(size))
                assert answer.status_code == status
            assert "max_body_bytes" in answer.json()["error"]["message"]
        async with (
            httpx2.AsyncClient(headers=key, verify=context) as http2,
            McpClient(streamable_http_client(str(episode.tool_url), http_client=http2)) as tools,
        ):
            assert "submit" in {tool.name for tool in (await tools.list_tools()).tools}
        await episode.finish()
        found = await episode.samples()
        assert sum(int(row.loss_mask.sum()) for row in found.samples) > 0
        played = [each async for each in client.rollouts(["Say hello."], agent="tool-loop", n=1)]
        assert [each.episode.status for each in played] == ["completed"]
    async with httpx.AsyncClient(
        headers={"authorization": f"Bearer {behind.key}"}, verify=context, timeout=60
    ) as http:
        for host, known in ((NAME, True), ("other.example", False)):
            listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            answer = await http.post(f"{behind.url}/mcp", json=listed, headers={"host": host})
            assert answer.status_code == (200 if known else 421)
    socket = f"wss{behind.url.removeprefix('https')}/k/{behind.key}/ws"
    async with connect(socket, ssl=context) as openenv:
        await openenv.send(json.dumps({"type": "state"}))
        assert json.loads(await openenv.recv())["type"] in ("state", "error")
