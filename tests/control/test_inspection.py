"""Tokens, turns without tokens, and breaks, of a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from control_support import KEYS, Door, OpenDoor
from turnstile.models import BreakReport, Episode, TokenMatches, TokenWindow, Turn, TurnOutlines
from turnstile.models.samples_encoding import decode_samples
from turnstile_server.rendering.vocabulary import load_vocabulary
from waiting import wait_until

pytestmark = pytest.mark.anyio


async def chat(door: Door, episode_id: str, *messages: tuple[str, str], **fields: Any) -> str:
    """A model call of the episode's agent, and the text that it got."""
    body = {"model": "m", "max_tokens": 6, "messages": [{"role": r, "content": c} for r, c in messages], **fields}
    headers = {"authorization": f"Bearer {KEYS.given[episode_id]}"}
    async with httpx.AsyncClient(timeout=60, headers=headers) as agent:
        answer = await agent.post(f"{door.agent_url}/e/{episode_id}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def play_episode(door: Door, http: httpx.AsyncClient) -> str:
    """An episode of three calls: one goes on, one edits what was said."""
    created = await http.post("/episodes", json={"task": {"instruction": "say hello"}})
    episode_id = str(created.json()["episode_id"])
    said = await chat(door, episode_id, ("user", "Grüße 🦉"))
    await chat(door, episode_id, ("user", "Grüße 🦉"), ("assistant", said), ("user", "and then?"))
    await chat(door, episode_id, ("user", "Grüße 🦉"), ("assistant", f"{said} edited"), ("user", "and then?"))
    return episode_id


async def turns_of(http: httpx.AsyncClient, episode_id: str) -> list[Turn]:
    return [
        Turn.model_validate(turn) for turn in (await http.get(f"/episodes/{episode_id}/turns")).json()["turns"]
    ]


async def window(http: httpx.AsyncClient, turn_id: str, **asked: Any) -> TokenWindow:
    response = await http.get(f"/turns/{turn_id}/tokens", params=asked)
    assert response.status_code == 200, response.text
    return TokenWindow.model_validate_json(response.content)


async def find(http: httpx.AsyncClient, turn_id: str, **asked: Any) -> TokenMatches:
    response = await http.get(f"/turns/{turn_id}/tokens/find", params=asked)
    assert response.status_code == 200, response.text
    return TokenMatches.model_validate_json(response.content)


@pytest.fixture(params=["running", "ended"])
async def episode_id(request: pytest.FixtureRequest, door: Door, http: httpx.AsyncClient) -> AsyncIterator[str]:
    made = await play_episode(door, http)
    if request.param == "ended":
        await http.post(f"/episodes/{made}/finish")
    yield made
    await http.delete(f"/episodes/{made}")


async def test_a_window_shows_the_exact_tokens_of_the_sample(
    http: httpx.AsyncClient, episode_id: str, tiny_model: Path
) -> None:
    rows = decode_samples((await http.get(f"/episodes/{episode_id}/samples")).content).samples
    turns = {turn.turn_id: turn for turn in await turns_of(http, episode_id)}
    tokenizer = load_vocabulary(tiny_model).tokenizer
    for row in rows:
        leaf = row.turn_spans[-1].turn_id
        shown = await window(http, leaf)
        assert (shown.episode_id, shown.turn_id, shown.sample_id) == (episode_id, leaf, row.sample_id)
        assert list(shown.ids) == row.input_ids.tolist()
        assert list(shown.loss_mask) == row.loss_mask.tolist()
        assert shown.total == len(shown.ids)
        data = b"".join(map(bytes.fromhex, shown.bytes))
        assert data.decode(errors="replace") == tokenizer.decode(list(shown.ids), skip_special_tokens=False)
        assert "Grüße 🦉" in data.decode(errors="replace")
        assert "<|im_start|>" in {text for text, special in zip(shown.text, shown.special, strict=True) if special}
        for place in shown.turns:
            assert list(shown.logprobs[place.start : place.end]) == turns[place.turn_id].logprobs.tolist()
            assert set(shown.logprobs[place.context_start : place.start]) == {None}
        parts = [await window(http, leaf, start=at, count=7) for at in range(0, shown.total + 7, 7)]
        assert [index for part in parts for index in part.ids] == list(shown.ids)
        assert parts[-1].ids == ()
        assert {part.turns for part in parts} == {shown.turns}


async def test_a_turn_is_found_with_and_without_its_episode(http: httpx.AsyncClient, episode_id: str) -> None:
    turn = (await turns_of(http, episode_id))[1]
    shown = await window(http, turn.turn_id)
    assert shown == await window(http, turn.turn_id, episode_id=episode_id)
    for path in (
        f"/turns/turn_{'0' * 32}/tokens",
        f"/turns/{turn.turn_id}/tokens?episode_id=ep_x",
        "/turns/x/tokens",
    ):
        assert (await http.get(path)).status_code == 404


async def test_text_and_ids_are_found_in_the_tokens(http: httpx.AsyncClient, episode_id: str) -> None:
    turn_id = (await turns_of(http, episode_id))[1].turn_id
    shown = await window(http, turn_id)
    found = await find(http, turn_id, text="🦉")
    [match] = found.matches
    assert "🦉" in b"".join(map(bytes.fromhex, shown.bytes[match.start : match.end])).decode(errors="replace")
    starts = [at for at, text in enumerate(shown.text) if text == "<|im_start|>"]
    by_id = await find(http, turn_id, id=shown.ids[starts[0]])
    assert ([match.start for match in by_id.matches], by_id.more) == (starts, False)
    first = await find(http, turn_id, text="<|im_start|>", limit=1)
    assert ([match.start for match in first.matches], first.more) == (starts[:1], True)
    rest = await find(http, turn_id, text="<|im_start|>", after=starts[0])
    assert [match.start for match in rest.matches] == starts[1:]
    assert (await find(http, turn_id, text="nowhere to be found")).matches == ()
    for query in ("", "?text=", "?text=a&id=1"):
        assert (await http.get(f"/turns/{turn_id}/tokens/find{query}")).status_code == 400


async def test_turns_without_arrays_have_their_counts(http: httpx.AsyncClient, episode_id: str) -> None:
    turns = await turns_of(http, episode_id)
    response = await http.get(f"/episodes/{episode_id}/turns?arrays=false")
    report = TurnOutlines.model_validate_json(response.content)
    outlines = report.turns
    arrays = {"context_ids", "completion_ids", "logprobs", "routed_experts"}
    counts = {"context_tokens", "completion_tokens", "mean_logprob", "start", "untrained_reason"}
    for turn, outline in zip(turns, outlines, strict=True):
        assert outline.model_dump(exclude=counts) == turn.model_dump(exclude=arrays)
        assert (outline.context_tokens, outline.completion_tokens) == (
            len(turn.context_ids),
            len(turn.completion_ids),
        )
        assert outline.mean_logprob == pytest.approx(float(turn.logprobs.mean()))
        place = (await window(http, turn.turn_id, count=0)).turns[-1]
        assert (outline.turn_id, outline.start) == (place.turn_id, place.start)
    rows = decode_samples((await http.get(f"/episodes/{episode_id}/samples")).content)
    trained = {span.turn_id for row in rows.samples for span in row.turn_spans if span.trained}
    untrained = {one.turn_id: one.reason for one in rows.untrained if one.turn_id not in trained}
    assert {turn.turn_id: turn.untrained_reason for turn in outlines} == {
        turn.turn_id: untrained.get(turn.turn_id) for turn in outlines
    }
    assert [root.turn_id for root in report.roots] == [turn.turn_id for turn in outlines if turn.parent_id is None]
    assert {root.kind for root in report.roots} == {row.kind for row in rows.samples} == {"main"}


async def test_a_break_is_shown_with_both_messages(http: httpx.AsyncClient, episode_id: str) -> None:
    report = BreakReport.model_validate_json((await http.get(f"/episodes/{episode_id}/breaks")).content)
    [entry] = report.breaks
    assert (report.total, report.offset, entry.reason) == (1, 0, "reply_edited")
    assert entry.known is not None
    assert entry.incoming is not None
    assert entry.incoming.content == f"{entry.known.content} edited"
    assert (await http.get(f"/episodes/{episode_id}/breaks?offset=1")).json()["breaks"] == []
    assert (await http.get("/episodes/ep_x/breaks")).status_code == 404


@pytest.mark.slow
async def test_bounds_of_windows_are_settings(open_door: OpenDoor) -> None:
    bounds = {"window_tokens": 5, "found_tokens": 2, "shown_breaks": 1}
    with open_door(control=bounds) as door:
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
            episode_id = await play_episode(door, http)
            turn_id = (await turns_of(http, episode_id))[1].turn_id
            assert len((await window(http, turn_id)).ids) == 5
            assert len((await find(http, turn_id, text="<|im_start|>")).matches) == 2
            for path in (f"turns/{turn_id}/tokens?count=6", f"turns/{turn_id}/tokens/find?text=a&limit=3"):
                assert (await http.get(f"/{path}")).status_code == 422
            assert (await http.get(f"/episodes/{episode_id}/breaks?limit=2")).status_code == 422


@pytest.mark.slow
async def test_a_turn_on_the_disk_is_found_by_its_time(open_door: OpenDoor) -> None:
    """Of several ended episodes whose trees are not in memory; not where none may be read."""
    for searched, status in ((64, 200), (0, 404)):
        with open_door(episodes={"cached_trees": 1, "searched_episodes": searched}) as door:
            async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=60) as http:
                created = [await http.post("/episodes", json={"task": {"instruction": "a"}}) for _ in range(3)]
                ids = [str(one.json()["episode_id"]) for one in created]
                turn_ids = [await anyio.to_thread.run_sync(door.add_turn, each) for each in ids]
                for each in ids:
                    await http.post(f"/episodes/{each}/finish")
                answer = await http.get(f"/turns/{turn_ids[0]}/tokens")
                assert answer.status_code == status
                if status == 200:
                    assert answer.json()["episode_id"] == ids[0]
                else:
                    assert "episode_id=" in answer.text
                    assert (await window(http, turn_ids[0], episode_id=ids[0])).episode_id == ids[0]


async def test_a_look_is_no_fetch_of_a_trainer(
    monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient, episode_id: str
) -> None:
    ended = Episode.model_validate_json((await http.post(f"/episodes/{episode_id}/finish")).content)
    seen: list[str] = []
    monkeypatch.setattr("turnstile_server.episodes.archive.Archive.fetched", lambda _, each: seen.append(each))
    turn_id = (await http.get(f"/episodes/{ended.episode_id}/turns?arrays=false")).json()["turns"][0]["turn_id"]
    await window(http, turn_id)
    await http.get(f"/episodes/{ended.episode_id}/breaks")
    assert seen == []
    await http.get(f"/episodes/{ended.episode_id}/turns")
    await wait_until(lambda: seen)  # it is noted once the answer is sent: the caller may have it before
    assert seen == [ended.episode_id], "a look that was noted late would be here too"


@pytest.mark.slow
async def test_the_types_of_the_answers_are_in_openapi(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    names = {"TokenWindow", "WindowTurn", "TokenMatches", "TurnOutlines", "TurnList", "BreakReport", "BreakEntry"}
    assert names <= set(described["components"]["schemas"])
