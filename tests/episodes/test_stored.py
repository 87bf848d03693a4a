"""What comes back from a journal that lost some of its records."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversation import GO, body, raw, reply_ids, url
from gate_support import Stage, says, staged

from turnstile_server.engines.protocol import EngineState
from turnstile_server.episodes.store import rebuild
from turnstile_server.journal.protocol import Record, RecordType

pytestmark = pytest.mark.anyio


async def recorded(stage: Stage) -> list[Record]:
    """The records of two conversations: of two turns, and of one."""
    stage.engine.answers = [says(reply_ids(stage, text)) for text in ("one", "two", "alone")]
    episode = await stage.episode()
    going_on = [*GO, {"role": "assistant", "content": "one"}, {"role": "user", "content": "on"}]
    async with raw(episode) as client:
        for messages in (GO, going_on, [{"role": "user", "content": "another"}]):
            assert (await client.post(url(episode), json=body(messages=messages))).status_code == 200
    await stage.post(episode, "finish")
    return await stage.journal.read(episode["episode_id"])


async def test_all_records_make_the_whole_tree(stage: Stage) -> None:
    tree = rebuild(await recorded(stage)).tree
    assert [node.turn.reply.content for node in tree] == ["one", "two", "alone"]
    assert [node.delivery for node in tree] == ["written"] * 3


async def test_turns_whose_parent_is_lost_are_left_out_and_the_others_stay(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    records = await recorded(stage)
    first = next(index for index, record in enumerate(records) if record.type is RecordType.TURN)
    tree = rebuild(records[:first] + records[first + 1 :]).tree
    assert [node.turn.reply.content for node in tree] == ["alone"]
    assert "its parent" in caplog.text


async def test_a_turn_that_is_recorded_twice_is_in_the_tree_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    records = await recorded(stage)
    tree = rebuild(records + records).tree
    assert [node.turn.reply.content for node in tree] == ["one", "two", "alone"]
    assert "is recorded twice" in caplog.text


@pytest.mark.slow
async def test_a_full_disk_does_not_keep_a_restarted_server_from_showing_what_it_has(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
    async with staged(tiny_model, tmp_path, journal={"min_free_bytes": 1 << 60}) as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        assert len((await stage.get(episode, "/turns"))["turns"]) == 1
    assert "could not be stored" in caplog.text


@pytest.mark.slow
async def test_an_episode_of_another_version_is_shown_as_unreadable_and_the_others_stay(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        kept = await stage.episode()
        await stage.journal.append(Record(RecordType.EPISODE, "ep_other", {"shape": "of another day"}))
    async with staged(tiny_model, tmp_path) as stage:
        listed = (await stage.control.get("/episodes")).json()["episodes"]
    assert [episode["episode_id"] for episode in listed] == ["ep_other", kept["episode_id"]]
    assert listed[0]["error"]["type"] == "record_unreadable"
    assert "the record of episode ep_other cannot be read" in caplog.text


async def test_an_audit_without_an_answering_engine_is_an_error_not_a_pass(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = await stage.episode()
    async with stage.agent(episode) as agent:
        await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])

    async def dead() -> EngineState:
        return EngineState(ok=False, weight_version=None, paused=None, detail="it died")

    monkeypatch.setattr(stage.engine, "state", dead)
    answer = await stage.control.post(f"/episodes/{episode['episode_id']}/audit")
    assert answer.status_code == 503
    assert "it died" in answer.json()["error"]["message"]
