"""The agent listener's address, told to the caller of a request in the caller's own terms.

The control API hands out ``model_url`` and ``tool_url``. A server cannot know by which name the outside knows its
machine, but the caller has just used one: the request's Host header. So the address is that host with the agent
listener's port, unless ``gate.public_url`` says otherwise. What must hold: an address never names an unspecified
host (``0.0.0.0``), and a Host header that is not a plain host name or address is not repeated. Sandboxes have an
address of their own and are not concerned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

LOOPBACK = {4: "127.0.0.1", 6: "::1"}

_NAME = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*\.?", re.A
)
"""A host name (RFC 1123), with the underscores that container names have."""
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[^\[\]:/@\s]+)(:[0-9]{1,5})?", re.A)
"""The Host header (RFC 9110, section 7.2), split from its port."""


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """``bound_url``: the agent listener as it is bound. ``public_url``: the setting, which wins. ``forwarded``:
    believe X-Forwarded-Host and X-Forwarded-Proto."""

    bound_url: str
    public_url: str | None = None
    forwarded: bool = False

    @property
    def default(self) -> str:
        """The address where nothing is known of the caller: of this machine, for this machine."""
        return self.public_url or loopback_url(self.bound_url)

    def of(self, scope: Scope) -> str:
        """The address for the caller of an HTTP request or a WebSocket handshake."""
        if self.public_url is not None:
            return self.public_url
        headers = Headers(scope=scope)
        scheme, host = "http", self._host(scope, headers)
        if self.forwarded and _first(headers, "x-forwarded-proto") == "https":
            scheme = "https"
        if host is None or not self._listens_for(host):
            return self.default
        port = urlsplit(self.bound_url).port
        return f"{scheme}://{host}:{port}"

    def _host(self, scope: Scope, headers: Headers) -> str | None:
        if self.forwarded and "x-forwarded-host" in headers:
            return plain_host(_first(headers, "x-forwarded-host"))
        server = scope.get("server")
        if server is None or server[1] is None:
            return None  # a Unix socket: its Host header names no machine
        given = headers.getlist("host")
        return plain_host(given[0]) if len(given) == 1 else None

    def _listens_for(self, host: str) -> bool:
        """True if the agent listener can be the one at ``host``. A listener on every address always can. One on
        loopback is not at another literal loopback address. One on a single address is only there."""
        bound = _literal(urlsplit(self.bound_url).hostname or "")
        asked = _literal(host)
        if bound is None or bound.is_unspecified:
            return True
        if bound.is_loopback:
            return asked is None or not asked.is_loopback or asked == bound
        return asked == bound


def plain_host(header: str) -> str | None:
    """The host of a Host header without its port, fit for a URL; None for anything but a host name or an address
    that can be connected to."""
    found = _HOST.fullmatch(header)
    if found is None:
        return None
    host = found["host"]
    address = _literal(host)
    if address is not None:
        return None if address.is_unspecified or address.is_multicast else _in_url(address)
    # A last label of digits would be read as an IPv4 address in one of its old forms ("0" is 0.0.0.0).
    last = host.rstrip(".").rpartition(".")[2]
    return host if _NAME.fullmatch(host) and not re.fullmatch(r"[0-9]+|0[xX][0-9A-Fa-f]*", last) else None


def loopback_url(url: str) -> str:
    """``url`` with an unspecified host (``0.0.0.0``, ``[::]``) replaced by the loopback address of its family."""
    parts = urlsplit(url)
    address = _literal(parts.hostname or "")
    if address is None or not address.is_unspecified:
        return url
    return parts._replace(netloc=f"{_in_url(ip_address(LOOPBACK[address.version]))}:{parts.port}").geturl()


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found


def _in_url(address: IPv4Address | IPv6Address) -> str:
    return f"[{address}]" if address.version == 6 else str(address)


def _first(headers: Headers, name: str) -> str:
    """The first of a list of values: what the proxy nearest to the caller saw."""
    return headers.get(name, "").partition(",")[0].strip()
