"""The page of a sample's tokens, in a real browser against a real server."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from playwright.sync_api import expect

from control_support import KEYS, START_S, Door, EngineProcess, running_door
from turnstile_server.journal import FileJournal, turn_of, turn_record
from turnstile_server.journal.protocol import RecordType
from turnstile_server.settings import JournalSettings
from ui.conftest import HOSTILE, Watched
from ui.recorded import client_of

pytestmark = pytest.mark.browser

Window = dict[str, Any]


def play_call(api: httpx.Client, door: Door, said: str) -> Window:
    """An episode of one call, and its tokens as the API has them: the first window."""
    made = api.post("/episodes", json={"task": {"instruction": "say"}}).json()["episode_id"]
    answer = httpx.post(
        f"{door.agent_url}/e/{made}/v1/chat/completions",
        headers={"authorization": f"Bearer {KEYS.given[made]}"},
        json={"model": "m", "max_tokens": 6, "messages": [{"role": "user", "content": said}]},
        timeout=START_S,
    )
    assert answer.status_code == 200, answer.text
    turn_id = api.get(f"/episodes/{made}/turns", params={"arrays": False}).json()["turns"][0]["turn_id"]
    window: Window = api.get(f"/turns/{turn_id}/tokens").json()
    return window


def path_of(window: Window) -> str:
    return f"/episodes/{window['episode_id']}/tokens/{window['turn_id']}"


@pytest.mark.parametrize("watched", ["light", "dark"], indirect=True)
def test_tokens_are_the_apis_in_every_colour(watched: Watched, door: Door, api: httpx.Client) -> None:
    window = play_call(api, door, f"Grüße 🦉\n{HOSTILE}")
    page = watched.open(path_of(window), door.key)
    tokens = page.get_by_role("listbox", name="Tokens").get_by_role("option")
    expect(tokens).to_have_count(window["total"])
    assert page.locator(".token-lines .token-special").count() == sum(window["special"])
    assert page.locator(".token-lines .token-2").count() == sum(window["loss_mask"]) > 0
    shown = "".join(tokens.all_text_contents()).replace("⋯", "")
    assert "Grüße·🦉↵" in shown
    assert "<script>document.title='taken'</script>" in shown
    assert "\\u202e" in shown
    assert page.locator("main script, main img").count() == 0
    for colour, known in (
        ("logprob", sum(value is not None for value in window["logprobs"])),
        ("version", sum(value is not None for value in window["weight_version"])),
        ("turn", window["total"]),
    ):
        page.get_by_label("Colour by").select_option(colour)
        expect(page.locator(".token-lines [class*='token-none']")).to_have_count(window["total"] - known)
        assert f"colour={colour}" in page.url
    watched.check()


def test_a_token_is_found_and_its_address_opens_it(watched: Watched, door: Door, api: httpx.Client) -> None:
    window = play_call(api, door, "look\n" * 4_000 + "needle 🦉 and needle")
    assert window["total"] > len(window["ids"])  # more than one window
    turn = f"/turns/{window['turn_id']}/tokens"
    matches = api.get(f"{turn}/find", params={"text": "needle"}).json()["matches"]
    page = watched.open(path_of(window), door.key)
    expect(page.get_by_role("listbox", name="Tokens")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("needle")
    page.keyboard.press("Enter")
    found = page.get_by_role("status", name="Found")
    expect(found).to_have_text(f"1 of {len(matches)} found")
    page.get_by_role("button", name="Next", exact=True).click()
    expect(found).to_have_text(f"2 of {len(matches)} found")
    at = matches[1]["start"]
    assert re.search(rf"[?&]at={at}\b", page.url)
    page.reload()
    selected = page.locator(".token-lines [aria-selected=true]")
    expect(selected).to_be_in_viewport()
    assert selected.get_attribute("data-at") == str(at)
    token = api.get(turn, params={"start": at, "count": 1}).json()
    detail = page.get_by_role("complementary", name="Token")
    expect(detail).to_contain_text(str(token["ids"][0]))
    expect(detail).to_contain_text(" ".join(re.findall("..", token["bytes"][0])))
    page.get_by_role("listbox", name="Tokens").focus()
    page.keyboard.press("End")
    expect(selected).to_have_attribute("data-at", str(window["total"] - 1))
    expect(selected).to_be_in_viewport()
    watched.check()


def test_the_page_opens_at_what_is_trained_and_leads_from_turn_to_turn(
    watched: Watched, door: Door, api: httpx.Client
) -> None:
    made = api.post("/episodes", json={"task": {"instruction": "say"}}).json()["episode_id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "look\n" * 2_000}]
    for number in range(3):
        answer = httpx.post(
            f"{door.agent_url}/e/{made}/v1/chat/completions",
            headers={"authorization": f"Bearer {KEYS.given[made]}"},
            json={"model": "m", "max_tokens": 6, "messages": messages},
            timeout=START_S,
        )
        assert answer.status_code == 200, answer.text
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"and {number}?\n" * 900}]
    turn_id = api.get(f"/episodes/{made}/turns", params={"arrays": False}).json()["turns"][-1]["turn_id"]
    window: Window = api.get(f"/turns/{turn_id}/tokens").json()
    turns = window["turns"]
    assert [turn["trained"] for turn in turns] == [True] * 3
    assert turns[0]["start"] > len(window["ids"]) // 2
    page = watched.open(path_of(window), door.key)
    selected = page.locator(".token-lines [aria-selected=true]")
    expect(selected).to_have_attribute("data-at", str(turns[0]["start"]))
    expect(selected).to_be_in_viewport()
    assert "at=" not in page.url, "the address says nothing that was not chosen"
    part = page.get_by_role("region", name="Trained", exact=True)
    tokens = sum(turn["trained_tokens"] for turn in turns)
    expect(part).to_contain_text(f"{tokens} of {window['total']:,} tokens trained")
    expect(part).to_contain_text("in 3 of 3 turns")
    spans = ", ".join(f"{turn['start']} to {turn['end']}" for turn in turns)
    strip = part.get_by_role("img", name=f"The mask: {spans}")
    assert strip.locator(".trained").count() == 3
    back, on = (part.get_by_role("button", name=f"{name} trained") for name in ("Previous", "Next"))
    expect(back).to_be_disabled()
    for turn in turns[1:]:
        on.click()
        expect(selected).to_have_attribute("data-at", str(turn["start"]))
        expect(selected).to_be_in_viewport()
    expect(on).to_be_disabled()
    back.click()
    expect(selected).to_have_attribute("data-at", str(turns[1]["start"]))
    assert page.url.endswith(f"?at={turns[1]['start']}")
    watched.check()
    strip.click(position={"x": 1, "y": 5})
    assert int(selected.get_attribute("data-at") or "-1") < turns[0]["start"]
    page.goto(f"{door.url}/ui{path_of(window)}?at=0")
    expect(selected).to_have_attribute("data-at", "0")
    expect(selected).to_be_in_viewport()


def test_an_audit_colours_turns_by_their_largest_distance(watched: Watched, door: Door, api: httpx.Client) -> None:
    window = play_call(api, door, "audit me")
    page = watched.open(f"{path_of(window)}?colour=audit", door.key)
    tokens = page.locator(".token-lines [role=option]")
    expect(page.locator(".token-lines .token-none")).to_have_count(window["total"])
    page.get_by_role("button", name="Audit this episode").click()
    expect(page.get_by_text(re.compile("(Passed|Failed); largest distance"))).to_be_visible()
    report = api.post(f"/episodes/{window['episode_id']}/audit").json()
    known = sum(value is not None for value in window["logprobs"]) if report["max_abs_delta"] is not None else 0
    expect(page.locator(".token-lines .token-none")).to_have_count(window["total"] - known)
    expect(tokens).to_have_count(window["total"])
    watched.check()


TURNS = 200


async def lengthen(source: Path, target: Path, episode_id: str) -> str:
    """Copies an episode of one turn as one of TURNS turns in a line, with 600 tokens each; the last one's id."""
    read = await FileJournal.open(source, JournalSettings())
    records = await read.read(episode_id)
    await read.close()
    [first] = [turn_of(record) for record in records if record.type is RecordType.TURN]
    made = [first]
    for number in range(1, TURNS):
        turn = first.model_copy(
            update={"turn_id": f"turn_{number:032x}", "parent_id": made[-1].turn_id, "seq": number}
        )
        made.append(turn)
    journal = await FileJournal.open(target, JournalSettings())
    for record in records:
        if record.type is RecordType.TURN:
            for turn in made:
                ids = np.resize(first.context_ids, 600)
                await journal.append(turn_record(turn.model_copy(update={"context_ids": ids})))
        else:
            await journal.append(record)
    await journal.close()
    return made[-1].turn_id


