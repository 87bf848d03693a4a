"""A certificate of the server's own making, which whoever dials it knows by its hash. It is kept nowhere."""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from pathlib import Path

_NAME = "turnstile"
_YEARS = 10
"""Nobody looks at it: the hash is what counts."""


def own_certificate(folder: Path) -> tuple[ssl.SSLContext, str]:
    """The TLS of a server with a new key, and the SHA-256 of its certificate in DER, in hexadecimal. ``folder``:
    only the server's user can enter it; the key is there for a moment. Raises OSError, ImportError."""
    from cryptography import x509  # noqa: PLC0415 - in the extra `harbor`
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    now = datetime.datetime.now(tz=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding
    secret = key.private_bytes(encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody comes back
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(secret + certificate.public_bytes(encoding.PEM))
        file.flush()
        context.load_cert_chain(file.name)
    return context, hashlib.sha256(certificate.public_bytes(encoding.DER)).hexdigest()
