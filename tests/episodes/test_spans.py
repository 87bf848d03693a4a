"""``GET /episodes/{id}/spans`` of real servers: played, refused, killed, bounded, judged again, deleted."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import httpx2
import pytest
from conversation import END, auth, body, url
from gate_support import Stage, fails, says, staged, until_aborted
from light import SOLVE, TASK, light_work
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from test_restart import child

from bounded import bounded_settings
from turnstile.models import EpisodeRequest, Span, SpanKind, SpanReport, TaskRef, seconds_by_part
from turnstile_server.errors import EngineUnavailable
from turnstile_server.settings import Settings
from turnstile_server.testing.policy import PolicyInput, Step
from turnstile_server.testing.server import scripted_server
from waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

T = SpanKind
INLINE: dict[str, Any] = {"instruction": "t"}


async def spans_of(control: httpx.AsyncClient, episode_id: str) -> SpanReport:
    answer = await control.get(f"/episodes/{episode_id}/spans")
    assert answer.status_code == 200, answer.text
    report = SpanReport.model_validate_json(answer.content)
    known = {span.span_id for span in report.spans}
    assert len(known) == len(report.spans)
    assert {span.parent_id for span in report.spans} <= known | {None}
    starts = [span.start_s for span in report.spans]
    assert starts == sorted(starts)
    assert all(span.end_s is None or span.end_s >= span.start_s >= 0 for span in report.spans)
    return report


def of_kind(report: SpanReport, *kinds: SpanKind) -> list[Span]:
    return [span for span in report.spans if span.kind in kinds]


def below(report: SpanReport, parent: Span) -> list[tuple[SpanKind, str]]:
    return [(span.kind, span.name) for span in report.spans if span.parent_id == parent.span_id]


@asynccontextmanager
async def tools_of(created: dict[str, Any]) -> AsyncIterator[Client]:
    headers = {"authorization": f"Bearer {created['episode_key']}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=30) as http,
        Client(streamable_http_client(created["tool_url"], http_client=http)) as client,
    ):
        yield client


def solving(call: PolicyInput) -> Step:
    if call.calls_made == 0:
        return Step(text="I look.", tool="read_file", arguments={"path": "nowhere.py"})
    if call.calls_made == 1:
        return Step(
            text="I write.", tool="write_file", arguments={"path": "answer.py", "content": "ANSWER = 42\n"}
        )
    return Step(text="Done.")


async def test_a_played_episode_says_where_its_time_went() -> None:
    async with scripted_server(Settings(sandboxes={"kind": "local"}), solving) as server:
        played = await server.play("tool-loop", TaskRef.model_validate(TASK))
        assert (played.episode.reward, played.tool_calls) == (1.0, 2), played.episode.error
        report = await spans_of(server.control, played.episode.episode_id)
    assert (report.started_at, report.dropped) == (played.episode.timings.created_at, 0)
    (queue,), (setup,), (agent,), (grading,) = (
        of_kind(report, kind) for kind in (T.QUEUE, T.SETUP, T.AGENT, T.GRADING)
    )
    assert queue.start_s == 0
    assert below(report, setup) == [
        (T.SANDBOX, "install"),
        (T.SANDBOX, "image"),
        (T.SANDBOX, "create"),
        (T.FILES, "task"),
        (T.SANDBOX, "check"),
    ]
    made = next(span for span in report.spans if span.name == "create")
    assert (made.attributes["backend"], made.attributes["warm"]) == ("local", False)
    assert (agent.name, agent.attributes["exit_code"]) == ("tool-loop", 0)
    assert [kind for kind, _ in below(report, agent)] == [T.MODEL, T.TOOL, T.MODEL, T.TOOL, T.MODEL]
    calls = of_kind(report, T.MODEL)
    assert [span.turn_id for span in calls] == [turn.turn_id for turn in played.turns]
    for span in calls:
        assert [kind for kind, _ in below(report, span)][-1] is T.COMMIT
    missed, written = of_kind(report, T.TOOL)
    assert (missed.name, missed.ok, missed.error, missed.turn_id) == (
        "read_file",
        False,
        "tool_error",
        played.turns[0].turn_id,
    )
    assert (written.name, written.ok, written.turn_id) == ("write_file", True, played.turns[1].turn_id)
    assert written.attributes["bytes_in"] == len(b'{"path":"answer.py","content":"ANSWER = 42\\n"}')
    assert not any("ANSWER" in str(span.attributes) for span in report.spans)
    judged = below(report, grading)
    assert judged == [(T.FILES, "collect"), (T.FILES, "keep"), (T.GRADER, "tests")]
    (grader,) = (span for span in report.spans if span.name == "tests")
    assert grader.attributes == {"value": 1.0}
    (attempt,) = (span for span in report.spans if span.name == "attempt 1")
    assert below(report, grader) == [(T.GRADING_QUEUE, ""), (T.GRADER, "attempt 1")]
    assert below(report, attempt) == [
        (T.SANDBOX, "create"),
        (T.FILES, "task"),
        (T.FILES, "diff"),
        (T.GRADER, "judge"),
        (T.SANDBOX, "remove"),
    ]
    parts = seconds_by_part(report.spans)
    assert played.episode.seconds == parts
    assert min(parts.setup, parts.agent, parts.model, parts.tools, parts.grading) > 0
    assert sum(parts.model_dump().values()) <= (played.episode.timings.ended_s or 0)


@pytest.fixture
async def stage(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tiny_model, tmp_path) as found:
        found.engine.answers = [says([*found.encode("hm"), *found.encode(END)])]
        yield found


async def call(stage: Stage, episode: dict[str, Any], text: str = "hi", **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(headers=auth(episode), timeout=30) as client:
        return await client.post(url(episode), json=body(messages=[{"role": "user", "content": text}], **fields))


async def test_an_episode_that_cannot_be_prepared_says_what_failed(tiny_model: Path, tmp_path: Path) -> None:
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs")
    async with staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage:
        created = await stage.episode(task={**TASK, "setup": ["echo no; exit 3"]}, agent="light")

        async def failed() -> bool:
            return bool((await stage.get(created))["status"] == "failed")

        await wait_until(failed)
        report = await spans_of(stage.control, created["episode_id"])
    wrong = [(span.kind, span.name, span.error) for span in report.spans if not span.ok]
    assert wrong == [(T.SETUP, "", "task_failed"), (T.FILES, "task", "task_failed")]
    assert not of_kind(report, T.AGENT, T.MODEL, T.GRADING)
    assert [span.name for span in report.spans][-1] == "remove"


async def test_calls_that_were_refused_or_failed_are_there(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_turns": 2})
    assert (await call(stage, episode, "x " * 100_000)).status_code == 400
    stage.engine.answers = [fails(EngineUnavailable("the engine is gone"))]
    failed = await call(stage, episode)
    assert failed.status_code == 503
    stage.engine.answers = [fails(EngineUnavailable("gone"), stage.encode("half a reply"))]
    cut = await call(stage, episode, stream=True)
    assert (cut.status_code, "error" in cut.text) == (200, True)
    running = await spans_of(stage.control, episode["episode_id"])
    (agent,) = of_kind(running, T.AGENT)
    assert (agent.name, agent.end_s) == ("external", None)
    too_long, gone, interrupted = of_kind(running, T.MODEL)
    assert (too_long.error, too_long.attributes, too_long.name) == (
        "context_length_exceeded",
        {"status": 400},
        "chat",
    )
    assert (gone.error, gone.attributes["status"]) == ("engine_unavailable", 503)
    (turn,) = (await stage.get(episode, "/turns"))["turns"]
    assert (interrupted.span_id, interrupted.error) == (turn["turn_id"], "engine_unavailable")
    assert {span.parent_id for span in (too_long, gone, interrupted)} == {agent.span_id}
    await stage.post(episode, "finish")
    ended = await spans_of(stage.control, episode["episode_id"])
    assert [span.span_id for span in of_kind(ended, T.MODEL)] == [
        span.span_id for span in of_kind(running, T.MODEL)
    ]
    (agent,) = of_kind(ended, T.AGENT)
    assert (agent.ok, agent.end_s is None) == (True, False)
    assert len(of_kind(ended, T.DRAIN)) == 1


async def test_a_caller_that_leaves_is_no_turn_and_is_recorded(stage: Stage) -> None:
    reached = anyio.Event()

    async def begun() -> None:
        reached.set()

    stage.engine.answers = [until_aborted(then=begun)]
    episode = await stage.episode()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, stage, episode)
        await reached.wait()
        (goes_on,) = of_kind(await spans_of(stage.control, episode["episode_id"]), T.MODEL)
        assert (goes_on.end_s, goes_on.ok) == (None, True)
        tasks.cancel_scope.cancel()
    await stage.post(episode, "cancel")
    (left,) = of_kind(await spans_of(stage.control, episode["episode_id"]), T.MODEL)
    assert (left.error, left.attributes["status"], left.turn_id) == ("caller_gone", 499, goes_on.turn_id)


async def test_a_running_tool_call_is_there_and_ends_with_its_episode(tiny_model: Path, tmp_path: Path) -> None:
    wanted = {"sandboxes": {"kind": "local"}}
    async with scripted_server(bounded_settings(**wanted), lambda call: Step(text="Done.")) as server:
        created = await server.create(EpisodeRequest(task=TaskRef.model_validate(TASK), agent="external"))
        episode_id = created.episode_id

        async def runs() -> bool:
            return bool((await server.control.get(f"/episodes/{episode_id}")).json()["status"] == "running")

        await wait_until(runs)

        async def work() -> None:
            with suppress(ExceptionGroup):  # its episode ends
                async with tools_of(created.model_dump()) as client:
                    await client.call_tool("bash", {"command": "touch begun; sleep 60"})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)

            async def tool_spans() -> list[Any]:
                return of_kind(await spans_of(server.control, episode_id), T.TOOL)

            (goes_on,) = await wait_until(tool_spans)
            assert (goes_on.name, goes_on.end_s) == ("bash", None)
            await server.control.post(f"/episodes/{episode_id}/cancel")
            tasks.cancel_scope.cancel()
        (ended,) = of_kind(await spans_of(server.control, episode_id), T.TOOL)
        assert (ended.span_id, ended.ok, ended.end_s is None) == (goes_on.span_id, False, False)


async def test_beyond_the_bound_calls_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, episodes={"max_spans": 2}) as stage:
        episode = await stage.episode()
        async with tools_of(episode) as client:
            for number in range(5):
                await client.call_tool("submit", {"answer": str(number)})
        before = await spans_of(stage.control, episode["episode_id"])
        await stage.post(episode, "finish")
        after = await spans_of(stage.control, episode["episode_id"])
    for report in (before, after):
        assert (len(of_kind(report, T.TOOL)), report.dropped) == (2, 3)
    assert len(of_kind(after, T.AGENT)) == 1
    async with staged(tiny_model, tmp_path) as stage:
        assert await spans_of(stage.control, episode["episode_id"]) == after


async def test_what_a_killed_server_had_stored_is_there(tiny_model: Path, tmp_path: Path) -> None:
    async with child(tiny_model, tmp_path, 1) as (process, control):
        async with httpx.AsyncClient(base_url=control, timeout=30) as client:
            episode = (await client.post("/episodes", json={"task": INLINE})).json()
            async with tools_of(episode) as tools:
                await tools.call_tool("submit", {"answer": "42"})
                await tools.call_tool("no_such_tool", {})
            async with httpx.AsyncClient(headers=auth(episode), timeout=30) as agent:
                assert (await agent.post(url(episode), content=b"{")).status_code == 400
                # Its turn is durable before the reply, and with it all that was recorded before.
                assert (await agent.post(url(episode), json=body())).status_code == 200
            running = await spans_of(client, episode["episode_id"])
            assert [span.kind for span in running.spans if span.end_s is None] == [T.AGENT]
        process.kill()
        await process.wait()
    async with staged(tiny_model, tmp_path) as stage:
        assert (await stage.get(episode))["error"]["type"] == "server_restarted"
        stored = await spans_of(stage.control, episode["episode_id"])
    lost = {T.AGENT, T.COMMIT}  # it went on; the time of a commit comes with the delivery of its reply
    known = [(span.span_id, span.end_s) for span in running.spans if span.kind not in {*lost, T.MODEL}]
    assert [(span.span_id, span.end_s) for span in stored.spans if span.kind not in {*lost, T.MODEL}] == known
    assert Counter(span.kind for span in known_kinds(running)) == Counter(
        span.kind for span in known_kinds(stored)
    )
    assert {span.parent_id for span in of_kind(stored, T.TOOL)} == {None}, "the agent's own span is lost"


def known_kinds(report: SpanReport) -> list[Span]:
    return of_kind(report, T.MODEL, T.TOOL, T.RENDER, T.DECODE)


async def test_a_forks_spans_are_its_own_and_go_with_it(stage: Stage) -> None:
    episode = await stage.episode()
    assert (await call(stage, episode)).status_code == 200
    turn_id = (await stage.get(episode, "/turns"))["turns"][0]["turn_id"]
    path = f"/episodes/{episode['episode_id']}/fork"
    (forked,) = (await stage.control.post(path, json={"turn_id": turn_id})).json()["episodes"]
    assert (await call(stage, forked, "other")).status_code == 200
    mine = await spans_of(stage.control, forked["episode_id"])
    theirs = await spans_of(stage.control, episode["episode_id"])
    assert len(of_kind(mine, T.MODEL)) == len(of_kind(theirs, T.MODEL)) == 1
    assert not {span.span_id for span in mine.spans} & {span.span_id for span in theirs.spans}
    assert (await stage.control.delete(f"/episodes/{forked['episode_id']}")).status_code == 204
    assert (await stage.control.get(f"/episodes/{forked['episode_id']}/spans")).status_code == 404
    assert await stage.journal.read(forked["episode_id"]) == []
    assert await spans_of(stage.control, episode["episode_id"]) == theirs


async def test_a_regrade_adds_its_spans(tiny_model: Path, tmp_path: Path) -> None:
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs")
    async with staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        created = await stage.episode(task=TASK, agent="light", env={"WORK": SOLVE})

        async def ended() -> bool:
            return (await stage.get(created))["timings"]["ended_s"] is not None

        await wait_until(ended)
        before = await spans_of(stage.control, created["episode_id"])
        path = f"/episodes/{created['episode_id']}/regrade"
        assert (await stage.control.post(path, json={"regrade_id": "r1"})).status_code == 200
        after = await spans_of(stage.control, created["episode_id"])
    added = [span for span in after.spans if span not in before.spans]
    first, *others = added
    assert (first.kind, first.attributes) == (T.GRADING, {"regrade_id": "r1"})
    assert [span.name for span in others] == [
        "tests",
        "",
        "attempt 1",
        "create",
        "task",
        "diff",
        "judge",
        "remove",
    ]
    assert seconds_by_part(after.spans) == seconds_by_part(before.spans)
