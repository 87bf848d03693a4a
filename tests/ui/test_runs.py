"""The pages of runs in a real browser: what they count is what the API counts."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from control_support import Door
from ui.conftest import Watched, fact, wait_until

pytestmark = pytest.mark.browser

RUN = "runs-grpo-7"
TAG = "<i>hard\u202e"
both_schemes = pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)


@pytest.fixture(scope="module")
def recorded(api: httpx.Client, door: Door) -> dict[str, Any]:
    """Sixteen episodes in a run: four steps, two tasks, groups of four; two are cancelled, two still run. The
    first has two turns. ``GET /stats`` of the run."""
    for number in range(16):
        task = {
            "instruction": f"Task {number % 2} of the runs.",
            "reward": {"late": True},
            "tags": [TAG] if number % 2 else ["easy"],
        }
        created = api.post(
            "/episodes",
            json={"task": task, "run_id": RUN, "train_step": number // 4, "group_id": f"runs-{number // 4}"},
        )
        assert created.status_code == 201, created.text
        episode_id = created.json()["episode_id"]
        if number == 0:
            door.add_turn(episode_id)
            door.add_turn(episode_id)
        if number < 12:
            assert api.post(f"/episodes/{episode_id}/finish").status_code == 200
            reward = {"key": "k", "reward": 1.0 if number in (1, 4, 5, 8, 9, 10, 11) else 0.0}
            assert api.post(f"/episodes/{episode_id}/reward", json=reward).status_code == 200
        elif number < 14:
            assert api.post(f"/episodes/{episode_id}/cancel").status_code == 200
    return _stats(api)


@both_schemes
def test_the_runs_are_the_start_and_their_counts_are_the_apis(
    watched: Watched, door: Door, api: httpx.Client, recorded: dict[str, Any]
) -> None:
    page = watched.open("", door.key)
    table = page.get_by_role("table", name="Runs")
    expect(table).to_be_visible()
    assert page.url == f"{door.url}/ui/runs"
    rows = api.get("/stats", params={"by": "run"}).json()["rows"]
    expect(table.get_by_role("row")).to_have_count(len(rows) + 1)
    row = table.get_by_role("row").filter(has_text=RUN)
    expect(row).to_contain_text("7 / 12")
    assert row.get_by_role("cell").all_text_contents()[:5] == ["16", "14", "2", "0", "0"]
    watched.check()
    row.get_by_role("link", name="16").click()
    assert page.url == f"{door.url}/ui/episodes?run_id=runs-grpo-7"
    page.go_back()
    row.get_by_role("link", name=RUN).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Run {RUN}")
    assert page.url == f"{door.url}/ui/runs/runs-grpo-7"


@both_schemes
def test_a_run_says_what_the_api_says(watched: Watched, door: Door, recorded: dict[str, Any]) -> None:
    page = watched.open("/runs/runs-grpo-7", door.key)
    status = page.get_by_role("region", name="Status")
    expect(status).to_be_visible()
    for name, many in recorded["statuses"].items():
        assert fact(status, name.replace("_", " ")) == str(many)
    rewards = page.get_by_role("region", name="Rewards")
    assert fact(rewards, "Graded") == str(recorded["graded"]) == "12"
    assert fact(rewards, "Solved") == str(recorded["solved"]) == "7"
    groups = f"{recorded['groups_without_signal']} / {recorded['groups']}"
    assert fact(rewards, "Groups without signal") == groups == "1 / 3"
    for chance in recorded["pass_at_k"]:
        shown = fact(rewards, f"pass@{chance['k']}")
        tasks = "1 task" if chance["tasks"] == 1 else f"{chance['tasks']} tasks"
        sets = "" if chance["sets"] == chance["tasks"] else f"{chance['sets']} task × agent × weights of "
        assert shown == f"{chance['value'] * 100:.0f} % of {sets}{tasks}"
    assert "task × agent × weights" in rewards.inner_text(), (
        "one rollout was sampled by weights, the others by none"
    )
    assert float(fact(rewards, "Deviation")) == pytest.approx(recorded["reward_std"], abs=1e-3)
    assert float(fact(rewards, "Standard error of the mean")) == pytest.approx(recorded["reward_error"], abs=1e-3)
    ends = page.locator("main > dl").first
    for name in ("failed", "timed_out", "cancelled"):
        shown = ends.locator("div").filter(has_text=name.replace("_", " ").capitalize()).locator("dd").inner_text()
        assert shown == str(recorded["statuses"].get(name, 0)), name
    tokens = page.get_by_role("region", name="Tokens")
    assert fact(tokens, "Sampled") == str(recorded["sampled_tokens"])
    assert fact(tokens, "Trained") == str(recorded["trained_tokens"])
    for reason, many in recorded["untrained"].items():
        assert fact(tokens, reason.replace("_", " ")) == str(many)
    expect(page.get_by_text("Where time goes")).to_be_visible()
    engine = page.get_by_role("region", name="Engine", exact=True)
    expect(engine.get_by_text("serving").first).to_be_visible()
    lately = page.get_by_role("region", name="This server, lately")
    assert fact(lately, "Turns/s") != ""
    assert fact(lately, "Sandboxes in use") == "0"
    assert fact(lately, "Sandboxes warm") == "0"
    lately.get_by_text("Numbers: Model calls", exact=True).click()
    expect(lately.get_by_role("region", name="Numbers: Model calls").get_by_role("row").nth(2)).to_be_visible()
    watched.check()
    status.get_by_role("link", name="2", exact=True).first.click()
    assert re.search(r"/ui/episodes\?run_id=runs-grpo-7&status=(running|cancelled)$", page.url)


def test_the_tab_is_in_the_address_and_each_row_is_the_apis(
    watched: Watched, door: Door, api: httpx.Client, recorded: dict[str, Any]
) -> None:
    page = watched.open("/runs/runs-grpo-7", door.key)
    expect(page.get_by_role("figure").filter(has_text="Reward").first).to_be_visible()
    tabs = (
        ("tag", "Tag"),
        ("version", "Weight version"),
        ("agent", "Agent"),
        ("task", "Task"),
        ("step", "Train step"),
    )
    for by, title in tabs:
        page.get_by_role("navigation", name="Rewards by").get_by_role("link", name=title).click()
        assert page.url.endswith(f"?by={by}")
        page.reload()
        table = page.get_by_role("region", name=f"By {title.lower()}")
        wanted = api.get("/stats", params={"run_id": RUN, "by": by}).json()["rows"]
        expect(table.get_by_role("row")).to_have_count(len(wanted) + 1)
        counts = table.locator("tbody td:nth-child(2)").all_text_contents()
        assert counts == [str(row["episodes"]) for row in wanted]
        graded = table.locator("tbody td:nth-child(3)").all_text_contents()
        assert graded == [str(row["graded"]) for row in wanted]
        watched.check()
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.evaluate("document.body.textContent"))
    page.get_by_role("region", name="By train step").get_by_role("link", name="4", exact=True).first.click()
    assert page.url.endswith("&train_step=0")


def test_rewards_have_the_scale_of_the_run_and_solved_is_what_is_asked_for(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    for name, reward in (("worst", -2.0), ("best", 4.0)):
        task = {"instruction": name, "id": f"scale-{name}", "reward": {"late": True, "bounds": [-2, 4]}}
        created = api.post("/episodes", json={"task": task, "run_id": "runs-scale"}).json()["episode_id"]
        assert api.post(f"/episodes/{created}/finish").status_code == 200
        assert api.post(f"/episodes/{created}/reward", json={"key": "k", "reward": reward}).status_code == 200
    page = watched.open("/runs/runs-scale?by=task", door.key)
    bars = page.get_by_role("region", name="By task").locator("tbody tr")
    styles = [bars.nth(at).locator(".gauge > span").first.get_attribute("style") or "" for at in (0, 1)]
    best, worst = [[float(each) for each in re.findall(r"([\d.]+)%", style)] for style in styles]
    assert best == pytest.approx([100 / 3, 200 / 3], abs=0.1)
    assert worst == pytest.approx([0.0, 100 / 3], abs=0.1)
    rewards = page.get_by_role("region", name="Rewards", exact=True)
    assert fact(rewards, "Solved") == "1"
    field = rewards.get_by_label("Solved from a reward of")
    assert field.input_value() == "1"
    field.fill("-2")
    field.press("Enter")
    expect(rewards.get_by_role("link", name="2", exact=True).nth(1)).to_be_visible()
    assert (fact(rewards, "Solved"), fact(rewards, "pass@1")) == ("2", "100 % of 2 tasks")
    page.get_by_role("navigation", name="Rewards by").get_by_role("link", name="Agent").click()
    assert page.url.endswith("?by=agent&solved_at=-2"), "it stays"
    watched.check()
    rewards.get_by_role("link", name="2", exact=True).nth(1).click()
    assert page.url.endswith("/ui/episodes?run_id=runs-scale&reward_min=-2")


def test_a_change_is_seen_without_asking(watched: Watched, door: Door, api: httpx.Client) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "x"}, "run_id": "runs-live"})
    page = watched.open("/runs/runs-live", door.key)
    expect(page.get_by_role("region", name="Status")).to_contain_text("running")
    assert api.post(f"/episodes/{made.json()['episode_id']}/cancel").status_code == 200
    expect(page.get_by_role("region", name="Status")).to_contain_text("cancelled")
    watched.check()


def test_the_latest_run_stands_first_and_rows_stay_while_their_numbers_change(
    watched: Watched, door: Door, api: httpx.Client, recorded: dict[str, Any]
) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "x"}, "run_id": "runs-latest"})
    page = watched.open("/runs", door.key)
    rows = page.get_by_role("table", name="Runs").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("runs-latest")
    rows.nth(1).get_by_role("link", name="runs-latest").focus()
    assert api.post(f"/episodes/{made.json()['episode_id']}/cancel").status_code == 200
    expect(rows.nth(1).get_by_role("cell").nth(1)).to_have_text("1")  # ended
    expect(rows.nth(1).get_by_role("link", name="runs-latest")).to_be_focused()
    expect(page.get_by_role("region", name="Engine", exact=True)).to_contain_text("serving")
    watched.check()


def test_back_leads_to_the_place_on_the_page_that_was_left(
    watched: Watched, door: Door, recorded: dict[str, Any]
) -> None:
    page = watched.open("/runs/runs-grpo-7?by=task", door.key)
    link = page.get_by_role("region", name="By task").get_by_role("link").first
    expect(link).to_be_visible()
    expect(page.get_by_text("Tokens per second").first).to_be_visible()
    page.evaluate("scrollTo(0, 300)")
    wait_until(page, "history.state?.places?.page === 300")
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Episodes")
    assert page.evaluate("scrollY") == 0
    page.go_back()
    wait_until(page, "scrollY === 300")


def test_everything_on_the_server_has_a_page_of_its_own(watched: Watched, door: Door, api: httpx.Client) -> None:
    page = watched.open("/runs/-/all", door.key)
    expect(page.get_by_role("heading", level=1)).to_have_text("All episodes")
    total = api.get("/stats").json()["total"]["episodes"]
    expect(page.get_by_role("link", name=f"{total:,}", exact=True).first).to_be_visible()
    watched.check()


def _stats(api: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = api.get("/stats", params={"run_id": RUN}).json()["total"]
    return found
