"""A group's page, and two of its rollouts compared: what is shown is what the API says."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from control_support import Door
from ui.conftest import HOSTILE_GROUP, Watched

pytestmark = pytest.mark.browser

both_schemes = pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
REWARDS = (0.0, 1.0, 0.5)


@pytest.fixture(scope="module")
def group(api: httpx.Client, door: Door) -> dict[str, Any]:
    """Four rollouts with the same first call; three are graded, one still runs. The first has a second call."""
    for number in range(len(REWARDS) + 1):
        body = {"task": {"instruction": "Count.", "reward": {"late": True}}, "group_id": "g-shown"}
        made = api.post("/episodes", json=body)
        assert made.status_code == 201, made.text
        episode_id = made.json()["episode_id"]
        door.add_turn(episode_id)
        if number == 0:
            door.add_turn(episode_id)
        if number < len(REWARDS):
            assert api.post(f"/episodes/{episode_id}/finish").status_code == 200
            given = {"key": "k", "reward": REWARDS[number]}
            assert api.post(f"/episodes/{episode_id}/reward", json=given).status_code == 200
    return report(api)


def report(api: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = api.get("/groups/g-shown").json()
    return found


@both_schemes
def test_rollouts_stand_beside_each_other_with_rewards_and_advantages(
    watched: Watched, door: Door, group: dict[str, Any]
) -> None:
    page = watched.open("/groups/g-shown", door.key)
    rows = page.get_by_role("region", name="Table: Rollouts").get_by_role("row")
    expect(rows).to_have_count(1 + len(group["members"]))
    for index, member in enumerate(group["members"]):
        row = rows.nth(index + 1)
        summary = member["summary"]
        expect(row).to_contain_text(summary["why"])
        expect(row.get_by_role("link").first).to_have_text(summary["episode_id"])
        cells = row.get_by_role("cell").all_text_contents()
        assert cells[2] == ("–" if summary["reward"] is None else f"{summary['reward']:g}")
        advantage = member["advantage"]
        assert cells[4] == ("–" if advantage is None else "0" if advantage == 0 else f"{advantage:+.0f}")
        links = row.get_by_role("link", name="tokens")
        expect(links).to_have_count(len(member["rows"]))
        for turn_id, link in zip(member["rows"], links.all(), strict=True):
            expect(link).to_have_attribute("href", f"/ui/episodes/{summary['episode_id']}/tokens/{turn_id}")
    expect(page.get_by_text("Mean reward")).to_be_visible()
    watched.check()


@both_schemes
def test_the_tree_draws_shared_tokens_once_and_shows_where_they_part(
    watched: Watched, door: Door, api: httpx.Client, group: dict[str, Any]
) -> None:
    page = watched.open("/groups/g-shown", door.key)
    parts = tree(page).get_by_role("treeitem")
    expect(parts).to_have_count(len(group["nodes"]))
    for node, part in zip(group["nodes"], parts.all(), strict=True):
        tokens = node["end"] - node["start"]
        label = part.get_attribute("aria-label") or ""
        assert label.startswith(f"{tokens:,} token")
        assert " ".join(f"#{member + 1}" for member in node["members"]) in label
        assert ("here ends" in label) == bool(node["ends"])
    root = next(index for index, node in enumerate(group["nodes"]) if len(node["members"]) > 1)
    child = next(index for index, node in enumerate(group["nodes"]) if node["parent"] == root)
    parts.nth(root).click()
    page.keyboard.press("ArrowRight")
    expect(parts.nth(child)).to_be_focused()
    expect(page).to_have_url(f"{door.url}/ui/groups/g-shown?node={child}")
    beside = [node for node in group["nodes"] if node["parent"] == root]
    ways = page.locator(".ways > li")
    expect(ways).to_have_count(min(8, len(beside)))
    node = group["nodes"][child]
    member = group["members"][node["members"][0]]["summary"]["episode_id"]
    asked = {"start": max(0, node["start"] - 60), "count": 60, "episode_id": member}
    window = api.get(f"/turns/{node['turn_id']}/tokens", params=asked).json()
    before = bytes.fromhex("".join(window["bytes"][: node["start"] - window["start"]])).decode(errors="replace")
    expect(page.locator(".ways > .chosen .shared")).to_contain_text(before.strip().splitlines()[-1])
    watched.check()
    page.reload()
    expect(page.get_by_role("treeitem", selected=True)).to_have_count(1)
    page.get_by_role("treeitem", selected=True).focus()
    page.keyboard.press("ArrowLeft")
    expect(parts.nth(root)).to_be_focused()


def test_a_group_is_shown_as_its_rollouts_end_and_the_chosen_part_stays(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    made = []
    for _ in range(2):
        body = {"task": {"instruction": "Count.", "reward": {"late": True}}, "group_id": "g-live"}
        made.append(api.post("/episodes", json=body).json()["episode_id"])
    door.add_turn(made[1])
    page = watched.open("/groups/g-live", door.key)
    expect(tree(page).get_by_role("treeitem")).to_have_count(1)
    tree(page).get_by_role("treeitem").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    door.add_turn(made[0])
    door.add_turn(made[1])  # a part of its own, beside or behind the one that is chosen
    for episode_id, reward in zip(made, (0.0, 1.0), strict=True):
        assert api.post(f"/episodes/{episode_id}/finish").status_code == 200
        given = {"key": "k", "reward": reward}
        assert api.post(f"/episodes/{episode_id}/reward", json=given).status_code == 200
    expect(page.get_by_text("Changes are shown as they come.")).to_have_count(0)
    rows = page.get_by_role("region", name="Table: Rollouts").get_by_role("row")
    expect(rows.nth(2)).to_contain_text("+0.707")
    shown = api.get("/groups/g-live").json()
    expect(tree(page).get_by_role("treeitem")).to_have_count(len(shown["nodes"]))
    chosen = page.get_by_role("treeitem", selected=True)
    expect(chosen).to_have_count(1)
    node = shown["nodes"][int(chosen.get_attribute("data-node") or -1)]
    assert node["start"] == 0
    assert 1 in node["members"]
    watched.check()


@both_schemes
def test_the_list_of_groups_is_the_apis_and_leads_to_each(
    watched: Watched, door: Door, api: httpx.Client, group: dict[str, Any]
) -> None:
    for reward in (1.0, 1.0):
        body = {
            "task": {"instruction": "Same.", "reward": {"late": True}},
            "group_id": "g-same",
            "run_id": "listed",
        }
        episode_id = api.post("/episodes", json=body).json()["episode_id"]
        assert api.post(f"/episodes/{episode_id}/finish").status_code == 200
        assert api.post(f"/episodes/{episode_id}/reward", json={"key": "k", "reward": reward}).status_code == 200
    page = watched.open("/runs/listed", door.key)
    rewards = page.get_by_role("region", name="Rewards")
    rewards.locator("dl > div").filter(has_text="Groups without signal").get_by_role("link", name="1 / 1").click()
    expect(page).to_have_url(f"{door.url}/ui/groups?run_id=listed&sort=signal&order=asc")
    grid = page.get_by_role("grid", name="Groups")
    row = grid.get_by_role("row").filter(has_text="g-same")
    expect(row).to_contain_text("none")
    expect(row).to_contain_text("Same.")
    page.get_by_label("Run").fill("")
    page.get_by_label("Run").press("Enter")
    for title, sort in (("Signal", "signal"), ("Mean reward", "reward"), ("Deviation", "spread")):
        grid.get_by_role("columnheader", name=title).get_by_role("button").click()
        expect(page).to_have_url(re.compile(f"sort={sort}&order=(asc|desc)$"))
        order = "asc" if page.url.endswith("asc") else "desc"
        wanted = api.get("/groups", params={"sort": sort, "order": order}).json()
        expect(grid).to_have_attribute("aria-rowcount", str(wanted["total"] + 1))
        first = grid.get_by_role("row").nth(1).get_by_role("gridcell")
        expect(first.first).to_have_text(wanted["groups"][0]["group_id"])
        names = [each.get_by_role("gridcell").first.text_content() for each in grid.get_by_role("row").all()[1:]]
        assert names == [each["group_id"] for each in wanted["groups"]][: len(names)]
    watched.check()
    page.get_by_label("Signal").select_option("true")
    total = api.get("/groups", params={"signal": "true"}).json()["total"]
    expect(grid).to_have_attribute("aria-rowcount", str(total + 1))
    grid.get_by_role("link", name="g-shown").click()
    expect(page).to_have_url(f"{door.url}/ui/groups/g-shown")
    page.go_back()
    expect(page.get_by_label("Signal")).to_have_value("true")


def test_a_group_with_hostile_text_does_no_harm(watched: Watched, door: Door, hostile: str) -> None:
    page = watched.open(f"/groups/{HOSTILE_GROUP}", door.key)
    page.get_by_role("treeitem").first.click()
    expect(page.locator(".ways")).to_contain_text("<script>document.title='taken'</script>")
    assert page.locator("main script, main img").count() == 0
    assert "taken" not in page.title()
    watched.check()


@both_schemes
def test_two_episodes_are_compared(watched: Watched, door: Door, api: httpx.Client, group: dict[str, Any]) -> None:
    first, second = (group["members"][index]["summary"]["episode_id"] for index in (0, 1))
    page = watched.open(f"/compare/{first}/{second}", door.key)
    facts = page.get_by_role("region", name="Table: Facts")
    expect(facts).to_be_visible()
    a, b = (api.get(f"/episodes/{each}").json() for each in (first, second))
    assert cells(facts, "Turns") == ["2", "1", "≠"]
    assert cells(facts, "Sampled tokens") == [str(each["stats"]["sampled_tokens"]) for each in (a, b)] + [
        "=" if a["stats"]["sampled_tokens"] == b["stats"]["sampled_tokens"] else "≠"
    ]
    assert cells(facts, "Why")[:2] == [a["why"], b["why"]]
    assert cells(page.get_by_role("region", name="Table: Rewards"), "Reward") == ["0", "1", "≠"]
    times = page.get_by_role("region", name="Table: Where the time went")
    for side, episode_id in enumerate((first, second)):
        spans = api.get(f"/episodes/{episode_id}/spans").json()["spans"]
        calls = sum(span["kind"] == "model" for span in spans)
        assert cells(times, "model")[side].endswith(f" in {calls}")
    turns = [
        api.get(f"/episodes/{each}/turns", params={"arrays": "false"}).json()["turns"] for each in (first, second)
    ]
    parting = page.get_by_role("region", name="Where they part")
    if turns[0][0]["reply"]["content"] == turns[1][0]["reply"]["content"]:
        expect(parting).to_contain_text("The first 1 turn have")
    else:
        expect(parting).to_contain_text("They differ from the first turn on.")
    watched.check()
    page.get_by_role("link", name="Change sides").click()
    expect(page).to_have_url(f"{door.url}/ui/compare/{second}/{first}")
    expect(facts.get_by_role("link").first).to_have_text(second)


def test_an_episode_equals_itself_and_a_missing_one_is_named(
    watched: Watched, door: Door, group: dict[str, Any]
) -> None:
    first = group["members"][0]["summary"]["episode_id"]
    page = watched.open(f"/compare/{first}/{first}", door.key)
    expect(page.get_by_role("region", name="Where they part")).to_contain_text(
        "All 2 turns have the same messages."
    )
    expect(page.get_by_text("≠")).to_have_count(0)
    watched.check()
    page = watched.open(f"/compare/{first}/none-such", door.key)
    expect(page.get_by_role("alert")).to_contain_text("none-such")
    page = watched.open("/groups/none-such", door.key)
    expect(page.get_by_role("alert")).to_contain_text("none-such")


def tree(page: Page) -> Locator:
    return page.get_by_role("tree", name="Tokens of the group")


def cells(table: Locator, name: str) -> list[str]:
    row = table.get_by_role("row").filter(has=table.page.get_by_role("rowheader", name=name, exact=True))
    return row.get_by_role("cell").all_text_contents()
