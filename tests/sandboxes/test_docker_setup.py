"""Wrong set-ups of the Docker engine: each is told at start, with what to do."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from echo_app import EchoApp, agents_of

from engine_forwarder import engine_over_tcp
from tls_support import certificates, server_context
from turnstile_server.errors import Fault, SandboxUnavailable, StartupError
from turnstile_server.sandboxes.background import BackgroundTasks
from turnstile_server.sandboxes.docker.address import EngineAddress
from turnstile_server.sandboxes.docker.engine import DockerEngine
from turnstile_server.sandboxes.docker.provider import DockerProvider
from turnstile_server.settings import SandboxSettings

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_engine_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
        monkeypatch.delenv(name, raising=False)


async def refusal(run_dir: Path, address: str) -> str:
    """What a start with this engine says."""
    provider = DockerProvider(SandboxSettings(docker_host=address, docker_timeout_s=5), run_dir, owner="nobody")
    async with BackgroundTasks() as tasks:
        with pytest.raises(StartupError) as refused:
            await provider.start(agents_of(EchoApp()), tasks)
        await provider.close()
    return refused.value.message


@contextmanager
def engine(reply: bytes, content_type: str = "application/json", status: int = 200) -> Iterator[str]:
    """The address of something that answers everything with ``reply``."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"tcp://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


async def test_a_socket_that_is_not_there_says_how_a_container_gets_it(run_dir: Path, tmp_path: Path) -> None:
    said = await refusal(run_dir, f"unix://{tmp_path}/docker.sock")
    assert f"no engine's socket at {tmp_path}/docker.sock" in said
    assert f"-v /var/run/docker.sock:{tmp_path}/docker.sock" in said


async def test_a_folder_in_the_sockets_place_is_known_for_what_docker_makes_of_a_wrong_path(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "docker.sock").mkdir()
    assert "is a folder, not the engine's socket" in await refusal(run_dir, f"unix://{tmp_path}/docker.sock")


async def test_a_file_in_the_sockets_place_is_said(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "docker.sock").touch()
    assert "is not a socket" in await refusal(run_dir, f"unix://{tmp_path}/docker.sock")


