"""A walk over every page of a recorded run of real agents: what is counted on the screen is what the API counts.

The run was played by Claude Code, Codex and others in Docker (tests/ui/recorded/README.md), and is looked at
without a server, as `turnstile ui FOLDER` does.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from control_support import KEY, START_S, Door
from turnstile_server.testing.server import TOKENIZER_FOLDER
from ui.conftest import RECORDED, Watched, fact, folder_viewer
from viewer_pictures import PICTURES, PICTURES_TAKEN, take

pytestmark = pytest.mark.browser


RUN = "real-agents"
LISTED = {"view": "summary", "sort": "created", "order": "desc", "offset": 0, "limit": 200}
"""As the page asks for its rows."""
AGENTS = {
    "claude-code",
    "codex",
    "gemini-cli",
    "goose",
    "mini-swe-agent",
    "opencode",
    "pi",
    "plain-loop",
    "qwen-code",
}
both_schemes = pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)

Summary = dict[str, Any]


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """No agent has a door to it."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder)
    with folder_viewer(folder, TOKENIZER_FOLDER) as url:
        yield Door(url, KEY, "", folder)


@pytest.fixture(scope="module")
def api(door: Door) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {door.key}"}
    with httpx.Client(base_url=door.url, headers=headers, timeout=START_S) as client:
        yield client


@pytest.fixture(scope="module")
def summaries(api: httpx.Client) -> list[Summary]:
    """All episodes, the newest first."""
    answer = api.get("/episodes", params=LISTED).json()
    found: list[Summary] = answer["summaries"]
    assert len(found) == answer["total"]
    assert {summary["agent"] for summary in found} == AGENTS
    return found


@both_schemes
def test_the_run_and_each_of_its_tabs(
    watched: Watched, door: Door, api: httpx.Client, summaries: list[Summary]
) -> None:
    total = api.get("/stats", params={"run_id": RUN}).json()["total"]
    assert total["episodes"] == len(summaries)
    page = watched.open("/runs", door.key)
    row = page.get_by_role("table", name="Runs").get_by_role("row").filter(has_text=RUN)
    cells = row.get_by_role("cell")
    expect(cells.nth(0)).to_have_text(str(total["episodes"]))
    assert cells.all_text_contents()[8:11] == [
        f"{total['solved']} / {total['graded']}",
        f"{total['groups_without_signal']} / {total['groups']}",
        f"{total['sampled_tokens']:,}",
    ]
    watched.check()
    row.get_by_role("link", name=RUN).click()
    status = page.get_by_role("region", name="Status")
    for name, many in {**total["statuses"], **total["errors"]}.items():
        assert fact(status, name.replace("_", " ")) == str(many)
    rewards = page.get_by_role("region", name="Rewards")
    assert (fact(rewards, "Graded"), fact(rewards, "Solved")) == (str(total["graded"]), str(total["solved"]))
    tokens = page.get_by_role("region", name="Tokens")
    assert fact(tokens, "Sampled") == f"{total['sampled_tokens']:,}"
    assert fact(tokens, "Trained") == f"{total['trained_tokens']:,}"
    assert len(total["breaks"]) > 1
    for name, many in {**total["untrained"], **total["breaks"]}.items():
        assert fact(tokens, name.replace("_", " ")) == str(many)
    expect(page.get_by_role("region", name="Engine")).to_have_count(0)  # there is no server
    for by, title in (("task", "Task"), ("tag", "Tag"), ("version", "Weight version"), ("step", "Train step")):
        page.get_by_role("navigation", name="Rewards by").get_by_role("link", name=title).click()
        table = page.get_by_role("region", name=f"By {title.lower()}")
        wanted = api.get("/stats", params={"run_id": RUN, "by": by}).json()["rows"]
        expect(table.get_by_role("row")).to_have_count(len(wanted) + 1)
        for column, name in ((2, "episodes"), (3, "graded"), (8, "sampled_tokens")):
            shown = table.locator(f"tbody td:nth-child({column})").all_text_contents()
            assert shown == [f"{one[name]:,}" for one in wanted]
    watched.check()
    page = watched.open("/runs/-/all", door.key)
    expect(page.get_by_role("heading", level=1)).to_have_text("All episodes")
    assert fact(page.locator("main"), "Episodes") == str(api.get("/stats").json()["total"]["episodes"])
    watched.check()


