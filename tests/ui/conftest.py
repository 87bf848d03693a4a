"""A real server with recorded episodes, and Debian's Chromium without a window."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

from control_support import KEY, KEYS, START_S, Door, OpenDoor, engine, in_thread, listening, open_door
from local import ROOT
from turnstile_server.http.listeners import Listener, bind, url_of
from turnstile_server.offline_app import open_offline_app
from turnstile_server.settings import Settings

__all__ = ["engine", "open_door"]

AXE = ROOT / "ui" / "node_modules" / "axe-core" / "axe.min.js"
RECORDED = ROOT / "tests" / "ui" / "recorded" / "agents-run.tar.xz"
"""A run of real agents: see the README beside it."""
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    " \x1b[31mred\x1b[0m \u202egnp.exe \u2066x\u2069 \x07 end"
)
HOSTILE_GROUP = "group-of-strangers"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pages in dark colours `thorough`: what they hold is the same in light ones."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and "[dark" in item.name:
            item.add_marker(pytest.mark.thorough)


@dataclass
class Watched:
    """A page, and what happened on it that must not: errors, and requests to anywhere else."""

    page: Page
    url: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def open(self, path: str, key: str | None) -> Page:
        """Goes to a page below ``/ui``; ``key`` is in the fragment, as `turnstile ui` has it."""
        self.page.goto(f"{self.url}/ui{path}" + (f"#key={key}" if key else ""))
        return self.page

    def check_quiet(self, expected: str | None = None) -> None:
        """Nothing went wrong but what says ``expected``, and nothing left the origin. CSP violations are errors of
        the console."""
        assert [error for error in self.errors if expected is None or expected not in error] == []
        assert self.foreign == []

    def check(self, expected: str | None = None) -> None:
        """Nothing went wrong but what says ``expected``, nothing left the origin, and axe finds nothing
        serious."""
        self.check_quiet(expected)
        self.page.evaluate(AXE.read_text("utf-8"))
        found = self.page.evaluate("async () => (await axe.run()).violations")
        serious = [
            (one["id"], one["help"], [node["html"][:300] for node in one["nodes"]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []


def fact(where: Locator, name: str) -> str:
    """The value beside a name."""
    entry = where.locator("dl > div").filter(has=where.page.locator("dt").get_by_text(name, exact=True))
    return entry.locator("dd").inner_text()


def folder_viewer(folder: Path, model: Path | None = None) -> AbstractContextManager[str]:
    """The URL of a viewer on a folder, as `turnstile ui FOLDER` serves it, with the key KEY."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        async with AsyncExitStack() as stack:
            closing, bound = anyio.Event(), bind("control", "127.0.0.1", 0)
            stack.callback(bound.close)
            app = await open_offline_app(folder, KEY, Settings(model=model), closing, stack)
            listener = Listener(app, bound, idle_s=5, grace_s=1, access_log=False)
            await stack.enter_async_context(listening(listener))
            stack.callback(closing.set)
            yield url_of(bound)

    viewer: AbstractContextManager[str] = in_thread(serving)
    return viewer


def wait_until(page: Page, expression: str) -> None:
    """Until the expression holds on the page. `page.wait_for_function` needs an eval, which the policy forbids."""
    end = time.monotonic() + START_S
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Playwright runs an event loop in this thread, in which no async test can run: it ends with the module."""
    chromium = shutil.which("chromium") or "/usr/bin/chromium"
    # Chromium's own sandbox does not work as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=30_000)  # nothing is asserted by a clock, and CI's cores are shared
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield running
        running.close()


@pytest.fixture
def watched(browser: Browser, door: Door, request: pytest.FixtureRequest) -> Iterator[Watched]:
    scheme = getattr(request, "param", "light")
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(30_000)
    found = Watched(page, door.url)

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            found.errors.append(message.text)

    def asked(sent: Request) -> None:
        if not sent.url.startswith((found.url, "data:")):
            found.foreign.append(sent.url)

    page.on("console", console)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", asked)
    yield found
    context.close()


@pytest.fixture(scope="session")
def door(open_door: OpenDoor) -> Iterator[Door]:
    with open_door(control={"heartbeat_s": 1.0}) as running:
        yield running


@pytest.fixture(scope="session")
def api(door: Door) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {door.key}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=START_S) as client:
        yield client


@pytest.fixture(scope="session")
def episodes(api: httpx.Client) -> list[str]:
    """Ids of 130 episodes: more than one window of the table. All but the last are cancelled."""
    made = [_create(api, {"task": {"instruction": f"task {number}"}}) for number in range(130)]
    for episode_id in made[:-1]:
        assert api.post(f"/episodes/{episode_id}/cancel").status_code == 200
    return made


@pytest.fixture(scope="session")
def hostile(api: httpx.Client, door: Door) -> str:
    """An episode whose task, group, messages and tool results are hostile text, one of ten million characters."""
    episode_id = _create(api, {"task": {"instruction": HOSTILE}, "group_id": HOSTILE_GROUP})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": HOSTILE},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look<b>", "arguments": json.dumps({"x": HOSTILE})},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": HOSTILE},
    ]
    answer = httpx.post(
        f"{door.agent_url}/e/{episode_id}/v1/chat/completions",
        headers={"authorization": f"Bearer {KEYS.given[episode_id]}"},
        json={"model": "m", "max_tokens": 4, "messages": messages},
        timeout=START_S,
    )
    assert answer.status_code == 200, answer.text
    return episode_id


def _create(api: httpx.Client, body: dict[str, Any]) -> str:
    answer = api.post("/episodes", json=body)
    assert answer.status_code == 201, answer.text
    episode_id: str = answer.json()["episode_id"]
    return episode_id
