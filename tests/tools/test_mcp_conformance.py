"""MCP's official conformance suite against a Turnstile server; the table in docs/tools.md is what it found.

The suite is installed by scripts/install_mcp_clients.sh DIR; TURNSTILE_MCP_CLIENTS is that DIR. Where the table is
no longer true, ``RECORD=1`` writes it anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.types import Receive, Scope, Send

from bounded import bounded_settings
from turnstile.models import TaskRef
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.testing.server import scripted_server

pytestmark = [pytest.mark.anyio, pytest.mark.agents]

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "tools.md"
BEGIN, END = "<!-- conformance: written by tests/tools/test_mcp_conformance.py -->", "<!-- conformance: end -->"

_PROMPTS = "the endpoint serves tools; it has no prompts"
_RESOURCES = "the endpoint serves tools; it has no resources (those in a tool's result pass)"
_ELICITATION = "a tool asks for the user's words, and an episode has no user at the client"
NOT_SERVED = {
    "completion-complete": "it completes arguments of prompts and resource templates, and there are none",
    "tools-call-sampling": "a tool asks for the client's model; an episode's model calls go through the model API",
    "tools-call-elicitation": _ELICITATION,
    "elicitation-sep1034-defaults": _ELICITATION,
    "elicitation-sep1330-enums": _ELICITATION,
    "resources-list": _RESOURCES,
    "resources-read-text": _RESOURCES,
    "resources-read-binary": _RESOURCES,
    "resources-templates-read": _RESOURCES,
    "resources-subscribe": _RESOURCES,
    "resources-unsubscribe": _RESOURCES,
    "prompts-list": _PROMPTS,
    "prompts-get-simple": _PROMPTS,
    "prompts-get-with-args": _PROMPTS,
    "prompts-get-embedded-resource": _PROMPTS,
    "prompts-get-with-image": _PROMPTS,
}
"""Scenarios that do not apply, and why."""
FUNCTIONS = (
    "test_simple_text",
    "test_image_content",
    "test_audio_content",
    "test_embedded_resource",
    "test_multiple_content_types",
    "test_tool_with_logging",
    "test_error_handling",
    "test_tool_with_progress",
    "test_reconnection",
)


def conformance(*arguments: str) -> list[str]:
    return [str(Path(os.environ["TURNSTILE_MCP_CLIENTS"]) / "bin" / "conformance"), *arguments]


class WithKey:
    """A proxy that adds the episode's key: the suite can send none. Nothing else is changed, Host and Origin least
    of all."""

    def __init__(self, http: httpx.AsyncClient, url: str, key: str) -> None:
        self._http = http
        self._url = url
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._forward, scope, body, send, tasks.cancel_scope)
            while (await receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

    async def _forward(self, scope: Scope, body: bytes, send: Send, done: anyio.CancelScope) -> None:
        headers = [*scope["headers"], (b"authorization", f"Bearer {self._key}".encode())]
        async with self._http.stream(scope["method"], self._url, content=body, headers=headers) as response:
            passed = [(name, value) for name, value in response.headers.raw if name.lower() != b"connection"]
            await send({"type": "http.response.start", "status": response.status_code, "headers": passed})
            async for part in response.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        done.cancel()


@asynccontextmanager
async def episode_url() -> AsyncIterator[str]:
    """Where the suite reaches the MCP endpoint of an external agent's episode with the fixture tools."""
    functions = [{"function": f"{HERE / 'conformance_tools.py'}:{name}"} for name in FUNCTIONS]
    server = {
        "name": "schema",
        "command": sys.executable,
        "args": [str(HERE / "conformance_server.py")],
        "where": "host",
        "allow": ["*"],
        "prefix": "",
    }
    tools = {"functions": functions, "servers": [server], "stream_max_s": 1, "retry_s": 0.2}
    settings = bounded_settings(tools=tools, sandboxes={"kind": "none"})

    def nobody(_: Any) -> Any:
        raise AssertionError("no model is called")

    async with scripted_server(settings, nobody) as running:
        created = await running.control.post(
            "/episodes", json={"task": TaskRef(instruction="Be tested.").model_dump(exclude_none=True)}
        )
        assert created.status_code == 201, created.text
        episode = created.json()
        status = "queued"
        while status in ("queued", "preparing"):
            found = await running.control.get(f"/episodes/{episode['episode_id']}", params={"wait": 10})
            status = found.json()["status"]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=limits) as http, anyio.create_task_group() as tasks:
            bound = bind("proxy", "127.0.0.1", 0)
            proxy = WithKey(http, episode["tool_url"], episode["episode_key"])
            listener = Listener(proxy, bound, idle_s=60, grace_s=1, access_log=False)
            tasks.start_soon(listener.serve)
            try:
                yield f"{url_of(bound)}/mcp"
            finally:
                listener.stop()
        listener.close()


