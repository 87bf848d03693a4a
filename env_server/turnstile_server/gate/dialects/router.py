"""Which dialect is spoken at a path: the endpoints of all dialects in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from turnstile_server.gate.dialects.base import Dialect, Endpoint


@dataclass(frozen=True, slots=True)
class Route:
    dialect: Dialect
    endpoint: Endpoint
    params: Mapping[str, str]
    """Named parts of the path, and the query where they leave a name free."""


class DialectRouter:
    """``dialects``: where two serve the same path, the first whose endpoint asks for a header that is there, else
    the first that asks for none. ``fallback`` writes the errors of paths that nobody serves."""

    def __init__(self, dialects: Sequence[Dialect], fallback: Dialect) -> None:
        pairs = [(dialect, endpoint) for dialect in dialects for endpoint in dialect.endpoints]
        self._pairs = sorted(pairs, key=lambda pair: pair[1].header is None)
        self._plain = {
            endpoint.shown: (dialect, endpoint)
            for dialect, endpoint in reversed(self._pairs)
            if endpoint.header is None and not endpoint.pattern.groups
        }
        self._headers = {endpoint.shown for _, endpoint in pairs if endpoint.header is not None}
        self.fallback = fallback
        self.shown = ", ".join(sorted({endpoint.shown for _, endpoint in pairs}))
        """Every path, for people."""

    def find(self, path: str, query: bytes, headers: Mapping[str, str]) -> Route | None:
        """``path`` is what follows ``/e/{episode_id}``; ``headers`` by lower-case name."""
        asked = dict(parse_qsl(query.decode("latin-1"))) if query else {}
        if path not in self._headers and (known := self._plain.get(path)) is not None:
            return Route(*known, asked)
        for dialect, endpoint in self._pairs:
            if endpoint.header is not None and endpoint.header not in headers:
                continue
            found = endpoint.pattern.fullmatch(path)
            if found is not None:
                return Route(dialect, endpoint, {**asked, **found.groupdict()})
        return None
