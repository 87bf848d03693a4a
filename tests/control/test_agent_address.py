"""Which address of the agent listener a caller is told, by the request that asks."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from control_support import Door, OpenDoor
from turnstile_server.control.agent_address import AgentAddress, loopback_url, plain_host

pytestmark = pytest.mark.slow

TASK = {"task": {"instruction": "x"}}
ANY = "http://0.0.0.0:8001"
LOOPBACK = "http://127.0.0.1:8001"


def asked(*hosts: str, server: Any = ("10.0.0.5", 8000), **headers: str) -> dict[str, Any]:
    """The scope of a request with these Host headers."""
    given = [("host", host) for host in hosts] + [(name.replace("_", "-"), said) for name, said in headers.items()]
    return {"type": "http", "server": server, "headers": [(n.encode(), v.encode("latin-1")) for n, v in given]}


@pytest.mark.parametrize(
    ("bound", "host", "told"),
    [
        (ANY, "trainer.example:8000", "http://trainer.example:8001"),
        (ANY, "trainer.example", "http://trainer.example:8001"),
        (ANY, "turnstile_server-1:8000", "http://turnstile_server-1:8001"),
        (ANY, "10.1.2.3:49153", "http://10.1.2.3:8001"),
        (ANY, "localhost:8000", "http://localhost:8001"),
        (ANY, "[2001:db8::7]:8000", "http://[2001:db8::7]:8001"),
        (ANY, "[::ffff:10.1.2.3]:8000", "http://10.1.2.3:8001"),
        ("http://[::]:8001", "[::1]:8000", "http://[::1]:8001"),
        (LOOPBACK, "127.0.0.1:8000", LOOPBACK),
        (LOOPBACK, "localhost:8000", "http://localhost:8001"),
        (LOOPBACK, "[::1]:8000", LOOPBACK),
        (LOOPBACK, "trainer.example", "http://trainer.example:8001"),
        ("http://10.9.9.9:8001", "localhost:8000", "http://10.9.9.9:8001"),
        ("http://10.9.9.9:8001", "10.9.9.9:8000", "http://10.9.9.9:8001"),
    ],
)
def test_the_host_that_the_caller_used_has_the_agent_listener_too(bound: str, host: str, told: str) -> None:
    assert AgentAddress(bound).of(asked(host)) == told


@pytest.mark.parametrize(
    "host",
    [
        "",
        "0.0.0.0:8000",
        "0:8000",
        "0x0:8000",
        "127.1",
        "[::]:8000",
        "[::ffff:0.0.0.0]",
        "224.0.0.1",
        "user@evil.example",
        "evil.example/path",
        "evil.example:port",
        "evil.example:80:80",
        "evil example",
        "evil.example\r\nx: y",
        "-evil.example",
        "h\xe9.example",
        "::1",
        "[::1",
        "a" * 64 + ".example",
        ".".join(["a" * 60] * 5),
        "<script>",
    ],
)
def test_a_host_that_cannot_be_connected_to_or_is_none_is_not_repeated(host: str) -> None:
    assert plain_host(host) is None
    assert AgentAddress(ANY).of(asked(host)) == LOOPBACK


def test_a_request_without_one_host_gets_the_server_s_own_address() -> None:
    assert AgentAddress(ANY).of(asked()) == LOOPBACK
    assert AgentAddress(ANY).of(asked("one.example", "two.example")) == LOOPBACK


def test_the_host_header_of_a_unix_socket_names_no_machine() -> None:
    for server in (None, ("/run/control.sock", None)):
        assert AgentAddress(ANY).of(asked("server", server=server)) == LOOPBACK


def test_a_proxy_is_believed_by_setting_only() -> None:
    request = asked("inside:8000", x_forwarded_host="outside.example, inside", x_forwarded_proto="https")
    assert AgentAddress(ANY).of(request) == "http://inside:8001"
    assert AgentAddress(ANY, forwarded=True).of(request) == "https://outside.example:8001"
    behind_a_unix_socket = {**request, "server": None}
    assert AgentAddress(ANY, forwarded=True).of(behind_a_unix_socket) == "https://outside.example:8001"
    evil = asked("inside:8000", x_forwarded_host="a/b", x_forwarded_proto="javascript")
    assert AgentAddress(ANY, forwarded=True).of(evil) == LOOPBACK


def test_the_public_url_wins_over_every_request() -> None:
    address = AgentAddress(ANY, "https://gate.example/agents", forwarded=True)
    assert address.of(asked("trainer.example", x_forwarded_host="other")) == "https://gate.example/agents"
    assert address.default == "https://gate.example/agents"


def test_an_unspecified_address_becomes_loopback_of_its_family() -> None:
    assert loopback_url("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert loopback_url("http://[::]:80") == "http://[::1]:80"
    assert loopback_url("http://10.0.0.1:80") == "http://10.0.0.1:80"


@pytest.fixture(scope="module")
def door(open_door: OpenDoor) -> Any:
    with open_door() as running:
        yield running


@pytest.mark.parametrize("route", ["/episodes", "/reset"])
def test_the_addresses_of_an_episode_are_in_the_caller_s_terms(door: Door, route: str) -> None:
    port = httpx.URL(door.agent_url).port
    headers = {"host": "trainer.example:1234", "authorization": f"Bearer {door.key}"}
    made = httpx.post(f"{door.url}{route}", json=TASK, headers=headers, timeout=60).json()
    told = made.get("observation", made)
    assert told["model_url"] == f"http://trainer.example:{port}/e/{told['episode_id']}"
    assert told["tool_url"] == f"{told['model_url']}/mcp"


def test_a_servers_setting_says_whether_its_proxy_is_believed(open_door: OpenDoor) -> None:
    asked = {"x-forwarded-host": "outside.example", "x-forwarded-proto": "https"}
    for believed, name in ((False, "http://inside.example"), (True, "https://outside.example")):
        with open_door(control={"trust_forwarded": believed}) as door:
            headers = {"host": "inside.example", "authorization": f"Bearer {door.key}", **asked}
            made = httpx.post(f"{door.url}/episodes", json=TASK, headers=headers, timeout=60).json()
            port = httpx.URL(door.agent_url).port
            assert made["model_url"] == f"{name}:{port}/e/{made['episode_id']}"
