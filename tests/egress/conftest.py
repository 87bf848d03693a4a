"""A proxy on a Unix socket, with hosts of the tests' own behind it: nothing here reaches the internet."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest
from egress_support import TLS_NAMES, Hosts, Names, ProxyRig

from bounded import bounded
from turnstile_server.egress.proxy import EgressProxy
from turnstile_server.settings import EgressSettings


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file with key and certificate, which is its own authority."""
    folder = tmp_path_factory.mktemp("tls")
    names = ",".join(f"DNS:{name}" for name in TLS_NAMES)
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={names}"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "both.pem").write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    return folder / "both.pem"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket."""
    made = Path(tempfile.mkdtemp(prefix="te-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
async def hosts(certificate: Path) -> AsyncIterator[Hosts]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    async with anyio.create_task_group() as serving:
        made = Hosts(context)
        await made.start(serving)
        yield made
        serving.cancel_scope.cancel()


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
async def rig(folder: Path, hosts: Hosts, names: Names, request: pytest.FixtureRequest) -> AsyncIterator[ProxyRig]:
    """Settings by ``@pytest.mark.parametrize("rig", [{…}], indirect=True)``."""
    changes = getattr(request, "param", {})
    fine = {
        "allow": ("*",),
        "allow_addresses": ("127.0.0.0/8",),
        "request_timeout_s": 5.0,
        "connect_timeout_s": 5.0,
    }
    proxy = EgressProxy(bounded(EgressSettings, **{**fine, **changes}), names)
    listener = await proxy.listen(folder / "net.sock")
    async with anyio.create_task_group() as serving:
        serving.start_soon(listener.serve)
        made = ProxyRig(folder / "net.sock", proxy, listener, hosts)
        made.allow(f"mirror.test:{hosts.http}", f"secure.test:{hosts.https}", f"*.wild.test:{hosts.http}")
        yield made
        serving.cancel_scope.cancel()
