"""Which Host and Origin a request may name. It keeps web pages of strangers from acting on a server.

A page of any site can send requests to a server on the reader's machine or network. Browsers say the page's site
in ``Origin``; and a page that had its own name resolve to the server's address (DNS rebinding) has that name in
``Host``. The MCP specification asks servers to check:
https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#security-warning

Holds: a request without ``Origin`` comes from no page and passes the check of origins; a listener on a loopback
address serves loopback names only, and what the settings name. A listener on other addresses is called by names
that it cannot know (a service's, a proxy's), so it serves every Host unless the settings name some; but where no
key keeps strangers out, it serves no name that could be a stranger's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from turnstile_server.errors import ForeignHost, ForeignOrigin, TurnstileError

_ANY = "*"
_DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_POLICY_VIOLATION = 1008


class ListenerSettings(Protocol):
    """The settings of a listener's section that are about its callers."""

    @property
    def host(self) -> str: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...] | None: ...

    @property
    def allowed_origins(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class OriginRules:
    """``section``: of the settings that they come from; errors name it."""

    section: str
    hosts: frozenset[str] | None
    """Names that are served beside loopback ones, without ports. None: every name is."""
    origins: frozenset[str]
    """``scheme://host:port``, ``scheme://host:*``, ``null`` or ``*``."""
    named_only: bool = False
    """True: where every name is served, only those that no stranger can have point here."""

    @classmethod
    def of(
        cls, section: str, settings: ListenerSettings, public_url: str | None = None, *, named_only: bool = False
    ) -> OriginRules:
        """``public_url``: where the listener is reached, if a setting says so; its name and origin are allowed.

        ``named_only``: a listener on other addresses than loopback, whose settings name no hosts, serves IP
        addresses and names without a dot. Those are of the local network; any other could be a stranger's, whose
        page had it resolve to this server.
        """
        public = _split(public_url or "")
        names = {public.hostname} if public is not None and public.hostname else set()
        listed = settings.allowed_hosts
        if listed is None:
            hosts = frozenset({settings.host, *names}) if _is_loopback(settings.host) else None
        else:
            hosts = None if _ANY in listed else frozenset({*(name.lower() for name in listed), *names})
        origins = {_normal(origin) or origin for origin in settings.allowed_origins}
        if public_url is not None and (own := _normal(public_url)) is not None:
            origins.add(own)
        return cls(section, hosts, frozenset(origins), named_only and listed is None)

    def check(self, scope: Scope) -> None:
        """Raises ForeignHost or ForeignOrigin. A Unix socket is reached by no name, so its Host is not checked."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if host and not _is_unix(scope) and not self._serves(host):
            raise ForeignHost(
                f"this server is not reached as {host[:200]!r}. If it should be, name it in "
                f"{self.section}.allowed_hosts"
            )
        if len(headers.getlist("host")) > 1:
            raise ForeignHost("the request names several hosts")
        for origin in headers.getlist("origin"):
            if not self._allows(origin, host, _is_unix(scope)):
                raise ForeignOrigin(
                    f"pages of {origin[:200]!r} may not use this server. If they should, name it in "
                    f"{self.section}.allowed_origins"
                )

    def _serves(self, host: str) -> bool:
        name = _hostname(host)
        if self.hosts is None:
            return not self.named_only or (name is not None and _is_local(name))
        return name is not None and (_is_loopback(name) or name in self.hosts)

    def _allows(self, origin: str, host: str, unix: bool) -> bool:
        if _ANY in self.origins or origin in self.origins:
            return True
        parts = _split(origin)
        if parts is None or not parts.hostname:
            return False
        if {_normal(origin), f"{parts.scheme}://{_bracketed(parts.hostname)}:{_ANY}"} & self.origins:
            return True
        if _is_loopback(parts.hostname):
            return unix or _is_loopback(_hostname(host) or "")
        at = _split(f"{parts.scheme}://{host}")
        return at is not None and (at.hostname, _port(at)) == (parts.hostname, _port(parts))


class OriginCheck:
    """ASGI middleware: checks the requests that ``covers`` names.

    Raises what ``OriginRules.check`` raises; refuses the handshake of a WebSocket with code 1008.
    """

    def __init__(self, app: ASGIApp, rules: OriginRules, covers: Callable[[Scope], bool]) -> None:
        self._app = app
        self._rules = rules
        self._covers = covers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self._covers(scope):
            try:
                self._rules.check(scope)
            except TurnstileError as error:
                if scope["type"] == "http":
                    raise
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": error.message[:120]})
                return
        await self._app(scope, receive, send)


def _is_unix(scope: Scope) -> bool:
    server = scope.get("server")
    return server is None or server[1] is None


def _is_loopback(name: str) -> bool:
    """``*.localhost`` is resolved by browsers themselves (RFC 6761), so nobody can rebind it."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_local(name: str) -> bool:
    """An address, or a name that no public DNS has."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return _is_loopback(name) or "." not in name
    return True


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises for a port that is none
    except ValueError:
        return None
    behind = parts.netloc.rpartition("]")[2] if "]" in parts.netloc else ""
    if behind and not behind.startswith(":"):  # [::1]evil.com, which Python reads as ::1
        return None
    return parts


def _hostname(host: str) -> str | None:
    parts = _split(f"//{host}")
    return None if parts is None or parts.netloc != host or "@" in host else parts.hostname


def _port(parts: SplitResult) -> int | None:
    return parts.port if parts.port is not None else _DEFAULT_PORTS.get(parts.scheme)


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _normal(origin: str) -> str | None:
    """``scheme://host:port`` in lower case with the port always there; None for what is no URL."""
    parts = _split(origin)
    if parts is None or not parts.hostname or not parts.scheme:
        return None
    return f"{parts.scheme}://{_bracketed(parts.hostname)}:{_port(parts)}"
