"""The page of an episode, in a real browser against a real server: what is shown is what the API says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from control_support import KEYS, START_S, Door, EngineProcess, running_door
from turnstile.models import FileChange, LeftOut, WorkDiff
from ui.conftest import HOSTILE, Watched
from ui.recorded import SPANS, client_of, recorded, with_branches

pytestmark = pytest.mark.browser

both_schemes = pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
GRADING = {
    "diff": {
        "added": ["notes.md"],
        "changed": ["calculator.py"],
        "deleted": [],
        "left_out": [["conftest.py", "pytest would load it"], [f"odd{HOSTILE}", "a link that leaves the folder"]],
        "counts": {"added": 1, "changed": 1, "deleted": 0, "left_out": 2},
    },
    "tests": {
        "trust": "boundary",
        "expected": 5,
        "passed": 3,
        "exit_code": 1,
        "failed": [
            {"id": "test_add", "status": "failed", "message": f"AssertionError: 3 != 4\n{HOSTILE}"},
            {"id": "test_sub", "status": "error", "message": "ZeroDivisionError"},
        ],
        "slowest": [["test_add", 0.25]],
        "output": "collected 5 items\nE  assert 3 == 4",
    },
    "style": {"judge": "small", "votes": [{"value": 0.5, "reply": "It reads well.", "tokens": 40}]},
    "of_somebody": {"shape": {"not": "known"}, "note": "free"},
    "summary": ["test_add failed: AssertionError: 3 != 4", "conftest.py is left out: pytest would load it"],
}
RECORD = {
    "reward": 0.25,
    "reward_components": {"tests": 0.0, "style": 0.5},
    "grading": GRADING,
    "turn_rewards": {f"turn_{1:032x}": 0.75},
    "group_id": "g-of-page",
    "run_id": "run-of-page",
}


@pytest.fixture(scope="module")
def episode(engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Door, str]]:
    folder = tmp_path_factory.mktemp("recorded")
    episode_id = recorded(engine, folder, with_branches, SPANS, **RECORD)
    with running_door(engine, folder / "long") as door:
        yield door, episode_id


def shown(watched: Watched, episode: tuple[Door, str], query: str = "") -> Page:
    door, episode_id = episode
    watched.url = door.url
    page = watched.open(f"/episodes/{episode_id}{query}", door.key)
    expect(page.get_by_role("heading", level=1)).to_have_text(episode_id)
    return page


def outlines(episode: tuple[Door, str]) -> dict[str, Any]:
    with client_of(episode[0]) as api:
        found: dict[str, Any] = api.get(f"/episodes/{episode[1]}/turns", params={"arrays": False}).json()
        return found


def article(page: Page, seq: int) -> Locator:
    return page.get_by_role("article", name=f"Turn {seq}", exact=True)


@both_schemes
def test_results_of_tools_stand_at_their_calls_and_turns_say_why_they_are_not_trained(
    watched: Watched, episode: tuple[Door, str]
) -> None:
    page = shown(watched, episode)
    turns = outlines(episode)["turns"]
    assert 1 <= sum(turn["untrained_reason"] is not None for turn in turns) < len(turns)
    expect(page.get_by_role("article")).to_have_count(len(turns))
    for turn in turns:
        head = article(page, turn["seq"])
        reason = turn["untrained_reason"]
        expect(head.get_by_text("not trained: ")).to_have_count(0 if reason is None else 1)
        if reason is not None:
            expect(head).to_contain_text(f"not trained: {reason.replace('_', ' ')}")
        link = head.get_by_role("link", name="Tokens")
        at = f"/ui/episodes/{episode[1]}/tokens/{turn['turn_id']}?at={turn['start']}"
        expect(link).to_have_attribute("href", at)
    first, second = article(page, 0), article(page, 1)
    first.locator("summary", has_text="Result").click()
    expect(first).to_contain_text("file-200.py")
    expect(second).not_to_contain_text("file-200.py")
    expect(article(page, 2)).to_contain_text("nothing here")
    watched.check()


def test_paths_are_the_branches_of_the_api_and_in_the_address(watched: Watched, episode: tuple[Door, str]) -> None:
    page = shown(watched, episode)
    report = outlines(episode)
    paths = page.get_by_role("navigation", name="Paths").get_by_role("link")
    parents = [turn["parent_id"] for turn in report["turns"]]
    roots = parents.count(None)
    branches = sum(parents.count(parent) - 1 for parent in set(parents) - {None})
    expect(paths).to_have_count(1 + roots + branches)
    assert [root["kind"] for root in report["roots"]] == ["main", "subagent", "compaction"]
    expect(page.get_by_role("navigation", name="Paths")).to_contain_text("sub-agent explore")
    paths.filter(has_text="sub-agent").click()
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page).to_have_url(f"{watched.url}/ui/episodes/{episode[1]}?path=2")
    paths.filter(has_text="from turn 1").click()
    expect(page.get_by_role("article")).to_have_count(3)
    expect(article(page, 5)).to_contain_text("Really?")
    expect(article(page, 1)).to_contain_text("Result I saw nothing.")
    page.reload()
    expect(page.get_by_role("article")).to_have_count(3)
    lane = page.get_by_role("application", name="Time of the episode")
    said_of = page.locator(".swim-said")
    lane.focus()
    page.keyboard.press("Home")
    for _ in range(40):
        if "of model call of turn 3" in (said_of.text_content() or ""):
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")  # a turn of another path: all turns are shown again
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 3")
    expect(page).to_have_url(f"{watched.url}/ui/episodes/{episode[1]}?turn=3")
    watched.check()


def test_a_turn_and_its_spans_choose_each_other(watched: Watched, episode: tuple[Door, str]) -> None:
    page = shown(watched, episode, "?turn=3")
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 3")
    expect(article(page, 3)).to_be_in_viewport()
    with client_of(episode[0]) as api:
        spans = api.get(f"/episodes/{episode[1]}/spans").json()["spans"]
    call = next(span for span in spans if span["turn_id"] == f"turn_{3:032x}" and span["kind"] == "model")
    parts = sum(span["parent_id"] == call["span_id"] for span in spans)
    expect(page.locator(".span.selected")).to_have_count(parts or 1)
    agents = {span["span_id"] for span in spans if span["kind"] == "agent"}
    divided = {span["parent_id"] for span in spans} - agents
    parts_of_none = sum(span["span_id"] not in divided for span in spans)
    lane = page.get_by_role("application", name=f"Time of the episode: {parts_of_none} spans")
    expect(lane).to_be_visible()
    expect(page.locator(".timeline .span.failed")).to_have_count(sum(not span["ok"] for span in spans))
    page.keyboard.press("k")
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 2")
    lane.focus()
    page.keyboard.press("Home")
    for _ in spans:
        said = page.locator(".swim-said").text_content() or ""
        if said.startswith("bash (tool)"):
            break
        page.keyboard.press("ArrowRight")
    expect(page.locator(".swim-said")).to_contain_text("bytes out 4000")
    page.keyboard.press("Enter")
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 0")
    expect(page).to_have_url(f"{watched.url}/ui/episodes/{episode[1]}?turn=0")
    watched.check()


def test_a_text_is_found_in_the_conversation(watched: Watched, episode: tuple[Door, str]) -> None:
    page = shown(watched, episode)
    expect(article(page, 0)).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("summary")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status", name="Found")).to_have_text("1 of 2 turns")
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 4")
    page.keyboard.press("Enter")
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 6")
    watched.check()


@both_schemes
def test_the_grade_has_the_evidence_of_each_grader(watched: Watched, episode: tuple[Door, str]) -> None:
    page = shown(watched, episode, "?show=grade")
    with client_of(episode[0]) as api:
        record = api.get(f"/episodes/{episode[1]}").json()
    expect(page.get_by_text(record["why"])).to_be_visible()
    for name, value in record["reward_components"].items():
        expect(page.get_by_role("definition").filter(has_text=f"{value:g}").first).to_be_visible()
        expect(page.get_by_text(f"Part: {name}")).to_be_visible()
    tests = page.get_by_role("region", name="Grader tests")
    failed = record["grading"]["tests"]["failed"]
    expect(tests.get_by_role("region", name="Failed tests").get_by_role("listitem")).to_have_count(len(failed))
    for one in failed:
        expect(tests).to_contain_text(one["id"])
        expect(tests).to_contain_text(one["message"].splitlines()[0])
    expect(tests).to_contain_text("E  assert 3 == 4")
    taken = page.get_by_role("region", name="Work given to the graders")
    for path, why in record["grading"]["diff"]["left_out"]:
        expect(taken).to_contain_text(why)
        expect(taken).to_contain_text(path[:6])
    expect(page.get_by_role("region", name="Grader style")).to_contain_text("It reads well.")
    expect(page.get_by_role("region", name="Grader of_somebody")).to_contain_text("free")
    expect(page.get_by_role("link", name="turn 1", exact=True)).to_be_visible()
    assert page.locator("main script, main img").count() == 0
    watched.check()


@both_schemes
def test_breaks_show_what_was_known_and_what_came(watched: Watched, door: Door, api: httpx.Client) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "say"}}).json()["episode_id"]
    user = {"role": "user", "content": f"one\n{HOSTILE}"}
    reply = reply_text(door, made, [user])
    edited = {"role": "assistant", "content": f"{reply} edited {HOSTILE}{'x' * 3000}"}
    reply_text(door, made, [user, edited, {"role": "user", "content": "go on"}])
    report = api.get(f"/episodes/{made}/breaks").json()
    assert report["total"] >= 1
    page = watched.open(f"/episodes/{made}?show=breaks", door.key)
    entries = page.get_by_role("article")
    expect(entries).to_have_count(report["total"])
    for entry, box in zip(report["breaks"], entries.all(), strict=True):
        expect(box).to_contain_text(entry["reason"].replace("_", " "))
        expect(box.get_by_role("link", name=f"Turn {entry['seq']}")).to_be_visible()
    both = [entry for entry in report["breaks"] if entry["known"] and entry["incoming"]]
    expect(page.get_by_role("region", name="from what was known")).to_have_count(len(both))
    assert len(page.locator("main").text_content() or "") < 30_000
    watched.check()


def test_a_fork_leads_to_the_turn_that_it_continues(watched: Watched, door: Door, api: httpx.Client) -> None:
    origin = api.post("/episodes", json={"task": {"instruction": "say"}, "group_id": "g-forks"}).json()[
        "episode_id"
    ]
    user = {"role": "user", "content": "one"}
    reply = reply_text(door, origin, [user])
    turn = api.get(f"/episodes/{origin}/turns", params={"arrays": False}).json()["turns"][0]["turn_id"]
    forked = api.post(f"/episodes/{origin}/fork", json={"turn_id": turn})
    assert forked.status_code == 201, forked.text
    made = forked.json()["episodes"][0]["episode_id"]
    reply_text(door, made, [user, {"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}])
    page = watched.open(f"/episodes/{made}", door.key)
    expect(page.get_by_role("article")).to_have_count(1)
    expect(page.get_by_role("article")).to_contain_text("continues a turn of another episode")
    page.get_by_text("Compare with another rollout").click()
    siblings = api.get("/episodes", params={"view": "summary", "group_id": "g-forks"}).json()["summaries"]
    expect(page.locator(".siblings a")).to_have_count(len(siblings) - 1)
    expect(page.locator(".siblings a")).to_have_attribute("href", f"/ui/compare/{made}/{origin}")
    watched.check()
    page.get_by_role("link", name=f"{origin}, after a turn").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(origin)
    expect(page.locator("article.chosen")).to_have_attribute("aria-label", "Turn 0")
    watched.check()


def reply_text(door: Door, episode_id: str, messages: list[dict[str, str]]) -> str:
    """A model call of the episode's agent, and the text that it got."""
    answer = httpx.post(
        f"{door.agent_url}/e/{episode_id}/v1/chat/completions",
        headers={"authorization": f"Bearer {KEYS.given[episode_id]}"},
        json={"model": "m", "max_tokens": 4, "messages": messages},
        timeout=START_S,
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_an_episode_that_runs_grows_without_moving_or_closing(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "say"}}).json()["episode_id"]
    reply_text(door, made, [{"role": "user", "content": "line\n" * 900}])
    page = watched.open(f"/episodes/{made}", door.key)
    fold = article(page, 0).locator("details").first
    fold.locator("summary").click()
    end = fold.get_by_role("button", name="Show all")
    end.scroll_into_view_if_needed()
    assert page.evaluate("scrollY") > 0
    before = end.bounding_box()
    assert before is not None
    for call in range(3):
        reply_text(door, made, [{"role": "user", "content": f"call {call}"}])
    expect(page.get_by_role("article")).to_have_count(4, timeout=30_000)
    expect(page.get_by_role("link", name="Conversation (4)")).to_have_count(1)
    expect(fold).to_have_attribute("open", "")
    assert api.post(f"/episodes/{made}/finish").status_code == 200
    expect(page.locator(".facts .badge", has_text="completed")).to_have_count(1, timeout=30_000)
    after = end.bounding_box()
    assert after is not None
    assert after["y"] == pytest.approx(before["y"], abs=2)
    watched.check()


