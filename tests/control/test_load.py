"""``GET /load`` and ``POST /drain`` on a real server: how full it is, and that it takes no more."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest
from test_control_api import TASK, create

from control_support import Door, OpenDoor
from turnstile.models import ServerLoad
from waiting import wait_until

pytestmark = pytest.mark.anyio


def http_of(door: Door) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {door.key}"}
    return httpx.AsyncClient(base_url=door.url, headers=headers, timeout=60)


async def load(http: httpx.AsyncClient) -> ServerLoad:
    answer = await http.get("/load")
    assert answer.status_code == 200, answer.text
    return ServerLoad.model_validate_json(answer.content)


@pytest.mark.slow
async def test_a_server_tells_how_full_it_is_and_who_it_is(open_door: OpenDoor) -> None:
    limits = {"episodes": {"max_running": 6, "max_open": 10}, "sandboxes": {"kind": "none", "max_open": 20}}
    with open_door(**limits) as door:
        async with http_of(door) as http:
            empty = await load(http)
            assert (empty.open, empty.running, empty.queued, empty.free) == (0, 0, 0, 6)
            assert (empty.max_running, empty.max_open, empty.max_sandboxes) == (6, 10, 20)
            assert (empty.draining, empty.drained, empty.refusal) == (False, False, None)
            assert empty.grading_places >= 1
            assert empty.memory_bytes is not None
            assert empty.memory_available_bytes is not None
            assert 0 < empty.memory_available_bytes <= empty.memory_bytes
            await create(http)
            await create(http)
            full = await load(http)
            assert (full.open, full.running, full.free) == (2, 2, 4)
            assert full.server_id == empty.server_id
            assert full.server_id.startswith("srv_")
            assert full.node == socket.gethostname()
            async with httpx.AsyncClient(base_url=door.url, timeout=60) as stranger:
                assert [(await stranger.request(*one)).status_code for one in STRANGE] == [401, 401]
            assert not (await load(http)).draining


STRANGE = (("GET", "/load"), ("POST", "/drain"))


@pytest.mark.slow
async def test_two_servers_are_told_apart(open_door: OpenDoor) -> None:
    with open_door() as one, open_door() as other:
        async with http_of(one) as first, http_of(other) as second:
            assert (await load(first)).server_id != (await load(second)).server_id


async def test_a_draining_server_takes_no_new_episode_and_serves_those_it_has(open_door: OpenDoor) -> None:
    with open_door(episodes={"drained_linger_s": 60}) as door:
        async with http_of(door) as http:
            kept = await create(http, idempotency_key="before", group_id="g")
            other = await create(http, group_id="g")
            for _ in range(2):  # as often as one likes
                told = ServerLoad.model_validate_json((await http.post("/drain")).content)
                assert (told.draining, told.drained, told.open) == (True, False, 2)
            assert told.refusal == "the server is draining: it ends once its 2 open episodes have ended"
            refused = await http.post("/episodes", json={"task": {"instruction": "More."}})
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "server_draining"
            assert "at another server" in refused.json()["error"]["message"]
            ready = await http.get("/ready")
            assert ready.status_code == 503
            assert "draining" in ready.json()["reason"]
            assert (await http.get("/health")).status_code == 200
            # A creation whose answer was lost is answered; what is open goes on.
            again = await http.post("/episodes", json={**TASK, "idempotency_key": "before", "group_id": "g"})
            assert (again.status_code, again.json()["episode_id"]) == (200, kept.episode_id)
            door.add_turn(kept.episode_id)
            assert (await http.post(f"/episodes/{kept.episode_id}/finish")).json()["status"] == "completed"
            await http.delete(f"/episodes/{other.episode_id}")
            assert not (await load(http)).drained, "its samples were not fetched"
            assert (await http.get(f"/episodes/{kept.episode_id}/samples")).status_code == 200
            await wait_until(lambda: drained(http))


async def drained(http: httpx.AsyncClient) -> bool:
    return (await load(http)).drained


@pytest.mark.slow
async def test_what_nobody_fetches_holds_a_drained_server_up_for_a_while_only(open_door: OpenDoor) -> None:
    with open_door(episodes={"drained_linger_s": 0.2}) as door:
        async with http_of(door) as http:
            made: Any = await create(http)
            await http.post("/drain")
            await http.post(f"/episodes/{made.episode_id}/cancel")
            await wait_until(lambda: drained(http))
