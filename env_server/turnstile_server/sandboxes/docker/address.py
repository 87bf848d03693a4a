"""The Docker engine's address, the connection to it, and the fault of the set-up where that fails.

The address comes from ``sandboxes.docker_host``, else ``DOCKER_HOST``, else the chosen context
(``DOCKER_CONTEXT``, ``docker context use``), else the usual socket; certificates from ``DOCKER_TLS_VERIFY`` and
``DOCKER_CERT_PATH``, or the context: as for Docker's own client.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, SocketAttribute
from docker import TLSConfig
from docker.context import ContextAPI
from docker.errors import APIError
from docker.utils import kwargs_from_env, parse_host

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.sandboxes.docker.ssh import SCHEME as SSH
from turnstile_server.sandboxes.keep_alive import keep_alive
from turnstile_server.unix_streams import over_transport

DEFAULT = "unix:///var/run/docker.sock"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """``url``: ``unix://PATH``, ``http://HOST:PORT``, ``https://HOST:PORT``, or ``ssh://…``, to which ``SshLink``
    makes a Unix socket: only of that can connections be made."""

    url: str
    tls: TLSConfig | None = None

    @classmethod
    def find(cls, docker_host: str | None) -> EngineAddress:
        """Raises DockerException for certificates that are not there, SandboxUnavailable for an address of another
        kind."""
        environment = dict(os.environ)
        if docker_host:
            environment["DOCKER_HOST"] = docker_host
        found: dict[str, Any] = dict(kwargs_from_env(environment=environment))
        if not found.get("base_url"):
            found = _of_context(environment.get("DOCKER_CONTEXT")) or found
        tls: TLSConfig | None = found.get("tls")
        given = found.get("base_url") or DEFAULT
        if urlsplit(given).scheme == SSH:
            return cls(given)
        url = str(parse_host(given, tls=tls is not None)).replace("http+unix://", "unix://")
        if urlsplit(url).scheme not in ("unix", "http", "https"):
            raise SandboxUnavailable(f"the engine's address {given} is none of unix://…, tcp://… and ssh://…")
        return cls(url, tls)

    @property
    def path(self) -> Path | None:
        """Path of the Unix socket; None for another address."""
        return Path(urlsplit(self.url).path) if self.url.startswith("unix://") else None

    def client_options(self) -> dict[str, Any]:
        """Arguments of the SDK's client."""
        return {"base_url": self.url} | ({} if self.tls is None else {"tls": self.tls})

    async def connect(self) -> ByteStream:
        """A new connection, for what the SDK cannot do without blocking. Raises OSError, ssl.SSLError."""
        if self.path is not None:
            return await over_transport(await anyio.connect_unix(self.path))
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None  # the SDK asks for one
        connection: ByteStream
        if parts.scheme == "http":
            connection = await anyio.connect_tcp(parts.hostname, parts.port)
        else:
            connection = await anyio.connect_tcp(
                parts.hostname,
                parts.port,
                ssl_context=_ssl_context(self.tls),
                tls_standard_compatible=False,  # Docker closes without a TLS goodbye
            )
        keep_alive(connection.extra(SocketAttribute.raw_socket))
        return connection

    def connect_blocking(self, timeout_s: float) -> socket.socket:
        """The same, for threads. Raises OSError, ssl.SSLError."""
        if self.path is not None:
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                local.settimeout(timeout_s)
                local.connect(str(self.path))
            except BaseException:
                local.close()
                raise
            return local
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        connection = socket.create_connection((parts.hostname, parts.port or 0), timeout_s)
        keep_alive(connection)
        if parts.scheme == "http":
            return connection
        try:
            return _ssl_context(self.tls).wrap_socket(connection, server_hostname=parts.hostname)
        except BaseException:
            connection.close()
            raise

    def fault(self, error: BaseException) -> str:
        """The fault of the set-up where the engine cannot be reached, and the remedy."""
        said = _innermost(error)
        if self.path is not None:
            return _socket_fault(self.path) or f"the engine's socket {self.path} cannot be used: {said}"
        if "HTTP request to an HTTPS server" in said:
            return (
                f"the engine at {self.url} wants TLS: set DOCKER_TLS_VERIFY=1 and DOCKER_CERT_PATH, the folder "
                "with ca.pem, cert.pem and key.pem"
            )
        if any(sign in said for sign in ("UNKNOWN_CA", "CERTIFICATE_REQUIRED", _CUT)):
            said += " (the engine does not accept cert.pem)"
        if any(sign in said for sign in ("WRONG_VERSION_NUMBER", "record layer failure", "wrong version number")):
            return f"the engine at {self.url} speaks no TLS: unset DOCKER_TLS_VERIFY and DOCKER_CERT_PATH"
        if any(sign in said.upper() for sign in ("CERTIFICATE", "UNKNOWN_CA", _CUT.upper())):
            return (
                f"TLS to the engine at {self.url} fails: {said}. DOCKER_CERT_PATH must name the folder with this "
                "engine's ca.pem, and the client's cert.pem and key.pem"
            )
        return f"no engine answers at {self.url}: {said}"


_CUT: Final = "EOF occurred in violation of protocol"
"""In place of the alert, which is lost where the engine closes before it was read."""


def _of_context(name: str | None) -> dict[str, Any]:
    """What a context of Docker's client says, None being the current one; empty for the default. Raises
    SandboxUnavailable."""
    context = ContextAPI.get_context(name)
    if context is None:
        raise SandboxUnavailable(
            f"there is no Docker context {name or 'of the current name'} beside Docker's config.json: see "
            "`docker context ls` (DOCKER_CONTEXT, DOCKER_CONFIG)"
        )
    if context.name == "default":
        return {}
    return {"base_url": context.Host, "tls": context.TLSConfig}


def _ssl_context(tls: TLSConfig | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls is not None and tls.verify and tls.ca_cert:
        context.load_verify_locations(tls.ca_cert)
    else:
        context.load_default_certs()
    if tls is not None and not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if tls is not None and tls.cert:
        context.load_cert_chain(*tls.cert)
    return context


def _socket_fault(path: Path) -> str | None:
    """None: the socket is there, and this process may use it."""
    mounted = (
        f"in a container, mount it (-v {path}:{path}, or Docker's own of the host: -v /var/run/docker.sock:{path})"
    )
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"there is no engine's socket at {path}; {mounted}"
    except PermissionError:
        return f"the folder of the engine's socket {path} cannot be entered by uid {os.geteuid()}"
    if stat.S_ISDIR(found.st_mode):
        return (
            f"{path} is a folder, not the engine's socket: `docker run -v` makes one where the host has nothing "
            "at the path it was given; remove the folder there and name the right path"
        )
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is not a socket"
    if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
        return (
            f"uid {os.geteuid()} may not use the engine's socket {path}, which is for group {found.st_gid}: "
            f"start the server's container with --group-add {found.st_gid} "
            "(on the host: --group-add $(stat -c %g /var/run/docker.sock))"
        )
    return None


def _innermost(error: BaseException) -> str:
    """The engine's own words, else the text of the first error of a chain: the SDK and its HTTP client wrap it
    several times."""
    while not isinstance(error, APIError) and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, APIError):
        return str(error.explanation or error)
    return str(error) or type(error).__name__
