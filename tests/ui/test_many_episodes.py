"""The page of episodes with ten thousand of them: the rows, the filters and the order are the API's."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from control_support import START_S, Door, EngineProcess, running_door
from turnstile.models import (
    Episode,
    EpisodeStats,
    EpisodeStatus,
    EpisodeTimings,
    ErrorInfo,
    Fault,
    Limits,
    Sampling,
    TaskRef,
)
from turnstile_server.episodes.store import Stored
from turnstile_server.journal.journal import FileJournal
from turnstile_server.settings import JournalSettings
from ui.conftest import Watched, wait_until

pytestmark = pytest.mark.browser

MANY = 10_000
BEGUN = 1_750_000_000.0
FAILED_EVERY = 50


def episode_number(number: int) -> Episode:
    """The oldest has number 0. Every fiftieth failed; the others have rewards of 0 to 1 in quarters."""
    failed = number % FAILED_EVERY == 0
    error = ErrorInfo(type="agent_failed", message="it stopped", fault=Fault.AGENT) if failed else None
    sampled = 100 + number % 700
    return Episode(
        episode_id=f"ep_{number:05}",
        status=EpisodeStatus.FAILED if failed else EpisodeStatus.COMPLETED,
        agent="aider" if number % 2 else "claude",
        task=TaskRef(id=f"task-{number % 40}"),
        tags=(f"tag{number % 3}",),
        group_id=f"g{number // 8}",
        rollout_id=f"ep_{number:05}",
        run_id=f"run-{number // 5000}",
        train_step=number // 100,
        reward=None if failed else number % 5 / 4,
        error=error,
        sampling=Sampling(),
        limits=Limits(),
        metadata={"split": "eval" if number % 1000 == 7 else "train"},
        timings=EpisodeTimings(created_at=BEGUN + number, running_s=0.5, ended_s=2.0 + number % 90),
        stats=EpisodeStats(
            sampled_tokens=sampled,
            trained_tokens=sampled - number % 100,
            turns=1 + number % 12,
            roots=1 + number % 2,
            breaks={"history_edited": 1} if number % 2 else {},
            weight_versions={f"v{number // 100}": sampled},
        ),
    )


async def _record(directory: Path) -> None:
    journal = await FileJournal.open(directory, JournalSettings(durability="process"))
    try:
        for number in range(MANY):
            journal.append_soon(Stored(episode_number(number), "nonce", None, "digest").record())
        await journal.append(Stored(episode_number(MANY - 1), "nonce", None, "digest").record())
    finally:
        await journal.close()


@pytest.fixture(scope="module")
def door(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    data_dir = tmp_path_factory.mktemp("many")
    with ThreadPoolExecutor(1) as elsewhere:  # Playwright runs a loop in this thread
        elsewhere.submit(asyncio.run, _record(data_dir / "journal")).result()
    with running_door(engine, data_dir, control={"heartbeat_s": 1.0}) as running:
        yield running


@pytest.fixture(scope="module")
def api(door: Door) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {door.key}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=START_S) as client:
        yield client


@pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
def test_ten_thousand_rows_are_scrolled_to_the_oldest(watched: Watched, door: Door, api: httpx.Client) -> None:
    started = time.monotonic()
    page = watched.open("/episodes", door.key)
    page.wait_for_selector("[role=gridcell] a")
    sys.stderr.write(f"\nthe first rows of {MANY} after {time.monotonic() - started:.2f} s\n")
    assert page_of(api)["total"] == MANY
    expect(page.get_by_text(f"{MANY:,} rows")).to_be_visible()
    assert ids(page)[:3] == ["ep_09999", "ep_09998", "ep_09997"]
    grid = grid_of(page)
    expect(grid).to_have_attribute("aria-rowcount", str(MANY + 1))
    for part in (0.3, 0.7, 1.0):
        grid.evaluate("(grid, part) => grid.scrollTo({ top: part * grid.scrollHeight })", part)
    expect(page.get_by_role("link", name="ep_00000")).to_be_visible()
    assert grid.get_by_role("row").count() < 60
    expect(grid.get_by_role("row").last).to_contain_text("the agent failed")
    watched.check()


FILTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("Status", "failed", {"status": "failed"}),
    ("Run", "run-1", {"run_id": "run-1"}),
    ("Task", "task-7", {"task": "task-7"}),
    ("Group", "g12", {"group_id": "g12"}),
    ("Reward from", "0.75", {"reward_min": 0.75}),
    ("Reward to", "0.25", {"reward_max": 0.25}),
    ("Text", "EP_0999", {"text": "EP_0999"}),
    ("Step", "3", {"train_step": 3}),
    ("Tag", "tag2", {"tag": "tag2"}),
    ("Agent", "aider", {"agent": "aider"}),
    ("Weight version", "v9", {"version": "v9"}),
    ("Error", "agent_failed", {"error_type": "agent_failed"}),
    ("Fault", "agent", {"fault": "agent"}),
    ("Graded", "no", {"graded": "false"}),
    ("Breaks", "any", {"breaks": "any"}),
    ("Stale", "yes", {"stale": "true"}),
    ("Turns from", "11", {"min_turns": 11}),
    ("Metadata", "split=eval", {"metadata": "split=eval"}),
]


def test_every_filter_leaves_what_the_api_leaves_and_is_in_the_address(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    page = watched.open("/episodes", door.key)
    page.get_by_text("More filters").click()
    for label, value, conditions in FILTERS:
        named = page.get_by_role("search").locator("label", has_text=re.compile(f"^{label}"))
        field = named.locator("input, select")
        if field.evaluate("(field) => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
            field.press("Enter")
        expected = page_of(api, **conditions)
        told = "No episode fits." if expected["total"] == 0 else f"{expected['total']:,} rows"
        expect(page.get_by_text(told, exact=True)).to_be_visible()
        ((name, sent),) = conditions.items()
        expect(page).to_have_url(re.compile(f"[?&]{name}="))
        if expected["total"]:
            assert ids(page)[:10] == [row["episode_id"] for row in expected["summaries"][: len(ids(page))]][:10], (
                sent
            )
        page.get_by_role("button", name="Clear filters").click()
        expect(page.get_by_text(f"{MANY:,} rows")).to_be_visible()


def test_an_address_has_filters_order_and_the_picked_two(watched: Watched, door: Door, api: httpx.Client) -> None:
    created = f"created_after={BEGUN + 100:.0f}&created_before={BEGUN + 199:.0f}"
    page = watched.open(f"/episodes?{created}&metadata=split%3Dtrain&metadata=split%3Dtrain&fault=agent", door.key)
    expect(page.get_by_text("2 rows", exact=True)).to_be_visible()
    page.get_by_role("button", name="Without the condition split=train").click()
    page.get_by_label("Fault").select_option("")
    expect(page.get_by_text("100 rows", exact=True)).to_be_visible()
    for name, sort in (("Reward", "reward"), ("Took", "seconds"), ("Task", "task"), ("Breaks", "breaks")):
        for order in ("desc", "asc"):
            grid_of(page).get_by_role("columnheader", name=name).get_by_role("button").click()
            expect(page).to_have_url(re.compile(f"sort={sort}&order={order}"))
            window = {"created_after": BEGUN + 100, "created_before": BEGUN + 199}
            rows = page_of(api, sort=sort, order=order, **window)["summaries"]
            expect(first_id(page)).to_have_text(rows[0]["episode_id"])
            assert ids(page)[:10] == [row["episode_id"] for row in rows[:10]]
    shown = ids(page)
    page.get_by_label(f"Compare {shown[0]}").check()
    page.get_by_label(f"Compare {shown[2]}").check()
    page.get_by_label(f"Compare {shown[1]}").check()
    page.reload()
    expect(page.get_by_label(f"Compare {shown[0]}")).not_to_be_checked()
    expect(page.get_by_label(f"Compare {shown[1]}")).to_be_checked()
    watched.check()
    page.get_by_role("link", name="Compare the two").click()
    expect(page).to_have_url(f"{door.url}/ui/compare/{shown[2]}/{shown[1]}")
    expect(page.get_by_role("region", name="Table: Facts")).to_contain_text(shown[1])
    page.go_back()
    expect(page.get_by_label(f"Compare {shown[1]}")).to_be_checked()


def test_back_leads_to_the_place_in_the_list_that_was_left(watched: Watched, door: Door) -> None:
    page = watched.open("/episodes?run_id=run-0&sort=turns&order=asc", door.key)
    expect(page.get_by_text("5,000 rows", exact=True)).to_be_visible()
    grid = grid_of(page)
    grid.evaluate("(grid) => grid.scrollTo({ top: 34 * 2500 })")
    expect(grid.locator("[aria-rowindex='2510'] a").first).to_be_visible()
    shown = grid.locator("[aria-rowindex='2510'] a").first.text_content()
    wait_until(page, "history.state?.places?.['table Episodes'] === 34 * 2500")
    grid.locator("[aria-rowindex='2510'] a").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(shown or "")
    expect(page.locator("main")).to_be_focused()
    page.go_back()
    expect(grid.locator("[aria-rowindex='2510'] a").first).to_have_text(shown or "")
    assert grid.evaluate("(grid) => grid.scrollTop") == 34 * 2500
    watched.check()
    page.reload()
    expect(grid.locator("[aria-rowindex='2510'] a").first).to_have_text(shown or "")
    grid.get_by_role("columnheader", name="Turns").get_by_role("button").click()
    expect(grid.locator("[aria-rowindex='2']")).to_be_visible()  # another order begins at its top


def test_a_condition_that_cannot_be_is_refused_in_the_servers_words(watched: Watched, door: Door) -> None:
    page = watched.open("/episodes?metadata=no-equals", door.key)
    expect(page.get_by_role("alert")).to_contain_text("KEY=VALUE")
    watched.check(expected="status of 422")  # the browser reports each, some of them later than the page does


def test_new_episodes_move_no_row_until_they_are_wanted(watched: Watched, door: Door, api: httpx.Client) -> None:
    page = watched.open("/episodes", door.key)
    expect(page.get_by_text(f"{MANY:,} rows")).to_be_visible()
    field = page.get_by_label("Text")
    field.press_sequentially("half ty")
    made = api.post("/episodes", json={"task": {"instruction": "new"}}).json()["episode_id"]
    try:
        shown = page.get_by_role("button", name=re.compile(r"Show \d+ change"))
        expect(shown).to_be_visible()
        expect(field).to_have_value("half ty")
        field.fill("")
        grid = grid_of(page)
        grid.focus()
        page.keyboard.press("End")
        expect(grid.get_by_role("row", selected=True)).to_contain_text("ep_00000")
        expect(page.get_by_text(f"{MANY:,} rows")).to_be_visible()
        shown.click()
        expect(page.get_by_role("link", name=made)).to_be_visible()
        expect(page.get_by_text(f"{MANY + 1:,} rows")).to_be_visible()
        watched.check()
    finally:
        api.post(f"/episodes/{made}/cancel")
        api.delete(f"/episodes/{made}")


def grid_of(page: Page) -> Locator:
    return page.get_by_role("grid", name="Episodes")


def first_id(page: Page) -> Locator:
    return grid_of(page).locator("[aria-rowindex='2'] [role=gridcell]:nth-child(2) a")


def ids(page: Page) -> list[str]:
    expect(first_id(page)).to_be_visible()
    return page.locator("[role=gridcell]:nth-child(2) a").all_text_contents()


def page_of(api: httpx.Client, **conditions: Any) -> dict[str, Any]:
    asked = {"view": "summary", "sort": "created", "limit": 100, **conditions}
    answer = api.get("/episodes", params=asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