@both_schemes
def test_the_list_and_what_its_filters_leave(watched: Watched, door: Door, api: httpx.Client) -> None:
    conditions: list[dict[str, Any]] = [
        {"run_id": RUN},
        {"status": "truncated"},
        {"reward_min": 1},
        {"reward_max": 0, "task": "parcel-price"},
        {"graded": "false"},
        {"breaks": "any"},
        {"agent": "claude-code", "min_turns": 6},
        {"version": "2"},
    ]
    for asked in conditions:
        wanted = api.get("/episodes", params={**LISTED, **asked}).json()
        assert wanted["total"] > 0, asked
        query = "&".join(f"{name}={value}" for name, value in asked.items())
        page = watched.open(f"/episodes?{query}", door.key)
        told = f"{wanted['total']} rows"
        expect(page.get_by_text(told, exact=True)).to_be_visible()
        rows = page.get_by_role("grid", name="Episodes").get_by_role("row")
        for at, summary in enumerate(wanted["summaries"][:8]):
            cells = rows.nth(at + 1).get_by_role("gridcell").all_text_contents()
            assert cells[1] == summary["episode_id"]
            assert summary["status"] in cells[2]
            assert cells[3] == ("–" if summary["reward"] is None else f"{summary['reward']:g}")
            assert cells[11:13] == [str(summary["turns"]), f"{summary['sampled_tokens']:,}"]
            assert cells[14] == str(sum(summary["breaks"].values()))
    watched.check()


