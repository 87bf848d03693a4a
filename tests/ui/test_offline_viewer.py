"""The viewer on a directory without a server, in a real browser: exported episodes, no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from control_support import KEY, OpenDoor
from turnstile import Client
from turnstile.models import TaskRef
from ui.conftest import Watched, folder_viewer

pytestmark = pytest.mark.browser


@pytest.fixture
def played(open_door: OpenDoor, tmp_path: Path) -> list[str]:
    """Ids of two ended episodes, the first with a turn; exported into the folder."""
    with open_door() as door, Client([door.url], key=KEY) as client:
        made = [client.create_episode(TaskRef(instruction=f"Do {name}.")) for name in ("this", "that")]
        door.add_turn(made[0].episode_id)
        for one in made:
            one.cancel()
            (tmp_path / f"{one.episode_id}.tsj").write_bytes(one.journal())
        return [one.episode_id for one in made]


@pytest.fixture
def offline(played: list[str], tmp_path: Path) -> Iterator[str]:
    """The URL of a viewer on those files."""

    with folder_viewer(tmp_path) as url:
        yield url


def test_the_pages_show_a_directory_without_a_server(watched: Watched, offline: str, played: list[str]) -> None:
    watched.url = offline
    page = watched.open("/episodes", KEY)
    grid = page.get_by_role("grid", name="Episodes")
    for episode_id in played:
        expect(grid.get_by_text(episode_id[-8:])).to_be_visible()
    watched.open(f"/episodes/{played[0]}", None)
    expect(page.get_by_role("heading", level=1)).to_have_text(played[0])
    expect(page.get_by_text("call 0")).to_be_visible()
    watched.check()
    page.get_by_role("link", name="Work").click()
    page.get_by_role("button", name="Compare the work").click()
    expect(page.get_by_text("reads a directory without a server")).to_be_visible()
    watched.check(expected="status of 409")  # the browser reports each, some of them later than the page does
