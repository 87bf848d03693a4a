"""The page of ``turnstile report`` in Chromium: it loads nothing, says nothing, and axe finds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from control_support import Door
from turnstile.report.from_server import report_of_run
from turnstile.report.page import page
from turnstile.sync import Client
from ui.conftest import AXE, HOSTILE

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report_file(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with Client(door.url, key=door.key) as client:
        for step in range(3):
            task = {"instruction": HOSTILE, "reward": {"late": True}}
            episode = client.create_episode(task, run_id="report-page", train_step=step)
            door.add_turn(episode.episode_id)
            door.add_turn(episode.episode_id)
            episode.finish()
            episode.reward(step / 2)
        report = report_of_run(client, "report-page", episodes=10, asked=(), tokens=1000)
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page(report), "utf-8")
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_file_alone(browser: Browser, report_file: Path, scheme: str) -> None:
    context = browser.new_context(color_scheme="dark" if scheme == "dark" else "light")
    tab = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(report_file.as_uri())
    assert tab.title() == "Turnstile report: report-page"
    assert tab.locator("section.episode").count() == 3
    assert tab.get_by_role("img", name="Mean reward by train step").count() == 1
    # The style sheet is let in by its digest: without it a token has no shade.
    assert tab.locator("span.t").first.evaluate("e => getComputedStyle(e).backgroundColor") != "rgba(0, 0, 0, 0)"
    found = tab.evaluate(f"async () => {{ {AXE.read_text('utf-8')}; return (await axe.run()).violations }}")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found] == []
    assert (asked, said) == ([report_file.as_uri()], [])
    context.close()
