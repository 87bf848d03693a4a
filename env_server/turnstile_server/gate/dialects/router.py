"""The way from a path to the dialect that serves it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

from turnstile_server.gate.dialects.base import Dialect, Endpoint

_VERSION = re.compile(r"v\d\w*")


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint of a dialect, and what its path and query say."""

    dialect: Dialect
    endpoint: Endpoint
    params: Mapping[str, str]
    """Named parts of the path, and the query's fields where the path has none of that name."""


class DialectRouter:
    """All endpoints of ``dialects`` in one table.

    Where two dialects serve the same path, the one whose endpoint asks for a header that the request has answers;
    without such a header the first that asks for none.
    """

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        pairs = [(dialect, endpoint) for dialect in dialects for endpoint in dialect.endpoints]
        self._pairs = sorted(pairs, key=lambda pair: pair[1].header is None)
        self._plain = {
            endpoint.shown: (dialect, endpoint)
            for dialect, endpoint in reversed(self._pairs)
            if endpoint.header is None and not endpoint.pattern.groups
        }
        self._headers = {endpoint.shown for _, endpoint in pairs if endpoint.header is not None}
        self._paths = sorted({endpoint.shown for _, endpoint in pairs})
        self._versions = {path.split("/")[1] for path in self._paths if _VERSION.fullmatch(path.split("/")[1])}
        self.fallback = dialects[0]
        """The first one; it writes the errors of paths that no dialect serves."""

    def find(self, path: str, query: bytes, headers: Mapping[str, str]) -> Route | None:
        """The route of ``path``, which is what follows ``/e/{episode_id}``; ``headers`` by lower-case name."""
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

    def not_served(self, path: str) -> str:
        """The reason that ``path`` is a 404, as a sentence for the caller. The sentence says so if the path has
        the version twice."""
        first, second = [*path.split("/"), "", ""][1:3]
        hint = ""
        if first in self._versions and second in self._versions:
            hint = f" (/{first}/{second} names the version twice: the base URL has a /{first} too many)"
        return f"nothing is served at {path or '/'}{hint}; the model API serves {', '.join(self._paths)}"