def test_every_episode(watched: Watched, door: Door, summaries: list[Summary]) -> None:
    for summary in summaries:
        page = watched.open(f"/episodes/{summary['episode_id']}", door.key)
        expect(page.get_by_role("heading", level=1)).to_have_text(summary["episode_id"])
        expect(page.get_by_text(summary["why"]).first).to_be_visible()
        main = page.locator("main")
        assert fact(main, "Reward") == ("–" if summary["reward"] is None else f"{summary['reward']:g}")
        assert fact(main, "Turns") == str(summary["turns"])
        trained = f"{summary['trained_tokens']:,} of {summary['sampled_tokens']:,} tokens"
        assert fact(main, "Trained").startswith(trained if summary["sampled_tokens"] else "–")
        expect(page.get_by_role("link", name=f"Conversation ({summary['turns']})")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
    watched.check_quiet()


@both_schemes
@pytest.mark.parametrize("agent", ["claude-code", "codex"])
def test_episodes_with_breaks_are_read_by_all(
    watched: Watched, door: Door, summaries: list[Summary], agent: str
) -> None:
    of_agent = [summary for summary in summaries if summary["agent"] == agent]
    broken = max(of_agent, key=lambda summary: (len(summary["breaks"]), summary["new_conversations"]))
    assert broken["breaks"] or broken["new_conversations"]
    page = watched.open(f"/episodes/{broken['episode_id']}", door.key)
    expect(page.get_by_text(broken["why"]).first).to_be_visible()
    watched.check()
    page = watched.open(f"/episodes/{broken['episode_id']}?show=breaks", door.key)
    breaks = page.get_by_role("region", name="Breaks")
    listed = breaks.get_by_role("article")
    expect(listed).to_have_count(sum(broken["breaks"].values()) + broken["new_conversations"])
    count = sum(broken["breaks"].values())
    expect(page.get_by_role("link", name=f"Breaks ({count})", exact=True)).to_be_visible()
    said = breaks.get_by_text("is counted as no break")
    expect(said).to_have_count(1 if broken["new_conversations"] else 0)
    grade = "Grade" if broken["reward"] is None else f"Grade: reward {broken['reward']:g}"
    expect(page.get_by_role("link", name=grade, exact=True)).to_be_visible()


@pytest.mark.thorough
def test_the_tokens_of_every_sample(
    watched: Watched, door: Door, api: httpx.Client, summaries: list[Summary]
) -> None:
    seen = 0
    for summary in summaries:
        turns = api.get(f"/episodes/{summary['episode_id']}/turns", params={"arrays": False}).json()["turns"]
        continued = {turn["parent_id"] for turn in turns}
        for turn in turns:
            if turn["turn_id"] in continued:
                continue
            asked = {"episode_id": summary["episode_id"]}
            window = api.get(f"/turns/{turn['turn_id']}/tokens", params=asked).json()
            last = window["turns"][-1]
            page = watched.open(
                f"/episodes/{summary['episode_id']}/tokens/{turn['turn_id']}?at={last['start']}", door.key
            )
            expect(page.get_by_text(f"{window['total']:,} tokens", exact=True)).to_be_visible()
            detail = page.get_by_role("complementary", name="Token")
            expect(detail).to_contain_text(f"{last['seq']} (completion)")
            assert fact(detail, "Loss mask") == ("1" if last["trained"] else "0")
            seen += 1
    assert seen > len(summaries)
    watched.check()
    watched.page.emulate_media(color_scheme="dark")
    watched.check()


def test_every_group(watched: Watched, door: Door, api: httpx.Client, summaries: list[Summary]) -> None:
    groups = Counter(summary["group_id"] for summary in summaries)
    for group_id, members in groups.items():
        group = api.get(f"/groups/{group_id}").json()
        page = watched.open(f"/groups/{group_id}", door.key)
        rows = page.get_by_role("region", name="Table: Rollouts").get_by_role("row")
        expect(rows).to_have_count(1 + members)
        for at, member in enumerate(group["members"]):
            cells = rows.nth(at + 1).get_by_role("cell").all_text_contents()
            summary = member["summary"]
            assert cells[0] == summary["episode_id"]
            assert cells[2] == ("–" if summary["reward"] is None else f"{summary['reward']:g}")
            assert cells[7:9] == [str(summary["turns"]), f"{summary['sampled_tokens']:,}"]
        parts = page.get_by_role("tree", name="Tokens of the group").get_by_role("treeitem")
        expect(parts).to_have_count(len(group["nodes"]))
    watched.check_quiet()


@both_schemes
def test_a_group_and_two_of_its_rollouts_are_read_by_all(watched: Watched, door: Door, api: httpx.Client) -> None:
    members = api.get("/groups/claude-code-2").json()["members"]
    page = watched.open("/groups/claude-code-2", door.key)
    page.get_by_role("treeitem").nth(1).click()
    expect(page.locator(".ways > .chosen")).to_be_visible()
    watched.check()
    first, second = (member["summary"] for member in members[:2])
    page = watched.open(f"/compare/{first['episode_id']}/{second['episode_id']}", door.key)
    row = page.get_by_role("region", name="Table: Facts").get_by_role("row").filter(has_text="Sampled tokens")
    expect(row.get_by_role("cell").nth(0)).to_have_text(f"{first['sampled_tokens']:,}")
    expect(row.get_by_role("cell").nth(1)).to_have_text(f"{second['sampled_tokens']:,}")
    expect(page.get_by_role("alert")).to_have_count(0)
    watched.check()


@pytest.mark.thorough
def test_the_pictures_of_the_documentation_can_be_taken(browser: Browser, door: Door, tmp_path: Path) -> None:
    for picture in PICTURES_TAKEN:
        if picture.scheme == "light":
            take(browser, door.url, door.key, picture, tmp_path)
    kept = {file.name: file.stat().st_size for file in PICTURES.iterdir()}
    assert {file.name for file in tmp_path.iterdir()} < set(kept)
    assert set(kept) == {f"viewer-{picture.name}.png" for picture in PICTURES_TAKEN}
    assert max(kept.values()) < 200_000