@pytest.mark.slow
@pytest.mark.parametrize("enterable", [True, False])
def test_a_socket_that_may_not_be_used_says_which_group_to_add(run_dir: Path, enterable: bool) -> None:
    path = run_dir / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o660)
        run_dir.chmod(0o755 if enterable else 0o700)
        script = f"""
import os
from turnstile_server.sandboxes.docker.address import EngineAddress
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
print(EngineAddress("unix://{path}").fault(PermissionError()))
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    if os.geteuid() != 0:
        assert "cannot be used" in done.stdout  # this user's own socket
    elif enterable:
        assert f"uid 65534 may not use the engine's socket {path}, which is for group 0" in done.stdout
        assert "--group-add 0" in done.stdout
    else:
        assert "cannot be entered by uid 65534" in done.stdout


async def test_an_address_that_refuses_is_named(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = await refusal(run_dir, f"tcp://127.0.0.1:{port}")
    assert f"no engine answers at http://127.0.0.1:{port}: " in said
    assert "refused" in said


@pytest.mark.slow
async def test_an_engine_that_wants_tls_names_the_variables(run_dir: Path) -> None:
    # What Go's servers answer to HTTP on a TLS port.
    with engine(b"Client sent an HTTP request to an HTTPS server.\n", "text/plain", 400) as address:
        said = await refusal(run_dir, address)
    assert "wants TLS: set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH" in said


@pytest.mark.slow
async def test_tls_to_an_engine_that_speaks_none_says_so(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates(tmp_path)))
    with engine(b"{}") as address:
        assert "speaks no TLS: unset DOCKER_TLS_VERIFY" in await refusal(run_dir, address)


async def test_certificates_that_are_not_there_are_named(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    assert "DOCKER_CERT_PATH" in await refusal(run_dir, "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("another engine's", "certificate verify failed"),
        ("expired", "certificate has expired"),
        ("another client's", "the engine does not accept cert.pem"),
    ],
)
async def test_certificates_that_do_not_fit_the_engines_are_told(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    engines = certificates(tmp_path / "engine", expired=fault == "expired")
    chosen = engines if fault == "expired" else certificates(tmp_path / "own")
    if fault == "another client's":
        (chosen / "ca.pem").write_bytes((engines / "ca.pem").read_bytes())
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(chosen))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{run_dir}/engine.sock")
        listener.listen()
        with engine_over_tcp(f"unix://{run_dir}/engine.sock", server_context(engines)) as forwarder:
            said = await refusal(run_dir, forwarder.url)
    assert "TLS to the engine at https://127.0.0.1" in said
    assert words in said
    assert "DOCKER_CERT_PATH must name the folder" in said


@pytest.mark.parametrize("chosen", ["DOCKER_CONTEXT", "docker context use"])
async def test_a_context_of_dockers_client_names_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    # Files of `docker context create far --docker host=…` (Docker's client 28.2).
    meta = tmp_path / "contexts" / "meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    endpoint = {"Host": "tcp://far:7", "SkipTLSVerify": False}
    meta.write_text(json.dumps({"Name": "far", "Metadata": {}, "Endpoints": {"docker": endpoint}}))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    if chosen == "DOCKER_CONTEXT":
        assert EngineAddress.find(None).url.startswith("unix://")
        monkeypatch.setenv("DOCKER_CONTEXT", "far")
    else:
        (tmp_path / "config.json").write_text('{"currentContext": "far"}')
    assert EngineAddress.find(None).url == "http://far:7"
    assert EngineAddress.find("unix:///x").url == "unix:///x"
    monkeypatch.setenv("DOCKER_CONTEXT", "farther")
    with pytest.raises(SandboxUnavailable, match="no Docker context farther"):
        EngineAddress.find(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "too_old"), [("1.40", True), ("1.9", True), ("1.41", False), ("1.100", False)], ids=str
)
async def test_an_engine_older_than_20_10_is_refused(version: str, too_old: bool) -> None:
    reply = json.dumps({"Version": "x", "ApiVersion": version, "MinAPIVersion": "1.12"})
    with engine(reply.encode()) as address:
        made = DockerEngine(SandboxSettings(docker_host=address))
        if too_old:
            with pytest.raises(SandboxUnavailable, match=r"is too old: it must be 20\.10 or newer"):
                await made.open()
        else:
            assert await made.open() == f"x at {address.replace('tcp', 'http')}"
        made.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("info", "remaps", "holds"),
    [
        # Of what Podman 4.3.1 answered to `GET /info`, rootless and rootful, and Docker 20.10.
        ({"SecurityOptions": ["name=seccomp"], "CgroupVersion": "1", "Rootless": True}, True, False),
        ({"SecurityOptions": ["name=seccomp"], "CgroupVersion": "2", "Rootless": True}, True, True),
        ({"SecurityOptions": ["name=seccomp"], "CgroupVersion": "1", "Rootless": False}, False, True),
        ({"SecurityOptions": ["name=rootless"], "CgroupVersion": "2", "CgroupDriver": "none"}, True, False),
        ({"SecurityOptions": ["name=userns"], "CgroupVersion": "1"}, True, True),
    ],
)
async def test_a_rootless_engine_is_known_for_the_uids_and_the_bounds_that_it_lacks(
    info: dict[str, object], remaps: bool, holds: bool
) -> None:
    reply = {"Version": "x", "ApiVersion": "1.41", "MinAPIVersion": "1.12", **info}
    with engine(json.dumps(reply).encode()) as address:
        made = DockerEngine(SandboxSettings(docker_host=address))
        await made.open()
        assert (await made.remaps_users(), await made.holds_limits()) == (remaps, holds)
        made.close()


@pytest.mark.slow
async def test_something_else_at_the_address_is_no_engine(run_dir: Path) -> None:
    for reply, kind in ((b"<html>hello</html>", "text/html"), (b"[]", "application/json"), (b"", "text/plain")):
        with engine(reply, kind) as address:
            assert "no engine answers at" in await refusal(run_dir, address)


async def test_an_address_of_another_kind_is_refused(run_dir: Path) -> None:
    assert "none of unix://…, tcp://… and ssh://…" in await refusal(run_dir, "npipe:////./pipe/docker")
    for wrong in ("ssh://", "ssh://user:password@machine", "ssh://machine:port", "ssh://machine/it's"):
        assert "is not ssh://[USER@]HOST" in await refusal(run_dir, wrong)


def test_every_fault_of_the_set_up_is_the_infrastructures() -> None:
    assert SandboxUnavailable.fault is Fault.INFRASTRUCTURE
