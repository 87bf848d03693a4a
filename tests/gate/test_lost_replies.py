"""What is trained of a call whose caller may not have the reply: every way in which a reply can go astray."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from conversation import (
    GO,
    Held,
    appends_held,
    auth,
    body,
    chunked,
    in_flight,
    raw,
    reply_ids,
    turns,
    turns_once,
    url,
)
from gate_support import Stage, says, staged

from turnstile_server.http.connections import Seat
from waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.anyio


async def exported(stage: Stage, episode: dict[str, Any]) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """The loss masks of all rows, and (reason, tokens) of what is untrained; checks that the account adds up."""
    found = await stage.get(episode, "/samples?include_untrained=true")
    stats = found["stats"]
    untrained = [(row["reason"], row["tokens"]) for row in found["untrained"]]
    assert stats["trained_tokens"] == sum(sum(row["loss_mask"]) for row in found["samples"])
    assert stats["sampled_tokens"] == stats["trained_tokens"] + sum(tokens for _, tokens in untrained)
    assert (await stage.get(episode))["stats"] == stats
    return [row["loss_mask"] for row in found["samples"]], untrained


async def hung_up_after(stage: Stage, episode: dict[str, Any], answer: Held, word: str) -> dict[str, Any]:
    """The turn of a streamed call whose caller goes after ``word``, while the turn is on its way to the disk."""
    answer.step()  # before the call: its status waits for the first chunk
    with appends_held(stage) as held:
        async with raw(episode) as client, client.stream("POST", url(episode), json=body(stream=True)) as reply:
            async for line in reply.aiter_lines():
                if word in line:
                    break
            answer.all()
            await held.reached.wait()
        await in_flight(stage, 0)
        held.release()
        [turn] = await turns_once(stage, episode)
    return turn


@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_reply_that_was_written_is_trained(stage: Stage, stream: bool) -> None:
    ids = reply_ids(stage, "all of it")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode()
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body(stream=stream))).status_code == 200
    [mask], untrained = await exported(stage, episode)
    assert (sum(mask), untrained) == (len(ids), [])
    await stage.post(episode, "finish")
    assert (await exported(stage, episode)) == ([mask], [])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
async def test_a_hang_up_before_the_reply_leaves_the_turn_untrained_until_a_retry_is_answered(
    stage: Stage, stream: bool
) -> None:
    ids = reply_ids(stage, "asked once")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode()
    with appends_held(stage) as held:
        async with raw(episode) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(url(episode), json=body(stream=stream)))
            await held.reached.wait()
            tasks.cancel_scope.cancel()
        await in_flight(stage, 0)
        held.release()
        await turns_once(stage, episode)
    masks, untrained = await exported(stage, episode)
    assert ([sum(mask) for mask in masks], untrained) == ([0], [("undelivered", len(ids))])
    async with raw(episode) as client:  # answered by replay
        assert (await client.post(url(episode), json=body(stream=stream))).status_code == 200
    assert len(stage.engine.calls) == 1
    masks, untrained = await exported(stage, episode)
    assert ([sum(mask) for mask in masks], untrained) == ([len(ids)], [])


async def test_a_stream_that_broke_halfway_behind_the_last_token_is_untrained(stage: Stage) -> None:
    ids = reply_ids(stage, "first words and then the rest")
    answer = Held(*chunked(ids, 2))
    stage.engine.answers = [answer]
    episode = await stage.episode()
    turn = await hung_up_after(stage, episode, answer, "first")
    assert turn["finish_reason"] == "stop"
    masks, untrained = await exported(stage, episode)
    assert ([sum(mask) for mask in masks], untrained) == ([0], [("undelivered", len(ids))])


async def test_an_agent_that_goes_on_from_the_whole_reply_has_got_it(stage: Stage) -> None:
    """It had every word of a stream and hung up before the end of it."""
    first, second = reply_ids(stage, "all the words"), reply_ids(stage, "more")
    answer = Held(*chunked(first, len(first) - 1))
    stage.engine.answers = [answer]
    episode = await stage.episode()
    await hung_up_after(stage, episode, answer, "words")
    assert (await exported(stage, episode))[1] == [("undelivered", len(first))]
    stage.engine.answers = [says(second)]
    said = [*GO, {"role": "assistant", "content": "all the words"}, {"role": "user", "content": "on"}]
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=body(messages=said))).status_code == 200
    [mask], untrained = await exported(stage, episode)
    assert (sum(mask), untrained) == (len(first) + len(second), [])


async def test_one_of_two_callers_is_enough(stage: Stage) -> None:
    ids = reply_ids(stage, "for one")
    answer = Held(ids)
    stage.engine.answers = [answer]
    episode = await stage.episode()
    async with raw(episode) as first, raw(episode) as second, anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as gone:
            gone.start_soon(lambda: first.post(url(episode), json=body()))
            await answer.called.wait()
            tasks.start_soon(
                lambda: second.post(url(episode), json=body(), headers={"x-stainless-retry-count": "1"})
            )
            await in_flight(stage, 2)
            gone.cancel_scope.cancel()
        answer.all()
        [turn] = await turns_once(stage, episode)
        await in_flight(stage, 0)
    assert turn["finish_reason"] == "stop"
    assert (await exported(stage, episode))[1] == []


async def test_a_reply_that_is_on_its_way_when_the_episode_finishes_is_waited_for_and_trained(
    stage: Stage, begun: list[Seat]
) -> None:
    ids = reply_ids(stage, "in time")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode()
    replies: list[httpx.Response] = []
    with appends_held(stage, behind=True) as held:
        async with raw(episode) as client, anyio.create_task_group() as tasks:

            async def ask() -> None:
                replies.append(await client.post(url(episode), json=body()))

            tasks.start_soon(ask)
            await held.reached.wait()
            begun.clear()
            tasks.start_soon(stage.post, episode, "finish")
            await wait_until(lambda: begun)
            await anyio.wait_all_tasks_blocked()
            held.release()
    assert [reply.status_code for reply in replies] == [200]
    [mask], untrained = await exported(stage, episode)
    assert (sum(mask), untrained) == (len(ids), [])


async def test_a_cancelled_episode_keeps_an_account_that_no_later_delivery_changes(
    stage: Stage, begun: list[Seat]
) -> None:
    ids = reply_ids(stage, "too late")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode()
    with appends_held(stage, behind=True) as held:
        async with raw(episode) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post(url(episode), json=body()))
            await held.reached.wait()
            begun.clear()
            tasks.start_soon(stage.post, episode, "cancel")
            await wait_until(lambda: begun)
            await anyio.wait_all_tasks_blocked()
            held.release()
    await in_flight(stage, 0)
    _, untrained = await exported(stage, episode)
    assert untrained in ([], [("delivery_unknown", len(ids))], [("undelivered", len(ids))])


async def test_after_a_crash_a_committed_turn_whose_reply_was_not_sent_is_untrained(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The data directory as ``kill -9`` leaves it: copied while the reply waits behind the durable turn."""
    async with staged(tiny_model, tmp_path / "one") as stage:
        first, second = reply_ids(stage, "acknowledged"), reply_ids(stage, "never sent")
        stage.engine.answers = [says(first), says(second)]
        episode = await stage.episode()
        said = [*GO, {"role": "assistant", "content": "acknowledged"}, {"role": "user", "content": "on"}]
        async with httpx.AsyncClient(headers=auth(episode), timeout=PATIENCE_S) as client:
            assert (await client.post(url(episode), json=body())).status_code == 200
            with appends_held(stage, behind=True) as held:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(lambda: client.post(url(episode), json=body(messages=said)))
                    await held.reached.wait()
                    shutil.copytree(tmp_path / "one", tmp_path / "two")
                    held.release()
    async with staged(tiny_model, tmp_path / "two") as stage:
        shown = await stage.get(episode)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        assert len(await turns(stage, episode)) == 2
        [mask], untrained = await exported(stage, episode)
        assert (sum(mask), untrained) == (len(first), [("delivery_unknown", len(second))])


async def test_after_a_crash_a_reply_that_was_recorded_as_written_is_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path / "one") as stage:
        ids = reply_ids(stage, "acknowledged")
        stage.engine.answers = [says(ids)]
        episode = await stage.episode()
        async with raw(episode) as client:
            assert (await client.post(url(episode), json=body())).status_code == 200
        await stage.journal.flush()
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    async with staged(tiny_model, tmp_path / "two") as stage:
        [mask], untrained = await exported(stage, episode)
        assert (sum(mask), untrained) == (len(ids), [])
