"""The components that pages share, with more data than pages have: they answer the keyboard, and stay small."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect

from local import ROOT
from ui.conftest import Watched

pytestmark = pytest.mark.browser

UI = ROOT / "ui"
MOST_NODES = 8_000
"""Elements of the whole page, with 10,000 rows, 5,000 spans and a text of ten million characters in it."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    options = ["--bundle", "--format=esm", "--jsx=automatic", "--jsx-import-source=preact", f"--outdir={folder}"]
    subprocess.run([UI / "node_modules/.bin/esbuild", UI / "gallery/main.tsx", *options], check=True, cwd=UI)
    return folder


@pytest.fixture
def gallery(watched: Watched, bundle: Path) -> Watched:
    """The gallery in the place of the viewer's script, under the server's own policy."""

    def instead(route: Route) -> None:
        name = "main.js" if route.request.url.endswith(".js") else "main.css"
        answer = route.fetch()
        route.fulfill(response=answer, body=(bundle / name).read_text("utf-8"))

    watched.page.route("**/ui/assets/**", instead)
    watched.open("/gallery", None)
    expect(watched.page.get_by_role("heading", name="Components")).to_be_visible()
    return watched


@pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
def test_all_are_accessible_and_draw_only_what_is_seen(gallery: Watched) -> None:
    gallery.check()
    assert gallery.page.locator("*").count() < MOST_NODES


def test_a_table_of_ten_thousand_rows_is_read_by_keyboard_and_sorted(gallery: Watched) -> None:
    page = gallery.page
    grid = page.get_by_role("grid", name="Numbers")
    grid.focus()
    page.keyboard.press("End")
    expect(grid.get_by_role("row", selected=True)).to_contain_text("9,999")
    page.keyboard.press("PageUp")
    page.keyboard.press("Enter")
    expect(page.locator("#opened")).to_contain_text("opened 999")
    header = grid.get_by_role("columnheader", name="Number")
    expect(header).to_have_attribute("aria-sort", "ascending")
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "descending")
    grid.focus()
    page.keyboard.press("Home")
    expect(grid.get_by_role("row", selected=True)).to_contain_text("9,999")
    assert grid.get_by_role("row").count() < 60


def test_a_timeline_is_read_and_zoomed_by_keyboard(gallery: Watched) -> None:
    page = gallery.page
    lanes = page.get_by_role("application", name="Time")
    said = page.get_by_role("region", name="Lanes").get_by_role("status")
    lanes.focus()
    page.keyboard.press("Home")
    expect(said).to_contain_text("call 0 (tool): 400 ms, from")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("call 3 (model)")
    expect(said).to_contain_text("failed. \\u202edetail")
    page.keyboard.press("Enter")
    expect(page.locator("#span")).to_have_text("span s3")
    page.keyboard.press("End")
    expect(said).to_contain_text("still running")
    drawn = lanes.locator("rect").count()
    assert drawn < 2_500
    for _ in range(8):
        page.keyboard.press("+")
    expect(lanes.locator("rect")).not_to_have_count(drawn)


def test_a_text_of_ten_million_characters_is_shown_in_pages(gallery: Watched) -> None:
    text = gallery.page.get_by_role("region", name="Large text")
    text.get_by_role("button", name="Show all 11,900,000 characters").click()
    expect(text.get_by_role("status")).to_have_text("characters 0 to 100,000 of 11,900,000")
    text.get_by_role("button", name="Later").click()
    expect(text.get_by_role("status")).to_have_text("characters 100,000 to 200,000 of 11,900,000")
    expect(text.locator(".escape").first).to_have_text("\\u202e")
    text.get_by_role("button", name="Show less").click()
    expect(text.get_by_role("button", name="Show all")).to_be_visible()


def test_diffs_say_what_was_added_and_removed_in_words_too(gallery: Watched) -> None:
    page = gallery.page
    unified = _rows(page, "Unified")
    assert "removed: --- not a file name" in unified
    assert 'added:     return "<b>\\u202e\\x1b[31m"' in unified
    assert [row for row in _rows(page, "Texts") if row.startswith(("added", "removed"))] == [
        "removed: b",
        "added: x",
        "added: d",
    ]


def test_a_chart_has_its_numbers_as_a_table(gallery: Watched) -> None:
    page = gallery.page
    page.get_by_text("Numbers: Rewards").click()
    table = page.get_by_role("region", name="Numbers: Rewards").get_by_role("table")
    expect(table.get_by_role("row")).to_have_count(301)
    expect(table.get_by_role("row").nth(1)).to_contain_text("0.00")


def _rows(page: Page, name: str) -> list[str]:
    """Kind and text of each line of a diff."""
    rows = page.get_by_role("region", name=name).get_by_role("row").all()
    return [row.locator(".unseen").text_content() + (row.locator("td").last.text_content() or "") for row in rows]
