"""Who guesses keys is slowed, counted and told of; who has the right key waits for nobody."""

from __future__ import annotations

import json
import logging
import time

import anyio
import httpx
import pytest

from control_support import KEY, OpenDoor
from turnstile_server.http import wrong_keys
from turnstile_server.http.connections import ConnectionLimits, Connections, extensions_of
from turnstile_server.http.wrong_keys import (
    FIRST_DELAY_S,
    FORGET_S,
    FREE,
    MOST_DELAY_S,
    MOST_PEERS,
    MOST_WAITING,
    TELL_EVERY_S,
    GuessingPeers,
    WrongKeys,
    peer_of,
)
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


def test_the_first_are_answered_at_once_then_later_and_later_up_to_a_bound() -> None:
    peers = GuessingPeers()
    delays = [peers.delay_s("a", 0.0) for _ in range(FREE + 40)]
    assert delays[: FREE + 3] == [0.0] * FREE + [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert set(delays[FREE + 3 :]) == {MOST_DELAY_S}
    assert peers.delay_s("b", 0.0) == 0.0, "each peer by itself"


def test_a_peer_that_was_quiet_for_long_begins_anew() -> None:
    peers = GuessingPeers()
    for _ in range(20):
        peers.delay_s("a", 0.0)
    assert peers.delay_s("a", FORGET_S) == MOST_DELAY_S
    assert peers.delay_s("a", 2 * FORGET_S + 1) == 0.0


def test_many_addresses_take_no_memory_and_push_no_guesser_out() -> None:
    peers = GuessingPeers()
    for _ in range(20):
        peers.delay_s("guesser", 0.0)
    delays = [peers.delay_s(f"address {number}", 1.0) for number in range(4 * MOST_PEERS)]
    assert len(peers) <= MOST_PEERS + 1
    assert delays[0] == 0.0
    assert delays[-1] == MOST_DELAY_S, "those behind the bound are one peer"
    assert peers.delay_s("guesser", 2.0) == MOST_DELAY_S
    peers.delay_s("later", 2.0 + 2 * FORGET_S)
    assert len(peers) == 1


@pytest.mark.parametrize(
    ("client", "peer"),
    [
        (("192.0.2.7", 4000), "192.0.2.7"),
        (("::ffff:192.0.2.7", 4000), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 4000), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 4000), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 4000), "fe80::/64"),
        (None, "a local socket"),
        (("", 0), "a local socket"),
    ],
)
def test_the_peer_of_a_request(client: tuple[str, int] | None, peer: str) -> None:
    assert peer_of({"client": client, "headers": [(b"x-forwarded-for", b"203.0.113.9")]}) == peer


async def test_each_sandbox_is_a_peer_of_its_own() -> None:
    connections = Connections("the sandboxes", ConnectionLimits(), per_owner=4)
    found = []
    for owner in ("a sandbox 1", "a sandbox 2"):
        seat = connections.take(owner)
        assert seat is not None
        found.append(peer_of({"client": None, "extensions": extensions_of(seat)}))
        seat.left()
    assert found == ["a sandbox 1", "a sandbox 2"]


async def test_only_so_many_answers_wait_and_further_ones_leave_at_once() -> None:
    keys, scope = WrongKeys(), {"client": ("192.0.2.7", 1)}
    left = 0

    async def slow() -> None:
        nonlocal left
        await keys.slow("control", scope)
        left += 1

    for _ in range(FREE):
        await keys.slow("control", scope)
    async with anyio.create_task_group() as tasks:
        for _ in range(MOST_WAITING + 30):
            tasks.start_soon(slow)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert left == 30
        tasks.cancel_scope.cancel()
    began = time.monotonic()
    with anyio.move_on_after(0.01) as cut:
        await keys.slow("control", scope)
    assert cut.cancelled_caught, "the places are free again"
    assert time.monotonic() - began < PATIENCE_S


async def test_the_log_and_the_notice_come_at_a_rate_and_count_what_was_between(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    now = 0.0
    counted: list[str] = []
    told: list[dict[str, int]] = []
    keys = WrongKeys(counted.append, lambda _, counts: told.append(counts), lambda: now)
    with anyio.move_on_after(0.2):
        for surface in ("control", "model", "model"):
            await keys.slow(surface, {"client": ("192.0.2.7", 1)})  # type: ignore[arg-type]
    now = TELL_EVERY_S + 1
    await keys.slow("tools", {"client": ("198.51.100.1", 1)})
    assert counted == ["control", "model", "model", "tools"]
    assert told == [{"control": 1}, {"model": 2, "tools": 1}]
    assert len(caplog.records) == 2
    assert "2 at model, 1 at tools; the last one from 198.51.100.1" in caplog.text


async def wrong_ones(client: httpx.AsyncClient, key: dict[str, str]) -> dict[str, int]:
    text = (await client.get("/metrics", headers=key)).text
    rows = [line for line in text.splitlines() if line.startswith("turnstile_wrong_keys_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in rows}


async def test_every_surface_counts_and_slows_them_and_the_right_key_never_waits(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guesser and the trainer have one address, as behind a reverse proxy."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(wrong_keys, "sleep", sleep)
    with open_door() as door:
        key, wrong = {"authorization": f"Bearer {door.key}"}, {"authorization": "Bearer wrong"}
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            body = {"task": {"instruction": "wait"}, "agent": "external"}
            made = (await client.post("/episodes", json=body, headers=key)).json()
            asked = {
                "control": ("GET", "/episodes", wrong),
                "viewer": ("GET", "/k/a-wrong-key-in-a-path/ui/", {}),
                "model": ("POST", made["model_url"] + "/v1/chat/completions", wrong),
                "tools": ("POST", made["tool_url"], wrong),
            }
            for _ in range(3):
                for method, url, headers in asked.values():
                    assert (await client.request(method, url, headers=headers, json={})).status_code == 401
            assert len(slept) >= 12 - 2 * FREE, "two processes where the server has workers"
            slept.clear()
            assert (await client.get("/episodes")).status_code == 401, "no key is no guess"
            episode_key = {"authorization": f"Bearer {made['episode_key']}"}
            for _ in range(5):
                assert (await client.get("/episodes", headers=key)).status_code == 200
                assert (await client.get(made["model_url"] + "/v1/models", headers=episode_key)).status_code == 200
            assert slept == []
            assert await wrong_ones(client, key) == dict.fromkeys(asked, 3)


async def test_events_have_a_notice_of_them(open_door: OpenDoor) -> None:
    with open_door() as door:
        key = {"authorization": f"Bearer {door.key}"}
        async with (
            httpx.AsyncClient(base_url=door.url, timeout=PATIENCE_S) as client,
            client.stream("GET", "/events", headers=key) as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            await client.get("/episodes", headers={"authorization": "Bearer wrong"})
            async for line in lines:
                if line == "event: notice":
                    break
            notice = json.loads((await anext(lines)).removeprefix("data: "))
    assert (notice["type"], notice["counts"]) == ("wrong_keys", {"control": 1})
    assert KEY not in notice["message"]
