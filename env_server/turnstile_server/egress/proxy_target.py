"""The target that a client of the proxy asks for: a host and a port, for a tunnel or for one request. Pure.

What must hold: host and port are read in one way, here; a request that another server could read in two ways is
refused; of a URL, only host and port leave this module for a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import h11

from turnstile.models.network import NetworkOutcome
from turnstile_server.egress.refusal import NetworkRefused
from turnstile_server.settings.host_patterns import is_address, normal_host, shown_host, split_port

_HTTP_PORT = 80
_SCHEME = "http://"
_HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)


@dataclass(frozen=True, slots=True)
class ProxyTarget:
    """``host``: in its normal form. ``path`` None: a tunnel."""

    method: str
    host: str
    port: int
    path: str | None = None

    @property
    def tunnel(self) -> bool:
        return self.path is None

    @property
    def authority(self) -> str:
        """As a ``Host`` header has it."""
        shown = shown_host(self.host)
        return shown if self.port == _HTTP_PORT and not self.tunnel else f"{shown}:{self.port}"

    @property
    def by_address(self) -> bool:
        return is_address(self.host)


def target_of(request: h11.Request) -> ProxyTarget:
    """Raises NetworkRefused."""
    method, text = request.method.decode("ascii"), request.target.decode("ascii")
    if method == "CONNECT":
        host, port = _authority(text)
        if port is None:
            raise _refused(f"CONNECT needs host:port, not {_shown(text)}")
        return ProxyTarget(method, host, port)
    if text.lower().startswith("https://"):
        raise _refused("https:// URLs need a tunnel: send CONNECT host:443")
    if not text.lower().startswith(_SCHEME):
        raise _refused("this is a proxy: it takes CONNECT host:port, and requests with a whole http:// URL")
    authority, path = re.fullmatch(r"([^/?#]*)(.*)", text[len(_SCHEME) :], re.DOTALL).groups()  # type: ignore[union-attr]
    if "#" in path:
        raise _refused("the URL has a fragment")
    host, port = _authority(authority)
    target = ProxyTarget(method, host, port or _HTTP_PORT, path if path.startswith("/") else "/" + path)
    _check_host_header(request, target)
    _check_framing(request)
    return target


def forwarded_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those that are for the other end: without the ones of this connection, and without the body's framing where
    that is by chunks, which each end makes itself."""
    listed = list(headers)
    named = {word.strip().lower() for name, value in listed if name == b"connection" for word in value.split(b",")}
    chunked = any(name == b"transfer-encoding" for name, _ in listed)
    drop = _HOP_BY_HOP | (named - {b"host", b"content-length"}) | ({b"content-length"} if chunked else set())
    return [(name, value) for name, value in listed if name not in drop]


def upstream_request(request: h11.Request, target: ProxyTarget) -> h11.Request:
    """``request`` as the host gets it, over a connection for it alone."""
    chunked = any(name == b"transfer-encoding" for name, _ in request.headers)
    rest = [(name, value) for name, value in forwarded_headers(request.headers) if name != b"host"]
    headers = [
        (b"host", target.authority.encode()),
        *rest,
        *([(b"transfer-encoding", b"chunked")] if chunked else []),
        (b"connection", b"close"),
    ]
    assert target.path is not None
    return h11.Request(method=request.method, target=target.path.encode(), headers=headers)


def _authority(text: str) -> tuple[str, int | None]:
    if "@" in text:
        raise _refused("credentials in a URL are not passed on: leave out what stands before the @")
    try:
        host, port = split_port(text)
        return normal_host(host), port
    except ValueError:
        raise _refused(f"{_shown(text)} is not host:port") from None


def _check_host_header(request: h11.Request, target: ProxyTarget) -> None:
    hosts = [value for name, value in request.headers if name == b"host"]
    for value in hosts:
        host, port = _authority(value.decode("latin-1"))
        if (host, port or _HTTP_PORT) != (target.host, target.port):
            raise _refused("the Host header names another host than the URL")


def _check_framing(request: h11.Request) -> None:
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise _refused("the request has both Content-Length and Transfer-Encoding")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def _refused(detail: str) -> NetworkRefused:
    return NetworkRefused(NetworkOutcome.REQUEST, detail)
