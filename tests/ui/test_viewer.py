"""The viewer in a real browser, against a real server."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from control_support import Door
from ui.conftest import HOSTILE_GROUP, Watched

pytestmark = pytest.mark.browser

both_schemes = pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)


def test_the_key_in_the_fragment_leaves_the_address_and_is_kept_by_the_tab(
    watched: Watched, door: Door, episodes: list[str]
) -> None:
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    assert page.url == f"{door.url}/ui/episodes"
    page.reload()
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_label("Control key")).to_be_visible()
    assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    page.go_back()
    assert door.key not in page.url


def test_a_new_tab_has_the_key_of_an_open_one_and_all_forget_it_together(
    watched: Watched, door: Door, episodes: list[str]
) -> None:
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    other = page.context.new_page()
    other.goto(f"{door.url}/ui/episodes/{episodes[0]}")
    expect(other.get_by_role("heading", level=1)).to_have_text(episodes[0])
    other.get_by_role("button", name="Forget the key").click()
    for tab in (page, other):
        expect(tab.get_by_label("Control key")).to_be_visible()
        assert tab.evaluate("sessionStorage.length") == 0


def test_a_wrong_key_is_refused_with_the_servers_reason_and_a_right_one_opens_the_page_asked_for(
    watched: Watched, door: Door, episodes: list[str]
) -> None:
    page = watched.open(f"/episodes/{episodes[0]}", None)
    field = page.get_by_label("Control key")
    expect(field).to_be_focused()
    field.fill("schlüssel → of no server")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("letters, digits and")
    field.fill("not-the-key-0123456789")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("This key was refused")
    expect(page.get_by_role("alert")).to_contain_text("is not this server's")
    watched.check(expected="401")  # the browser reports each, some of them later than the page shows the reason
    field.fill(door.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(episodes[0])
    assert page.url == f"{door.url}/ui/episodes/{episodes[0]}"


@both_schemes
def test_the_list_is_the_apis(watched: Watched, door: Door, api: httpx.Client, episodes: list[str]) -> None:
    page = watched.open("/episodes", door.key)
    grid = page.get_by_role("grid", name="Episodes")
    newest = [episode["episode_id"] for episode in api.get("/episodes", params={"limit": 1000}).json()["episodes"]]
    expect(page.get_by_text(f"{len(newest)} rows")).to_be_visible()
    expect(grid).to_have_attribute("aria-rowcount", str(len(newest) + 1))
    assert _first_cells(page) == newest[: len(_first_cells(page))]
    watched.check()
    grid.focus()
    page.keyboard.press("End")
    last = grid.get_by_role("row", selected=True)
    expect(last).to_have_attribute("aria-rowindex", str(len(newest) + 1))
    expect(last).to_contain_text(newest[-1])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(newest[-1])
    page.go_back()
    expect(grid).to_be_visible()


def test_filters_are_in_the_address(watched: Watched, door: Door, api: httpx.Client, hostile: str) -> None:
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Text")).to_be_focused()
    page.keyboard.type(HOSTILE_GROUP)
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 rows")).to_be_visible()
    assert page.url.endswith(f"?text={HOSTILE_GROUP}")
    page.reload()
    assert _first_cells(page) == [hostile]
    page.get_by_label("Status").select_option("failed")
    expect(page.get_by_text("No episode fits.")).to_be_visible()
    watched.check()


def test_a_change_is_told_and_shown_when_wanted(watched: Watched, door: Door, api: httpx.Client) -> None:
    with watched.page.expect_response("**/events"):
        page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    made = api.post("/episodes", json={"task": {"instruction": "new"}}).json()["episode_id"]
    page.get_by_role("button", name=re.compile("change")).click()
    expect(page.get_by_role("link", name=made)).to_be_visible()
    watched.check()


def test_a_broken_stream_of_events_goes_on_after_the_last_one(watched: Watched, door: Door) -> None:
    asked: list[dict[str, str]] = []

    def two_parts(route: Route) -> None:
        asked.append(route.request.headers)
        line_ends = "\r\n" if len(asked) == 1 else "\n"
        event = [f"id: {6 + len(asked)}", "event: episode", 'data: {"episode_id":', 'data: "e"}', ""]
        route.fulfill(body=line_ends.join([*event, ": silence", "", ""]), content_type="text/event-stream")

    watched.page.route("**/events", two_parts)
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("button", name="Show 2 changes")).to_be_visible()
    assert [headers.get("last-event-id") for headers in asked[:2]] == [None, "7"]
    assert asked[0]["authorization"] == f"Bearer {door.key}"


def test_the_viewer_works_below_a_proxys_prefix(watched: Watched, door: Door, episodes: list[str]) -> None:
    def proxy(route: Route) -> None:
        if route.request.url.endswith("/events"):
            route.abort()  # has no end, which this proxy would wait for
        else:
            route.fulfill(response=route.fetch(url=route.request.url.replace("/behind/it/", "/")))

    watched.page.route(f"{door.url}/behind/it/**", proxy)
    asked: list[str] = []
    watched.page.on("request", lambda request: asked.append(request.url))
    watched.page.goto(f"{door.url}/behind/it/ui/episodes/{episodes[0]}#key={door.key}")
    page = watched.page
    expect(page.get_by_role("heading", level=1)).to_have_text(episodes[0])
    page.get_by_role("link", name="Episodes").first.click()
    page.get_by_role("link", name=episodes[-1]).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(episodes[-1])
    expect(page.get_by_text("No model call yet.")).to_be_visible()
    assert page.url == f"{door.url}/behind/it/ui/episodes/{episodes[-1]}"
    assert [url for url in asked if not url.startswith((f"{door.url}/behind/it/", "data:"))] == []
    page.unroute_all(behavior="wait")


@both_schemes
def test_hostile_text_is_text(watched: Watched, door: Door, hostile: str) -> None:
    page = watched.open(f"/episodes/{hostile}", door.key)
    expect(page.get_by_role("heading", level=1)).to_have_text(hostile)
    conversation = page.get_by_role("article", name="Turn 0")
    expect(conversation).to_contain_text("<script>document.title='taken'</script>")
    expect(conversation).to_contain_text("<img src=x onerror=")
    for escape in ("\\x1b", "\\u202e", "\\u2066", "\\x07"):
        expect(conversation.locator(".escape", has_text=escape).first).to_be_visible()
    raw = page.evaluate("document.body.textContent")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", raw)
    assert page.title().startswith(hostile[:40])
    assert page.locator("main script, main img").count() == 0
    watched.check()


def test_an_episode_that_is_not_there_says_so(watched: Watched, door: Door) -> None:
    page = watched.open("/episodes/none%2Fsuch", door.key)
    expect(page.get_by_role("alert").first).to_contain_text("404")
    watched.check(expected="status of 404")
    page = watched.open("/no/such/page", None)
    expect(page.get_by_role("heading", level=1)).to_have_text("No such page")
    watched.check(expected="status of 404")  # the browser reports each, some of them later than the page does


def test_the_help_opens_and_closes_by_keyboard(watched: Watched, door: Door, episodes: list[str]) -> None:
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    watched.check()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_hidden()


def test_the_policy_stops_what_the_viewer_did_not_bring(watched: Watched, door: Door, episodes: list[str]) -> None:
    """Able to fail: the browser of these tests does enforce the policy."""
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
    refused = page.evaluate(
        """() => {
            const script = document.createElement('script');
            let trusted = 'accepted';
            try { script.text = 'document.title = "taken"'; } catch (error) { trusted = error.name; }
            return trusted;
        }"""
    )
    assert refused == "TypeError"
    assert "taken" not in page.title()
    with pytest.raises(Exception, match="Failed to fetch"):
        page.evaluate("fetch('http://127.0.0.2:9/')")


def _first_cells(page: Page) -> list[str]:
    page.wait_for_selector("[role=row] a")
    return page.locator("[role=gridcell]:nth-child(2) a").all_text_contents()
