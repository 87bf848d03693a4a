"""The bodies that real agents sent are read as if each came alone, and most of them only where they are new."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from agents_matrix.recording import SUFFIX, Call, read
from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import BodyContext, ModelRequest, Purpose
from turnstile_server.gate.dialects.parse_cache import ParseCache
from turnstile_server.gate.dialects.registry import load_dialects
from turnstile_server.gate.dialects.router import DialectRouter, Route

RECORDINGS = Path(__file__).parent / "recordings"
AGENTS = sorted(path.name for path in RECORDINGS.iterdir())

CONTINUED = 0.85
"""Least share of an agent's bodies, but for the first of each episode, that continue an earlier one. The others
begin a conversation: sub-agents, titles, summaries."""


def parsed(route: Route, body: bytes, before: ParseCache | None) -> ModelRequest | str:
    try:
        return route.dialect.parse(body, BodyContext(before, route.params))
    except InvalidRequest as refused:
        return refused.message


def routed(router: DialectRouter, call: Call) -> Route | None:
    headers = {name.lower(): value for name, value in call.headers}
    route = router.find(call.path, call.query.encode(), headers)
    return route if route is not None and route.endpoint.purpose is Purpose.TURN else None


@pytest.mark.parametrize("agent", AGENTS)
def test_recorded_bodies_are_read_where_they_are_new(
    agent: str, record_property: Callable[[str, object], None]
) -> None:
    router = DialectRouter(load_dialects())
    counts: Counter[str] = Counter()
    for file in sorted((RECORDINGS / agent).glob(f"*{SUFFIX}")):
        caches: defaultdict[str, ParseCache] = defaultdict(ParseCache)
        for call in read(file).calls:
            if (route := routed(router, call)) is None:
                continue
            body, before = call.body.encode(), caches[route.dialect.name]
            new, whole = before.weigh(body, route.dialect.history)
            if new.size < whole.size:
                counts["bytes"] += whole.size
                counts["new bytes"] += new.size
            assert parsed(route, body, before) == parsed(route, body, None)
            counts["bodies"] += 1
        counts["first"] += len(caches)
        counts["continued"] += sum(cache.continued for cache in caches.values())
    later = counts["bodies"] - counts["first"]
    share = counts["continued"] / later
    new_bytes = counts["new bytes"] / counts["bytes"]
    record_property("continued", f"{share:.2f} of {later} bodies, of which {new_bytes:.2f} is new")
    assert share >= CONTINUED
