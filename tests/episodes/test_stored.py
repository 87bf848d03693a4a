"""What comes back from a journal that lost some of its records."""

from __future__ import annotations

import pytest
from conversation import GO, body, raw, reply_ids, url
from gate_support import Stage, says

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
