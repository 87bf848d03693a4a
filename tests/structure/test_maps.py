"""The maps of the code are true: what the pages name is there, and a real call runs through what they list."""

from __future__ import annotations

import re
import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from turnstile.models import EpisodeRequest, TaskRef
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import Step
from turnstile_server.testing.server import scripted_server

ROOT = Path(__file__).resolve().parents[2]
SERVER = ROOT / "env_server" / "turnstile_server"
DOCS = ROOT / "docs"
CALL = (DOCS / "path-of-a-model-call.md").read_text()
EPISODE = (DOCS / "life-of-an-episode.md").read_text()
MAP = (DOCS / "architecture.md").read_text()
MOST_FILES_OF_A_CALL = 25
MOST_FILES_OF_AN_EPISODE = 20
PATH = re.compile(r"`([\w/]+(?:\.py|/))`")
STATION = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \|", re.MULTILINE)
SCRIPTED = {
    "testing/scripted_engine.py",
    "testing/policy.py",
    "testing/chat_format.py",
    "testing/shown_tools.py",
    "engines/embedded/stopping.py",
}
"""What stands for the engine where the test plays a call."""
BESIDE = {
    f"episodes/{name}.py"
    for name in ("archive", "kept_files", "leases", "retention", "snapshot_store", "work_store")
} | {"observability/live.py", *(f"replay/{name}.py" for name in ("files", "manifest", "store"))}
"""The server's watch and its samples of what goes on, which may run at the same time as the call."""


@pytest.mark.parametrize("page", ["architecture.md", "path-of-a-model-call.md", "life-of-an-episode.md"])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = set(PATH.findall((DOCS / page).read_text()))
    places = [SERVER, SERVER / "gate" / "dialects", ROOT, ROOT / "client" / "turnstile"]
    assert [path for path in sorted(named) if not any((place / path).exists() for place in places)] == []
    assert named


def test_the_stations_are_few_and_in_the_map() -> None:
    call, episode = STATION.findall(CALL), STATION.findall(EPISODE)
    assert 15 <= len(call) == len(set(call)) <= MOST_FILES_OF_A_CALL
    assert 15 <= len(episode) == len(set(episode)) <= MOST_FILES_OF_AN_EPISODE
    assert [path for path in [*call, *episode] if f"`{path}`" not in MAP] == []


@pytest.mark.anyio
async def test_a_real_call_runs_through_the_stations_and_through_nothing_that_the_page_lacks() -> None:
    ran: set[str] = set()

    def note(frame: FrameType, _event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SERVER):
            ran.add(path.relative_to(SERVER).as_posix())

    async with scripted_server(
        Settings(sandboxes={"kind": "none"}), lambda call: Step(text=f"turn {call.turn}")
    ) as server:
        made = await server.create(EpisodeRequest(task=TaskRef(instruction="Talk."), agent="external"))
        url = f"{made.model_url}/v1/chat/completions"
        history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
        headers = {"x-api-key": made.episode_key or ""}
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            first = await http.post(url, json={"model": "m", "messages": history})
        history += [first.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
        # A connection of its own: to accept one is part of the way.
        async with httpx.AsyncClient(headers=headers, timeout=60) as http:
            sys.setprofile(note)
            threading.setprofile(note)
            try:
                second = await http.post(url, json={"model": "m", "messages": history})
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    assert second.status_code == 200
    stations = set(STATION.findall(CALL))
    other_engine = {path for path in stations if path.startswith("engines/")}
    seam = {"gate/dialects/base.py"}
    way_out_of_a_sandbox = {"http/agent_endpoint.py"}
    assert stations - other_engine - seam - way_out_of_a_sandbox <= ran
    named = set(PATH.findall(CALL))
    others = ran - SCRIPTED - BESIDE
    assert sorted(path for path in others if path not in named and not path.startswith("settings/")) == []


def test_the_site_has_every_page_in_its_navigation() -> None:
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    listed = sorted(_pages(config["project"]["nav"]))
    assert listed == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def _pages(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in _pages(part)]
