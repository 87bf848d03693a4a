"""Records that this version cannot read: they spoil no listing, say what is wrong, and can be deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gate_support import Stage, staged

from turnstile_server.journal.protocol import Record, RecordType

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def record_of(stage: Stage, episode: dict[str, Any]) -> dict[str, Any]:
    """The episode's last record, to be changed."""
    records = await stage.journal.read(episode["episode_id"])
    return dict(next(r.meta for r in reversed(records) if r.type is RecordType.EPISODE))


async def ids(stage: Stage, **query: Any) -> list[str]:
    response = await stage.control.get("/episodes", params=query)
    assert response.status_code == 200, response.text
    return [episode["episode_id"] for episode in response.json()["episodes"]]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


BAD: dict[str, dict[str, Any]] = {
    "ep_shape": {"shape": "of another day"},
    "ep_seed": {"seed": 2.5e60},
    "ep_sampling": {"sampling": {"top_k": 2**128}},
    "ep_attempt": {"attempt": "many"},
    "ep_status": {"status": "sleeping"},
    "ep_newer": {"schema_version": 9, "a_field_of_tomorrow": {"x": 1}},
    "ep_creation": {"creation": None},
    "ep_surrogate": {"metadata": {"text": "\ud800"}},
    "ep_deep": {"metadata": {"deep": nested(230)}},
    "ep_deeper": {"metadata": {"deep": nested(400)}},
}


async def test_unreadable_records_are_listed_as_failed_and_spoil_nothing(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        kept = await stage.episode(group_id="g")
        await stage.post(kept, "finish")
        whole = await record_of(stage, kept)
        for episode_id, fields in BAD.items():
            meta = fields if episode_id == "ep_shape" else {**whole, "episode_id": episode_id, **fields}
            await stage.journal.append(Record(RecordType.EPISODE, episode_id, meta))
    for _ in range(2):  # the second start finds what the first one left
        async with staged(tiny_model, tmp_path) as stage:
            assert await ids(stage) == [*list(BAD)[::-1], kept["episode_id"]]
            assert set(BAD) <= set(await ids(stage, status="failed"))
            assert "ep_seed" in await ids(stage, group_id="g")
            for episode_id in BAD:
                shown = await stage.get({"episode_id": episode_id})
                assert (shown["status"], shown["error"]["type"]) == ("failed", "record_unreadable")
                assert episode_id not in shown["error"]["message"] or shown["error"]["message"]
                assert (await stage.get({"episode_id": episode_id}, "/turns")) == {"turns": []}
            seed = (await stage.get({"episode_id": "ep_seed"}))["error"]["message"]
            assert "seed" in seed
            assert "delete" in seed.lower()
            assert (await stage.get(kept))["status"] == "completed"
            taken = await stage.control.post(
                "/episodes", json={"task": {"instruction": "t"}, "episode_id": "ep_seed"}
            )
            assert taken.status_code == 409
            assert (await stage.get(await stage.episode()))["status"] == "running"
        assert "ep_shape" in caplog.text
        async with staged(tiny_model, tmp_path) as stage:
            for episode in await ids(stage, status="failed"):
                if episode not in BAD:
                    await stage.control.delete(f"/episodes/{episode}")
    async with staged(tiny_model, tmp_path) as stage:
        for episode_id in BAD:
            assert (await stage.control.delete(f"/episodes/{episode_id}")).status_code == 204
            assert (await stage.control.get(f"/episodes/{episode_id}")).status_code == 404
        assert await ids(stage) == [kept["episode_id"]]
    async with staged(tiny_model, tmp_path) as stage:
        assert await ids(stage) == [kept["episode_id"]]


async def test_an_unreadable_record_keeps_the_turns_it_has(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
        await stage.post(episode, "finish")
        meta = {**await record_of(stage, episode), "seed": "many"}
        await stage.journal.append(Record(RecordType.EPISODE, episode["episode_id"], meta))
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.get(episode))["error"]["type"] == "record_unreadable"
        assert len((await stage.get(episode, "/turns"))["turns"]) == 1
        assert len((await stage.get(episode, "/samples"))["samples"]) == 1


async def test_a_turn_that_cannot_be_read_costs_itself_and_what_follows_it(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an episode that still ran when the server died: its end is made from the turns that can be read."""
    async with staged(tiny_model, tmp_path) as stage:
        episode = await stage.episode()
        async with stage.agent(episode) as agent:
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
        records = await stage.journal.read(episode["episode_id"])
        turn = next(record for record in records if record.type is RecordType.TURN)
        later = {"turn_id": "turn_later", "parent_id": "turn_odd", "seq": 2}
        for fields in ({"turn_id": "turn_odd", "seq": 1, "dialect": None}, later):
            await stage.journal.append(
                Record(RecordType.TURN, turn.episode_id, {**turn.meta, **fields}, turn.arrays)
            )
        await stage.journal.append(Record(RecordType.DELIVERY, turn.episode_id, {"turn_id": 7}))
        await stage.journal.append(Record(RecordType.DISCARD, turn.episode_id, {"reason": "x", "tokens": -1}))
    async with staged(tiny_model, tmp_path) as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        assert shown["stats"]["turns"] == 1
        assert len((await stage.get(episode, "/turns"))["turns"]) == 1
    assert "turn_odd" in caplog.text


async def test_damage_on_disk_is_told_by_the_episode_that_it_hit(tiny_model: Path, tmp_path: Path) -> None:
    """Its last state and its second turn are damaged: it is listed as that, with all that is whole."""
    small = {"segment_bytes": 1 << 16}
    async with staged(tiny_model, tmp_path, journal=small) as stage:
        kept, episode = await stage.episode(), await stage.episode(group_id="g")
        async with stage.agent(episode) as agent:
            said: list[Any] = [{"role": "user", "content": "one"}]
            for word in ("two", "three"):
                reply = await agent.chat.completions.create(model="m", messages=said)
                text = reply.choices[0].message.content
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": word}]
            await agent.chat.completions.create(model="m", messages=said)
        await stage.post(episode, "finish")
        turns = [turn["turn_id"] for turn in (await stage.get(episode, "/turns"))["turns"]]
        await stage.post(kept, "finish")
        await stage.episode(metadata={"pad": "x" * 60_000})  # so that the segment is closed
        await stage.episode(metadata={"pad": "x" * 60_000})
    [path, *_] = sorted((tmp_path / "journal").glob("segment-*.tsj"))
    assert path.with_suffix(".tsi").exists()
    data = bytearray(path.read_bytes())
    for needle in (f'"turn_id":"{turns[1]}"', f'"episode_id":"{episode["episode_id"]}"'):
        at = data.rindex(needle.encode()) if needle.startswith('"e') else data.index(needle.encode())
        data[at + 3] ^= 1
    path.write_bytes(data)
    async with staged(tiny_model, tmp_path, journal=small) as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("failed", "record_unreadable", None)
        assert f"{path} is damaged at byte" in shown["error"]["message"]
        assert shown["group_id"] == "g", "the record before it says so"
        assert (await stage.get(kept))["status"] == "completed"
        found = await stage.get(episode, "/samples")
        assert [turn["turn_id"] for turn in (await stage.get(episode, "/turns"))["turns"]] == turns[:1]
        assert (found["stats"]["turns"], found["stats"]["discarded"]) == (1, {"parent_lost": 3})
        assert (await stage.control.delete(f"/episodes/{episode['episode_id']}")).status_code == 204
        assert episode["episode_id"] not in await ids(stage)
