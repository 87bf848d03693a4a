"""A certificate of the tests' own, for servers on 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificates(folder: Path) -> Path:
    """The folder with ``cert.pem``, ``key.pem`` and ``ca.pem``, as DOCKER_CERT_PATH names it: a certificate that
    is its own authority."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    (folder / "ca.pem").write_bytes((folder / "cert.pem").read_bytes())
    return folder