WORK = WorkDiff(
    episode_id="e",
    files=(
        FileChange(
            path="calculator.py",
            change="modified",
            mode_before="100644",
            mode_after="100755",
            size_before=10,
            size_after=12,
            binary=False,
            diff=f"--- a/calculator.py\n+++ b/calculator.py\n@@ -1 +1 @@\n-return a\n+return a + b {HOSTILE}\n",
        ),
        FileChange(
            path=f"conftest{HOSTILE}.py",
            change="added",
            mode_before=None,
            mode_after="100644",
            size_before=None,
            size_after=5_000_000,
            binary=False,
            diff=None,
            omitted="it has more than 4000000 bytes",
            left_out="pytest would load it",
        ),
        FileChange(
            path="logo.png",
            change="deleted",
            mode_before="100644",
            mode_after=None,
            size_before=7,
            size_after=None,
            binary=True,
            diff=None,
        ),
    ),
    further=3,
    left_out=(LeftOut(path="pipe", reason="a named pipe"),),
)


@both_schemes
def test_the_work_is_shown_file_by_file_with_what_was_left_out(
    watched: Watched, episode: tuple[Door, str]
) -> None:
    page = shown(watched, episode, "?show=work")
    page.route("**/work", lambda route: route.fulfill(json=WORK.model_dump(mode="json")))
    page.get_by_role("button", name="Compare the work").click()
    expect(page.get_by_text("6 files changed, of which 3 are not listed.")).to_be_visible()
    main = page.locator("main")
    for text in (
        "return a + b",
        "Mode 100644 → 100755",
        "pytest would load it",
        "it has more than",
        "A binary file.",
    ):
        expect(main).to_contain_text(text)
    expect(main).to_contain_text("pipe: a named pipe")
    assert page.locator("main script, main img").count() == 0
    watched.check()


def test_where_there_is_no_work_to_compare_words_say_so(
    watched: Watched, door: Door, api: httpx.Client, episode: tuple[Door, str]
) -> None:
    page = shown(watched, episode, "?show=work")
    page.get_by_role("button", name="Compare the work").click()
    expect(page.get_by_text("No work of this episode is kept.")).to_be_visible()
    made = api.post("/episodes", json={"task": {"instruction": "say"}}).json()["episode_id"]
    watched.url = door.url
    watched.open(f"/episodes/{made}?show=work", door.key)
    page.get_by_role("button", name="Compare the work").click()
    expect(page.get_by_text("when the episode has ended")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    watched.check(expected="status of 4")  # the browser reports each, some of them later than the page does
