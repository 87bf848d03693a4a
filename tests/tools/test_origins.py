"""Which Host and Origin are served: the rules by themselves, and on the real listeners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tools_support import mcp_stage

from bounded import bounded
from turnstile_server.errors import ForeignHost, ForeignOrigin
from turnstile_server.hosted import hosted_settings
from turnstile_server.http.origins import OriginCheck, OriginRules
from turnstile_server.settings import GateSettings, Settings

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def rules(public_url: str | None = None, **settings: Any) -> OriginRules:
    return OriginRules.of("gate", bounded(GateSettings, **settings), public_url)


def verdict(rules: OriginRules, host: str, *origins: str, unix: bool = False) -> str:
    headers = [(b"host", host.encode()), *((b"origin", origin.encode()) for origin in origins)]
    server = ("/run/agent.sock", None) if unix else ("127.0.0.1", 8001)
    try:
        rules.check({"type": "http", "headers": headers, "server": server})
    except ForeignHost as error:
        return "host" if "gate.allowed_hosts" in error.message else error.message
    except ForeignOrigin as error:
        return "origin" if "gate.allowed_origins" in error.message else error.message
    return "served"


EVIL = "evil.example.com"


@pytest.mark.parametrize(
    ("host", "origins", "expected"),
    [
        ("127.0.0.1:8001", [], "served"),
        ("localhost:8001", [], "served"),
        ("LOCALHOST", [], "served"),
        ("[::1]:8001", [], "served"),
        ("127.8.9.10:1", [], "served"),
        ("agent.localhost:8001", [], "served"),
        ("", [], "served"),
        (EVIL, [], "host"),
        (f"{EVIL}:8001", [f"http://{EVIL}:8001"], "host"),
        ("localhost.evil.com", [], "host"),
        ("127.0.0.1.evil.com", [], "host"),
        ("127.0.0.1@evil.com", [], "host"),
        ("evil.com/127.0.0.1", [], "host"),
        ("localhost:port", [], "host"),
        ("[::1", [], "host"),
        (f"[::1]{EVIL}", [], "host"),
        (f"[::1].{EVIL}:8001", [], "host"),
        ("10.1.2.3:8001", [], "host"),
        ("localhost:8001", ["http://localhost:8001"], "served"),
        ("localhost:8001", ["http://127.0.0.1:6274"], "served"),
        ("localhost:8001", ["https://[::1]"], "served"),
        ("localhost:8001", [f"http://{EVIL}"], "origin"),
        ("localhost:8001", ["http://localhost.evil.com"], "origin"),
        ("localhost:8001", ["null"], "origin"),
        ("localhost:8001", ["*"], "origin"),
        ("localhost:8001", [""], "origin"),
        ("localhost:8001", ["http://[::1"], "origin"),
        ("localhost:8001", [f"http://[::1]{EVIL}"], "origin"),
        ("localhost:8001", ["http://localhost:8001", f"http://{EVIL}"], "origin"),
        ("localhost:8001", [f"http://{EVIL}", "http://localhost:8001"], "origin"),
    ],
)
def test_a_loopback_listener_serves_loopback_names_and_local_pages(
    host: str, origins: list[str], expected: str
) -> None:
    assert verdict(rules(), host, *origins) == expected


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("gpu1:8001", None, "served"),
        ("10.1.2.3:8001", "http://10.1.2.3:8001", "served"),
        ("gpu1", "http://gpu1", "served"),
        ("gpu1", "https://gpu1", "served"),
        ("gpu1:443", "https://gpu1", "served"),
        ("gpu1:8001", "http://gpu1:9000", "origin"),
        ("gpu1:8001", "http://gpu2:8001", "origin"),
        ("gpu1:8001", f"https://{EVIL}", "origin"),
        ("gpu1:8001", "http://localhost:8001", "origin"),
    ],
)
def test_a_listener_on_all_addresses_serves_every_name_and_only_its_own_pages(
    host: str, origin: str | None, expected: str
) -> None:
    assert verdict(rules(host="0.0.0.0"), host, *([] if origin is None else [origin])) == expected


def test_the_public_url_and_the_settings_add_names_and_origins() -> None:
    public = rules("https://rl.example.org/agents")
    assert verdict(public, "rl.example.org", "https://rl.example.org") == "served"
    assert verdict(public, "localhost:8001", "https://rl.example.org") == "served"
    assert verdict(public, "localhost:8001", "http://rl.example.org") == "origin"
    named = rules(
        host="0.0.0.0", allowed_hosts=("GPU1",), allowed_origins=("https://a.org", "http://b.org:*", "null")
    )
    assert verdict(named, "gpu1:8001") == "served"
    assert verdict(named, "gpu2:8001") == "host"
    assert verdict(named, "127.0.0.1:8001") == "served"  # a sandbox behind a tunnel calls it so
    assert [
        verdict(named, "gpu1", origin)
        for origin in ("https://a.org", "https://a.org:443", "http://b.org:81", "null", "http://a.org")
    ] == ["served", "served", "served", "served", "origin"]
    open_to_all = rules(allowed_hosts=("*",), allowed_origins=("*",))
    assert verdict(open_to_all, EVIL, f"http://{EVIL}", "null") == "served"


def test_a_unix_socket_is_reached_by_no_name_but_origins_are_checked() -> None:
    assert verdict(rules(), "sandbox", unix=True) == "served"
    assert verdict(rules(), "sandbox", "http://localhost:3000", unix=True) == "served"
    assert verdict(rules(), "sandbox", f"http://{EVIL}", unix=True) == "origin"


@pytest.mark.anyio
async def test_the_right_key_does_not_help_a_page_of_a_stranger(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as stage, httpx.AsyncClient(timeout=60) as http:
        episode = stage.episodes.begin("e1", None)
        headers = {
            "authorization": f"Bearer {episode.key}",
            "accept": "application/json, text/event-stream",
        }

        async def status(method: str = "POST", **more: str) -> tuple[int, str]:
            body = INITIALIZE if method == "POST" else None
            answer = await http.request(method, stage.tool_url(episode), json=body, headers={**headers, **more})
            if answer.status_code == 200:
                return 200, ""
            return answer.status_code, answer.json()["error"]["data"]["type"]

        assert await status() == (200, "")
        assert await status(origin="http://localhost:6274") == (200, "")
        for method in ("POST", "GET", "DELETE"):
            assert await status(method, origin=f"http://{EVIL}") == (403, "origin_not_allowed")
            assert await status(method, host=EVIL) == (421, "host_not_allowed")
        modern = {"mcp-protocol-version": "2026-07-28"}
        assert await status(origin=f"http://{EVIL}", **modern) == (403, "origin_not_allowed")


@pytest.mark.anyio
async def test_a_missing_and_a_wrong_key_are_401_with_a_challenge(tmp_path: Path) -> None:
    async with mcp_stage(tmp_path) as stage, httpx.AsyncClient(timeout=60) as http:
        url = stage.tool_url(stage.episodes.begin("e1", None))
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
            answer = await http.post(url, json=INITIALIZE, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == 'Bearer realm="turnstile episode"'


@pytest.mark.anyio
async def test_a_websocket_of_a_strangers_page_is_closed_before_it_opens() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    checked = OriginCheck(app, rules(), lambda scope: True)
    for origin in (f"http://{EVIL}".encode(), b"http://localhost:8000"):
        headers = [(b"host", b"localhost:8000"), (b"origin", origin)]
        scope = {"type": "websocket", "path": "/ws", "headers": headers, "server": ("127.0.0.1", 8000)}
        await checked(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close", "websocket.accept"]
    assert sent[0]["code"] == 1008


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.1.2.3:8000", "served"),
        ("[fd00::1]:8000", "served"),
        ("localhost:8000", "served"),
        ("turnstile:8000", "served"),
        ("", "served"),
        (EVIL, "host"),
        (f"{EVIL}.", "host"),
        ("127.0.0.1.nip.io:8000", "host"),
        ("a.b@127.0.0.1", "host"),
    ],
)
def test_without_a_key_a_public_listener_serves_no_name_that_could_be_a_strangers(
    host: str, expected: str
) -> None:
    public = OriginRules.of("gate", GateSettings(host="0.0.0.0"), named_only=True)
    assert verdict(public, host) == expected
    assert verdict(OriginRules.of("gate", GateSettings(host="0.0.0.0")), host or "x") == "served"
    named = OriginRules.of("gate", GateSettings(host="0.0.0.0", allowed_hosts=("*",)), named_only=True)
    assert verdict(named, host) == "served"


def test_a_hosted_server_without_a_key_serves_no_stranger_either() -> None:
    for control, evil in (({"auth": False}, "host"), ({"auth": False, "allowed_hosts": ["*"]}, "served")):
        settings = hosted_settings(Settings.model_validate({"control": control})).control
        open_to = OriginRules.of("gate", settings, named_only=True)
        assert (verdict(open_to, EVIL), verdict(open_to, "10.0.0.5:8000")) == (evil, "served")
    with_key = OriginRules.of("gate", hosted_settings(Settings()).control)
    assert verdict(with_key, "turnstile.example.org") == "served"


def test_several_hosts_are_none() -> None:
    headers = [(b"host", b"127.0.0.1"), (b"host", EVIL.encode())]
    with pytest.raises(ForeignHost):
        rules().check({"type": "http", "headers": headers, "server": ("127.0.0.1", 1)})
