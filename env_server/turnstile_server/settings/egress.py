"""Settings of the network of sandboxes: what a task may ask for at most, and what its traffic may cost."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated

from pydantic import Field

from turnstile_server.settings.host_patterns import PatternText
from turnstile_server.settings.section import BoundedSection

_AllowedPort = Annotated[int, Field(ge=1, le=65535)]


class EgressSettings(BoundedSection):
    """The network of sandboxes, through the server's proxy ([network](network.md)). A task's `network` says what
    it needs; the sandboxes of all others reach nothing but the gate."""

    allow: tuple[PatternText, ...] = Field(
        (),
        description="The most that a task may ask for: `pypi.org`, `*.debian.org:80`, `*` (every name). Empty: no "
        "task gets a network.",
    )
    allow_addresses: tuple[IPv4Network | IPv6Network, ...] = Field(
        (),
        description="Ranges of private addresses that allowed names may lead to, e.g. `10.0.5.0/24` for a mirror. "
        "All other private, loopback and link-local addresses are refused, whatever a name leads to.",
    )
    ports: tuple[_AllowedPort, ...] = Field(
        (443, 80), min_length=1, description="Ports of a pattern that names none."
    )
    plain_http: bool = Field(
        True, description="Requests by `http://` are forwarded. False: only tunnels (`CONNECT`), for `https://`."
    )
    opaque_ports: tuple[_AllowedPort, ...] = Field(
        (),
        description="Ports whose tunnels need not be TLS, e.g. 22. In all others the name that TLS asks for (SNI) "
        "must be the tunnel's.",
    )
    max_bytes_up: int = Field(
        64 << 20, ge=0, description="Bytes that one sandbox may send to the network; then its connections are cut."
    )
    max_bytes_down: int = Field(2 << 30, ge=0, description="The same for what it receives.")
    max_connections: int = Field(2000, ge=1, description="Connections of one sandbox in all, refused ones too.")
    max_open: int = Field(32, ge=1, description="Connections of one sandbox at once; one more is refused.")
    max_open_total: int = Field(
        1024,
        ge=1,
        description="The same over all sandboxes, or a sixteenth of the process's descriptors if that is less: "
        "each takes two of them.",
    )
