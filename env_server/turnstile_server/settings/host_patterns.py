"""Names of hosts, and patterns of them, as allow-lists of the network have them. Pure.

What must hold: one host has one form (``normal_host``), so two names are compared as text; whatever a resolver
could read as an address in disguise (``127.1``, ``0x7f.0.0.1``, ``2130706433``) is no name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated

import idna
from pydantic import AfterValidator

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_MAX_NAME = 253
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class HostPattern:
    """One entry of an allow-list. ``host``: in its normal form; with ``wildcard``, all names below it, not itself;
    empty with ``wildcard``: every name. ``port`` None: the server's default ports."""

    host: str
    wildcard: bool = False
    port: int | None = None

    def __str__(self) -> str:
        name = ("*." + self.host if self.host else "*") if self.wildcard else shown_host(self.host)
        return name if self.port is None else f"{name}:{self.port}"

    def matches(self, host: str) -> bool:
        """``host``: in its normal form. A wildcard matches names only, never an address."""
        if not self.wildcard:
            return host == self.host
        return not is_address(host) and (not self.host or host.endswith("." + self.host))

    def covers(self, other: HostPattern) -> bool:
        """True if every host that ``other`` matches is one of this pattern's."""
        if other.wildcard and self.wildcard:
            return self.host in ("", other.host) or other.host.endswith("." + self.host)
        return not other.wildcard and self.matches(other.host)


def parse_pattern(text: str) -> HostPattern:
    """``host``, ``*.suffix`` or ``*``, each with ``:port`` or without. Raises ValueError, saying what to write."""
    if "://" in text or "@" in text:
        raise ValueError(f"{text!r} is a URL: write its host alone, `pypi.org` or `pypi.org:443`")
    if "/" in text:
        raise ValueError(
            f"{text!r} is no host: paths cannot be allowed one by one, and ranges of addresses are for the "
            "setting egress.allow_addresses"
        )
    host, port = split_port(text)
    if host == "*":
        return HostPattern("", wildcard=True, port=port)
    if host.startswith("*."):
        name = normal_host(host[2:])
        if is_address(name):
            raise ValueError(f"{text!r}: a wildcard stands for names, not for addresses")
        return HostPattern(name, wildcard=True, port=port)
    if "*" in host:
        raise ValueError(f"{text!r}: `*` stands alone or before the first dot, as in `*.debian.org`")
    return HostPattern(normal_host(host), port=port)


def split_port(text: str) -> tuple[str, int | None]:
    """The host of ``host:port``, as it is written, and the port; None where there is none. Raises ValueError."""
    head, bracket, rest = text.partition("]") if text.startswith("[") else ("", "", text)
    if text.startswith("[") and (not bracket or (rest and not rest.startswith(":"))):
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets, as in `[2001:db8::1]:443`")
    if not text.startswith("[") and rest.count(":") > 1:
        raise ValueError(f"{text!r}: an IPv6 address stands in brackets, as in `[2001:db8::1]:443`")
    name, colon, digits = rest.partition(":")
    host = f"{head}]" if text.startswith("[") else name
    if not colon:
        return host, None
    if not re.fullmatch(r"[0-9]{1,5}", digits, re.ASCII) or not 1 <= int(digits) <= _MAX_PORT:
        raise ValueError(f"{text!r}: a port is a number from 1 to {_MAX_PORT}")
    return host, int(digits)


def normal_host(text: str) -> str:
    """The one form of a host: small letters, IDNA in ASCII, no dot at the end; addresses in their shortest form,
    without brackets. Raises ValueError."""
    if text.startswith("[") and text.endswith("]"):
        address: IPv4Address | IPv6Address = IPv6Address(text[1:-1])
        return _normal_address(address, text)
    if "%" not in text:
        try:
            return _normal_address(IPv4Address(text), text)
        except ValueError:
            pass
    try:
        name = text.lower() if text.isascii() else idna.encode(text, uts46=True).decode()
    except idna.IDNAError as error:
        raise ValueError(f"{text!r} is not the name of a host: {error}") from None
    name = name.removesuffix(".")
    labels = name.split(".")
    if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is not the name of a host")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is neither a name nor an address: write all four numbers, as in `10.0.0.5`")
    return name


def _normal_address(address: IPv4Address | IPv6Address, text: str) -> str:
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"{text!r}: an address with a zone is one of this machine's links")
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
    return str(address)


def is_address(host: str) -> bool:
    """True if a host in its normal form is an address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def shown_host(host: str) -> str:
    """A host in its normal form, as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def _checked_pattern(text: str) -> str:
    return str(parse_pattern(text))


PatternText = Annotated[str, AfterValidator(_checked_pattern)]
"""A pattern in settings and tasks, in its normal form."""