def say(figure: str) -> None:
    sys.stdout.write(f"{figure}\n")


@pytest.mark.thorough
def test_a_hundred_thousand_tokens(watched: Watched, engine: EngineProcess, tmp_path: Path) -> None:
    """Prints how long the page takes to open and how many frames a second it scrolls with."""
    with running_door(engine, tmp_path / "short") as door, client_of(door) as api:
        made = play_call(api, door, "look 🦉 at this line of words\n" * 50)["episode_id"]
        assert api.post(f"/episodes/{made}/finish").status_code == 200
    with start_blocking_portal() as portal:
        last = portal.call(lengthen, tmp_path / "short" / "journal", tmp_path / "long" / "journal", made)
    with running_door(engine, tmp_path / "long") as door, client_of(door) as api:
        window = api.get(f"/turns/{last}/tokens", params={"episode_id": made}).json()
        assert window["total"] > 100_000
        say(f"\n{window['total']} tokens, {len(window['turns'])} turns")
        page = watched.page
        page.goto(f"{door.url}/ui/episodes#key={door.key}")
        expect(page.get_by_role("grid", name="Episodes")).to_be_visible()
        for query in ("", f"?at={window['total'] // 2}"):
            page.goto(f"{door.url}/ui{path_of(window)}{query}", wait_until="commit")
            page.wait_for_selector(".token-lines .token-at" if query else ".token-lines [role=option]")
            say(f"opened {query or 'at its beginning'} in {page.evaluate('performance.now()'):.0f} ms")
        for step in (30, 300):
            frames = page.evaluate(SCROLL, step)
            gaps = sorted(b - a for a, b in pairwise(frames))
            rate = 1000 * len(gaps) / (frames[-1] - frames[0])
            say(f"{step} pixels a frame: {rate:.1f} frames/s; 99 of 100 in {gaps[int(len(gaps) * 0.99)]:.1f} ms")
        assert page.locator(".token-lines [role=option]").count() < 2_000
        page.get_by_role("listbox", name="Tokens").focus()
        page.keyboard.press("End")
        expect(page.locator(".token-lines [aria-selected=true]")).to_have_attribute(
            "data-at", str(window["total"] - 1)
        )


SCROLL = """(step) => new Promise((done) => {
    const box = document.querySelector('.token-lines');
    box.scrollTop = 0;
    const times = [];
    const next = (now) => {
        times.push(now);
        box.scrollTop += step;
        if (times.length < 300) requestAnimationFrame(next);
        else done(times);
    };
    requestAnimationFrame(next);
})"""