@dataclass(frozen=True)
class Scenario:
    """The checks of one scenario. A note of the suite (``INFO``) is none."""

    name: str
    checks: tuple[dict[str, Any], ...]

    @property
    def passed(self) -> int:
        return sum(check["status"] == "SUCCESS" for check in self.checks)

    @property
    def faults(self) -> list[str]:
        return [
            f"{self.name}: {check['status']}: {check['name']}: {check.get('errorMessage')}"
            for check in self.checks
            if check["status"] != "SUCCESS"
        ]

    @property
    def row(self) -> str:
        if self.name in NOT_SERVED:
            return f"| `{self.name}` | does not apply: {NOT_SERVED[self.name]} |"
        count = len(self.checks)
        return f"| `{self.name}` | passes, {self.passed} of {count} check{'' if count == 1 else 's'} |"


async def _play(url: str, folder: Path, *options: str) -> str:
    """Runs the suite, which leaves its checks in ``folder``. Gives what it printed."""
    command = conformance("server", "--url", url, *options, "--output-dir", str(folder))
    done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
    return done.stdout.decode()


def _read(folder: Path, name: str, printed: str) -> Scenario:
    found = [each for each in folder.iterdir() if re.fullmatch(rf"server-{name}-[0-9T:.Z-]+", each.name)]
    assert len(found) == 1, (name, printed[-3000:])
    checks = json.loads((found[0] / "checks.json").read_text())
    return Scenario(name, tuple(check for check in checks if check["status"] != "INFO"))


async def play_scenarios(folder: Path) -> list[Scenario]:
    """Every server scenario of the suite, in its own order.

    Its clients wait for two seconds at most for some events, and no option changes that. So what fails beside the
    rest is played again alone, once.
    """
    listed = await anyio.run_process(conformance("list"))
    servers = listed.stdout.decode().split("Client scenarios")[0]
    names = re.findall(r"^ +- ([a-z0-9-]+)", servers, re.MULTILINE)
    async with episode_url() as url:
        printed = await _play(url, folder / "all", "--suite", "all")
        scenarios = [_read(folder / "all", name, printed) for name in names]
        for index, scenario in enumerate(scenarios):
            if scenario.name not in NOT_SERVED and scenario.faults:
                warnings.warn(f"played again: {scenario.faults}", stacklevel=1)
                printed = await _play(url, folder / scenario.name, "--scenario", scenario.name)
                scenarios[index] = _read(folder / scenario.name, scenario.name, printed)
    return scenarios


def table(scenarios: list[Scenario]) -> str:
    return "\n".join(["| scenario | result |", "|---|---|", *(scenario.row for scenario in scenarios)])


async def test_every_scenario_that_applies_passes_and_the_docs_say_so(tmp_path: Path) -> None:
    scenarios = await play_scenarios(tmp_path)
    assert NOT_SERVED.keys() <= {scenario.name for scenario in scenarios}
    applying = [scenario for scenario in scenarios if scenario.name not in NOT_SERVED]
    assert [fault for scenario in applying for fault in scenario.faults] == []
    assert all(scenario.checks for scenario in applying)
    page = PAGE.read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    written, _, after = rest.partition(END)
    if os.environ.get("RECORD"):
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(scenarios)}\n\n{END}{after}", "utf-8")
        return
    assert written.strip() == table(scenarios), "docs/tools.md is stale: run this test with RECORD=1"
