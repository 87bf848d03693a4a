"""Requests to a Kubernetes API that is busy, against a plain HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from turnstile_server.sandboxes.kubernetes.cluster_access import ClusterAccess, Token
from turnstile_server.sandboxes.kubernetes.cluster_api import ApiRefused, ClusterApi

pytestmark = pytest.mark.anyio
BUSY = {"kind": "Status", "code": 429, "reason": "TooManyRequests", "message": "try again later"}


@asynccontextmanager
async def api_that_is_busy(times: int) -> AsyncIterator[tuple[ClusterApi, list[str]]]:
    """Answers 429 so many times, then with an object; and the requests that came."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.method)
        busy = len(asked) <= times
        headers = {"Retry-After": "0"} if busy else {}
        return web.json_response(BUSY if busy else {"made": True}, status=429 if busy else 201, headers=headers)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        api = ClusterApi(ClusterAccess(str(server.make_url("")).rstrip("/"), "boxes", None, Token()))
        api.open()
        try:
            yield api, asked
        finally:
            await api.close()


async def test_a_request_to_a_busy_cluster_is_sent_again() -> None:
    async with api_that_is_busy(2) as (api, asked):
        assert await api.request("POST", api.pods(), {}) == {"made": True}
    assert asked == ["POST"] * 3


async def test_a_cluster_that_stays_busy_refuses_and_its_status_is_no_object() -> None:
    async with api_that_is_busy(1000) as (api, asked):
        with pytest.raises(ApiRefused, match="try again later") as refused:
            await api.request("POST", api.pods(), {})
    assert (refused.value.code, refused.value.reason) == (429, "TooManyRequests")
    assert 1 < len(asked) < 20
