"""A real GRPO run is watched while it plays: counts grow without a reload, and at its end they are the API's. The
trainer's log, TensorBoard, the viewer, the command line and the client say the same numbers of each of its steps.

The loop of examples/grpo trains the policy that ships on its errands: agents in sandboxes, the embedded engine,
new weights after each step. Only the held-out errands before it are left out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from playwright.sync_api import Locator, Page, expect
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from control_support import START_S, Door, in_thread
from grpo.grpo import Log, RunSettings, learn
from grpo.learner import GrpoSettings
from tiny_policy.evaluate import Score
from turnstile import AsyncClient, Client
from turnstile.cli.app import app
from turnstile.loggers.tensorboard import TensorBoardLogger
from turnstile.report.figures import number as number_of
from turnstile_server.demo import TINY
from turnstile_server.demo.local_server import serve
from ui.conftest import Watched, fact
from waiting import wait_until_sync

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

RUN = "grpo"
SETTINGS = RunSettings(steps=2, groups=2, group_size=4, max_concurrent=4, run_id=RUN)
PLAYED_S = 240.0
"""It takes half a minute on two cores that others use, too."""


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """A server of its own, with the embedded engine and sandboxes."""
    data = tmp_path_factory.mktemp("grpo") / "data"

    @asynccontextmanager
    async def serving() -> AsyncIterator[Door]:
        async with serve(TINY, data, options=["--sandbox", "local", "--durability", "process"]) as server:
            yield Door(server.control_url, server.control_key, server.agent_url, TINY)

    with in_thread(serving) as running:
        yield running


@pytest.fixture(scope="module")
def api(door: Door) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {door.key}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=START_S) as client:
        yield client


@pytest.fixture
def learning(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Future[Path]]:
    """The loop, in a thread."""

    async def unplayed(checkpoint: Path, episodes: int, seed: int) -> Score:
        return Score(Counter({1: 1}), Counter())

    async def loop() -> Path:
        async with AsyncClient(door.url, key=door.key) as client:
            log = Log(tmp_path)
            with TensorBoardLogger(str(tmp_path / "events")) as board:
                log.loggers = [board]
                return await learn(client, tmp_path, SETTINGS, GrpoSettings(), log, tensors=False)

    monkeypatch.setattr("grpo.grpo.judge", unplayed)
    torch.set_num_threads(1)
    torch.manual_seed(SETTINGS.seed)
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(asyncio.run, loop())


@pytest.mark.thorough
def test_a_run_is_watched_to_its_end(
    watched: Watched, door: Door, api: httpx.Client, learning: Future[Path]
) -> None:
    page = watched.open("/runs", door.key)
    row = page.get_by_role("table", name="Runs").get_by_role("row").filter(has_text=RUN)
    ended = row.get_by_role("cell").nth(1)
    first = grown(learning, ended, 0)
    page.evaluate("window.stays = true")
    grown(learning, ended, first)
    row.get_by_role("link", name=RUN).click()
    grown(learning, entry(page, "Weight version"), SETTINGS.steps - 1)
    watched.check()
    assert learning.result().name == f"v{SETTINGS.steps}"
    total = at_rest(api)
    expect(entry(page, "Ended")).to_have_text(str(total["episodes"]), timeout=START_S * 1000)
    expect(entry(page, "Turns")).to_have_text(f"{total['turns']:,}", timeout=START_S * 1000)
    status = page.get_by_role("region", name="Status")
    for name, many in total["statuses"].items():
        assert fact(status, name.replace("_", " ")) == f"{many:,}"
    rewards = page.get_by_role("region", name="Rewards")
    assert (fact(rewards, "Graded"), fact(rewards, "Solved")) == (str(total["graded"]), str(total["solved"]))
    tokens = page.get_by_role("region", name="Tokens", exact=True)
    assert fact(tokens, "Sampled") == f"{total['sampled_tokens']:,}"
    assert fact(tokens, "Trained") == f"{total['trained_tokens']:,}"
    assert fact(tokens, "Oldest token trained") == f"{total['lag_max']} versions"
    assert fact(tokens, "Trained by a step") == f"{total['used']} episodes"
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Runs").click()
    expect(ended).to_have_text(str(total["episodes"]))
    assert page.evaluate("window.stays") is True
    watched.check()
    page.emulate_media(color_scheme="dark")
    row.get_by_role("link", name=RUN).click()
    for by in ("version", "step"):
        wanted = api.get("/stats", params={"run_id": RUN, "by": by}).json()["rows"]
        assert len(wanted) > 1
        page = watched.open(f"/runs/{RUN}?by={by}", door.key)
        cells = page.get_by_role("region", name="By", exact=True).locator("tbody td:nth-child(2)")
        expect(cells.last).to_be_visible()
        assert cells.all_text_contents()[-len(wanted) :] == [str(one["episodes"]) for one in wanted]
    watched.check()
    every_place_says_the_same_of_each_step(page, door, learning.result().parent)


def every_place_says_the_same_of_each_step(page: Page, door: Door, out: Path) -> None:
    """``page``: that of the run, by step."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    logged = {line["version"]: line for line in lines if line["kind"] == "step"}
    assert list(logged) == list(range(1, SETTINGS.steps + 1))
    board = EventAccumulator(str(out / "events"))
    board.Reload()
    with Client(door.url, key=door.key) as client:
        rows = {row.key["step"]: row for row in client.stats(["step"], run_id=RUN).rows}
        for step, entry in logged.items():
            row = rows[step]
            figures = (row.reward_mean, row.lag_mean, row.graded, row.trained_share)
            assert figures == (entry["reward"], entry["lag"], entry["graded"], entry["trained_share"])
            assert row.used > 0
            assert row.lag_max is not None
            assert row.lag_max <= SETTINGS.staleness, "the trainer leaves out what is older"
            for name, value in (
                ("reward/mean", row.reward_mean),
                ("lag/mean", row.lag_mean),
                ("lag/max", row.lag_max),
                ("episodes", row.episodes),
                ("trained_by_step", row.used),
                ("left_out_by_step", row.left_out),
            ):
                (shown,) = [each.value for each in board.Scalars(f"turnstile/{name}") if each.step == step]
                assert shown == pytest.approx(value), name
            cells = page.get_by_role("region", name="By", exact=True).locator("tbody tr")
            its = cells.filter(has=page.get_by_role("rowheader", name=str(step), exact=True)).locator("td")
            assert its.nth(0).inner_text() == str(row.episodes)
            assert float(its.nth(2).inner_text()) == pytest.approx(row.reward_mean, abs=5e-4)
            assert float(its.last.inner_text()) == pytest.approx(row.lag_mean, abs=5e-4)
            told = [each.trained for each in client.episodes(run_id=RUN, train_step=step)]
            assert len(told) == row.episodes
            assert all(each is not None and each.version == str(step - 1) for each in told)
        report = out / "report.html"
        arguments = ["report", RUN, "--out", str(report), "--episodes", "0", "--url", door.url, "--key", door.key]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        table = report.read_text().split("<caption>By train step</caption>")[1].split("</table>")[0]
        for step, row in rows.items():
            if step is not None:
                (line,) = [each for each in table.split("</tr>") if f">{step}</th>" in each]
                cells_of = [re.sub("<.*?>", "", cell) for cell in line.split("</td>")]
                assert number_of(row.reward_mean) in cells_of
                assert number_of(row.lag_mean) in cells_of


def grown(learning: Future[Path], shown: Locator, before: int) -> int:
    """What is shown when it is more than ``before``. Raises what the loop raised."""
    deadline = time.monotonic() + PLAYED_S
    while shown.count() == 0 or number(shown) <= before:
        if learning.done():
            learning.result()
        assert time.monotonic() < deadline
        shown.page.wait_for_timeout(100)
    return number(shown)


def number(shown: Locator) -> int:
    return int(shown.inner_text().replace(",", ""))


def entry(page: Page, name: str) -> Locator:
    found = page.locator("dl > div").filter(has=page.locator("dt").get_by_text(name, exact=True))
    return found.locator("dd").first


def at_rest(api: httpx.Client) -> dict[str, Any]:
    """The statistics of the run when its last episodes have ended."""

    def ended() -> dict[str, Any] | None:
        total: dict[str, Any] = api.get("/stats", params={"run_id": RUN}).json()["total"]
        at_work = sum(total["statuses"].get(name, 0) for name in ("queued", "preparing", "running", "grading"))
        return None if at_work else total

    return wait_until_sync(ended, within_s=200)
