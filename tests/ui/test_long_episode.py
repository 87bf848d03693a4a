"""The page of an episode of 120,000 tokens in 300 turns, one of which has a line of ten million characters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from control_support import Door, EngineProcess, running_door
from turnstile.models import Message, Turn
from ui.conftest import HOSTILE, Watched
from ui.recorded import Player, calling, client_of, recorded

pytestmark = pytest.mark.browser

TURNS = 300
HUGE = 7
"""The turn whose call of a tool gives one line of ten million characters."""


def in_a_line(pattern: Turn) -> list[Turn]:
    play = Player(pattern, tokens=396)
    new, last = [Message("user", "Fix the calculator.")], None
    for number in range(TURNS):
        call_id = f"call-{number}"
        reply = calling("bash", f'{{"command": "sed -n 1,40p file-{number}.py"}}', call_id)
        last = play.say(last, new, reply)
        text = f"line of file {number}, as it is\n" * 40
        new = [Message("tool", f"{HOSTILE}{'x' * 10_000_000}" if number == HUGE else text, tool_call_id=call_id)]
    return play.turns


@pytest.fixture(scope="module")
def long(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Door, str]]:
    folder = tmp_path_factory.mktemp("recorded")
    episode_id = recorded(engine, folder, in_a_line)
    with running_door(engine, folder / "long") as door:
        yield door, episode_id


def test_only_turns_near_the_window_are_made_and_an_address_opens_in_the_middle(
    watched: Watched, long: tuple[Door, str]
) -> None:
    door, episode_id = long
    watched.url = door.url
    page = watched.open(f"/episodes/{episode_id}?turn=250", door.key)
    expect(page.get_by_role("link", name=f"Conversation ({TURNS})")).to_be_visible()
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 250")
    expect(page.locator("article.chosen")).to_be_in_viewport()
    assert page.get_by_role("article").count() < TURNS / 3
    page.keyboard.press("End")
    expect(page.get_by_role("article", name=f"Turn {TURNS - 1}")).to_be_in_viewport()
    page.get_by_role("link", name=f"Turn {TURNS - 1}").click()
    expect(page).to_have_url(f"{door.url}/ui/episodes/{episode_id}?turn={TURNS - 1}")
    watched.check()


def test_the_end_key_leads_to_the_last_turn_where_turns_are_longer_than_was_guessed(
    watched: Watched, long: tuple[Door, str]
) -> None:
    door, episode_id = long
    watched.url = door.url
    page = watched.open(f"/episodes/{episode_id}", door.key)
    expect(page.locator("article").first).to_be_visible()
    page.evaluate("document.styleSheets[0].insertRule('article { min-height: 900px; }')")
    page.keyboard.press("End")
    last = page.get_by_role("article", name=f"Turn {TURNS - 1}")
    expect(last).to_be_in_viewport()
    page.wait_for_timeout(1_000)
    expect(last).to_be_in_viewport()
    page.keyboard.press("Home")
    expect(page.get_by_role("article", name="Turn 0", exact=True)).to_be_in_viewport()
    watched.check()


def test_a_line_of_ten_million_characters_does_no_harm(watched: Watched, long: tuple[Door, str]) -> None:
    door, episode_id = long
    watched.url = door.url
    page = watched.open(f"/episodes/{episode_id}?turn={HUGE}", door.key)
    huge = page.get_by_role("article", name=f"Turn {HUGE}", exact=True)
    expect(huge).to_contain_text("10,000,1")
    huge.locator("summary", has_text="Result").click()
    expect(huge.locator("pre")).to_have_count(2)
    assert len(huge.text_content() or "") < 10_000
    huge.get_by_role("button", name="Show all").click()
    expect(huge.get_by_text("characters 0 to 100,000 of 10,000,1")).to_be_visible()
    assert page.locator("main script, main img").count() == 0
    watched.check()


def say(figure: str) -> None:
    sys.stdout.write(f"{figure}\n")


SCROLL = """(step) => new Promise((done) => {
    window.scrollTo(0, 0);
    const times = [];
    const next = (now) => {
        times.push(now);
        window.scrollBy(0, step);
        if (times.length < 300) requestAnimationFrame(next);
        else done(times);
    };
    requestAnimationFrame(next);
})"""


@pytest.mark.thorough
def test_how_fast_it_opens_and_scrolls(watched: Watched, long: tuple[Door, str]) -> None:
    """Prints how long the page takes to open and how many frames a second it scrolls with."""
    door, episode_id = long
    with client_of(door) as api:
        turns = api.get(f"/episodes/{episode_id}/turns", params={"arrays": False}).json()["turns"]
        assert turns[-1]["start"] > 100_000
    page = watched.page
    page.goto(f"{door.url}/ui/episodes#key={door.key}")
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    for query in ("", "?turn=150"):
        page.goto(f"{door.url}/ui/episodes/{episode_id}{query}", wait_until="commit")
        page.wait_for_selector("article.chosen" if query else "article")
        say(f"opened {query or 'at its beginning'} in {page.evaluate('performance.now()'):.0f} ms")
    for step in (30, 300):
        frames = page.evaluate(SCROLL, step)
        gaps = sorted(b - a for a, b in pairwise(frames))
        rate = 1000 * len(gaps) / (frames[-1] - frames[0])
        say(f"{step} pixels a frame: {rate:.1f} frames/s; 99 of 100 in {gaps[int(len(gaps) * 0.99)]:.1f} ms")
