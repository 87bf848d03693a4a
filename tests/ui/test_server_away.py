"""A server that stops, is slow, or is started again while a page of it is open."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from playwright.sync_api import Route, expect

from control_support import START_S, Door
from ui.conftest import Watched

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
def test_a_page_keeps_its_data_while_the_server_is_away_and_goes_on_afterwards(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "x"}, "run_id": "runs-away"})
    page = watched.open("/runs/runs-away", door.key)
    status = page.get_by_role("region", name="Status")
    expect(status).to_contain_text("running")
    page.context.set_offline(True)
    line = page.get_by_role("status").filter(has_text="The server does not answer since")
    expect(line).to_be_visible()
    expect(status).to_contain_text("running")
    expect(page.get_by_role("alert")).to_have_count(0)
    watched.check(expected="ERR_INTERNET_DISCONNECTED")  # the browser reports every request that fails
    assert api.post(f"/episodes/{made.json()['episode_id']}/cancel").status_code == 200
    page.context.set_offline(False)
    expect(status).to_contain_text("cancelled")
    expect(line).to_have_count(0)


def test_an_answer_is_waited_for_and_asked_for_once_at_a_time(watched: Watched, door: Door) -> None:
    waiting: list[Route] = []

    def hold(route: Route) -> None:
        waiting.append(route)

    page = watched.page
    page.clock.install()
    page.route(re.compile(r"/stats\b"), hold)
    watched.open("/runs/runs-slow", door.key)
    expect(page.get_by_text("Loading…").first).to_be_visible()
    page.clock.run_for(30_000)
    assert len(waiting) == 1  # the totals and the table are of one answer
    waiting[0].continue_()
    expect(page.get_by_role("heading", name="Status")).to_be_visible()
    page.clock.run_for(30_000)
    expect(page.get_by_role("heading", name="Status")).to_be_visible()
    assert len(waiting) == 1  # an answer that took 30 seconds is not asked for again so soon
    page.clock.run_for(300_000)
    until = time.monotonic() + START_S  # the clock went on at once, the request's way to here takes its own time
    while len(waiting) < 2 and time.monotonic() < until:
        page.wait_for_timeout(50)
    assert len(waiting) == 2
    page.unroute_all(behavior="ignoreErrors")


def test_after_a_new_start_of_the_server_a_list_offers_what_changed(watched: Watched, door: Door) -> None:
    def reset(route: Route) -> None:
        data = 'id: 5-0\nevent: reset\ndata: {"reason": "another start"}\n\n'
        route.fulfill(body=data, content_type="text/event-stream")

    watched.page.route("**/events", reset, times=1)
    page = watched.open("/episodes", door.key)
    expect(page.get_by_role("button", name="Show 1 change")).to_be_visible()
    watched.check()
