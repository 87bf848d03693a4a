"""A certificate of the tests' own, for servers on 127.0.0.1."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certificates(folder: Path, *, expired: bool = False) -> Path:
    """The folder with ``cert.pem``, ``key.pem`` and ``ca.pem``, as DOCKER_CERT_PATH names it: a certificate that
    is its own authority."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    if expired:
        again = ["openssl", "x509", "-in", str(cert), "-signkey", str(key), "-days", "-1", "-out", str(cert)]
        subprocess.run(again, check=True, capture_output=True)
    (folder / "ca.pem").write_bytes(cert.read_bytes())
    return folder


def server_context(folder: Path) -> ssl.SSLContext:
    """Of a server with these certificates, which wants one of its clients, as Docker does with ``--tlsverify``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context
