"""Handling of each route of the control API where there are several workers. One table; pure.

A route that is not here is not served by the process in front: a test holds that every route of a server's OpenAPI
has its line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Way(Enum):
    """The way a request is answered."""

    FRONT = "by the process in front itself"
    EPISODE = "by the worker that has the episode of the path"
    NAMED = "by the worker that has the episode of the query (`episode_id`), or by the first that knows"
    PLACED = "by the worker where a new episode goes"
    SESSION = "by the worker that has the episode or the session that the request names"
    ANY = "by any worker: all would say the same"
    MERGED = "by all workers, joined to one answer"
    ENGINE = "by the first worker, which alone changes the engines, while the others wait"
    REFUSED = "not at all, with the reason"


ROUTES: Final[Mapping[tuple[str, str], Way]] = {
    ("GET", "/health"): Way.FRONT,
    ("GET", "/ready"): Way.MERGED,
    ("GET", "/metrics"): Way.MERGED,
    ("GET", "/live"): Way.MERGED,
    ("GET", "/load"): Way.MERGED,
    ("POST", "/drain"): Way.MERGED,
    ("GET", "/events"): Way.MERGED,
    # Many episodes
    ("GET", "/episodes"): Way.MERGED,
    ("GET", "/stats"): Way.MERGED,
    ("GET", "/groups"): Way.MERGED,
    ("GET", "/groups/{group_id}"): Way.MERGED,
    ("POST", "/leases/{lease_id}"): Way.MERGED,
    # One episode
    ("POST", "/episodes"): Way.PLACED,
    ("GET", "/episodes/{episode_id}"): Way.EPISODE,
    ("DELETE", "/episodes/{episode_id}"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/finish"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/cancel"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/reward"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/trained"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/audit"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/pending"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/completions"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/turns"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/samples"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/tree"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/journal"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/network"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/breaks"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/spans"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/work"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/replay"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/replay/files"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/replay/{digest}"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/regrade"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/snapshot"): Way.EPISODE,
    ("GET", "/episodes/{episode_id}/snapshots"): Way.EPISODE,
    ("POST", "/episodes/{episode_id}/fork"): Way.EPISODE,
    ("GET", "/turns/{turn_id}/tokens"): Way.NAMED,
    ("GET", "/turns/{turn_id}/tokens/find"): Way.NAMED,
    # What a trainer can choose
    ("GET", "/tasks"): Way.ANY,
    ("GET", "/agents"): Way.ANY,
    ("GET", "/sandboxes"): Way.ANY,
    # OpenEnv
    ("GET", "/metadata"): Way.ANY,
    ("GET", "/list_environments"): Way.ANY,
    ("GET", "/{env_name}/splits"): Way.ANY,
    ("POST", "/{env_name}/tasks"): Way.ANY,
    ("POST", "/{env_name}/num_tasks"): Way.ANY,
    ("POST", "/{env_name}/task"): Way.ANY,
    ("POST", "/{env_name}/task_range"): Way.ANY,
    ("GET", "/schema"): Way.ANY,
    ("POST", "/reset"): Way.PLACED,
    ("POST", "/step"): Way.SESSION,
    ("GET", "/state"): Way.NAMED,
    ("POST", "/mcp"): Way.SESSION,
    ("DELETE", "/mcp"): Way.SESSION,
    # The engines
    ("GET", "/engine"): Way.MERGED,
    ("POST", "/engine/pause"): Way.ENGINE,
    ("POST", "/engine/resume"): Way.ENGINE,
    ("POST", "/engine/weights"): Way.ENGINE,
    ("POST", "/engine/weights/begin"): Way.ENGINE,
    ("POST", "/engine/weights/bucket"): Way.ENGINE,
    ("POST", "/engine/weights/end"): Way.ENGINE,
    ("POST", "/engine/weights/cancel"): Way.ENGINE,
    ("POST", "/engine/groups"): Way.ENGINE,
    ("DELETE", "/engine/groups/{name}"): Way.ENGINE,
    ("POST", "/engine/sleep"): Way.REFUSED,
    ("POST", "/engine/wake"): Way.REFUSED,
    ("POST", "/engine/adapters"): Way.REFUSED,
    ("DELETE", "/engine/adapters/{name}"): Way.REFUSED,
    ("POST", "/engine/workers"): Way.REFUSED,
    ("DELETE", "/engine/workers/{worker_id}"): Way.REFUSED,
}

UNKNOWN: Final = "unknown"
"""The template of a request that no line has."""
_PARAMETER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The line of a request. ``episode_id``: of its path."""

    way: Way
    template: str
    episode_id: str | None = None


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", template))


_PATTERNS: Final = [(method, template, _pattern(template), way) for (method, template), way in ROUTES.items()]


def route_of(method: str, path: str) -> RoutedRequest:
    """``path``: decoded. One that no line has goes to any worker, which says what is wrong with it."""
    for known, template, pattern, way in _PATTERNS:
        if known == method and (match := pattern.fullmatch(path)) is not None:
            return RoutedRequest(way, template, match.groupdict().get("episode_id"))
    return RoutedRequest(Way.ANY, UNKNOWN)
