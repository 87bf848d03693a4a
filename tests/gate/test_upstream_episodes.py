"""Episodes whose calls a hosted model answers: every dialect, records, refusals, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
import httpx
import pytest
from pydantic import SecretStr

from hosted_model import KEY, MODEL, HostedModel, Reply, serving
from turnstile.models import (
    Episode,
    EpisodeCreated,
    EpisodeRequest,
    EpisodeStatus,
    Fault,
    ForkOrigin,
    Limits,
    TaskRef,
    Turn,
)
from turnstile_server.engines.upstream import engine as upstream_engine
from turnstile_server.episodes.fork_point import ForkPoint
from turnstile_server.episodes.plan import check_fork
from turnstile_server.errors import Conflict
from turnstile_server.settings import EngineSettings, Settings
from turnstile_server.testing.server import ScriptedServer, scripted_server

pytestmark = pytest.mark.anyio
Format = Literal["chat", "messages"]
END = {"chat": "stop", "messages": "end_turn"}
TOOL = {"name": "shell", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

TEXT, THOUGHT, ARGUMENTS = "One call.", "I think.", '{"command": "ls"}'


@asynccontextmanager
async def evaluating(model: HostedModel, **changes: Any) -> AsyncIterator[ScriptedServer]:
    """A server whose engine is ``model``. ``changes``: of the engine's settings."""
    async with serving(model):
        engine = EngineSettings(kind="upstream", url=model.url, api_key=SecretStr(KEY), **changes)
        settings = Settings(model=MODEL, engine=engine, sandboxes={"kind": "none"})  # type: ignore[arg-type]
        async with scripted_server(settings, None) as server:
            yield server


class Agent:
    """An external agent of one episode."""

    def __init__(self, created: EpisodeCreated, http: httpx.AsyncClient) -> None:
        self.episode_id = created.episode_id
        self._http = http
        self._url, self._key = created.model_url, created.episode_key

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        headers = {"authorization": f"Bearer {self._key}", "x-goog-api-key": self._key or ""}
        return await self._http.post(f"{self._url}{path}", json=body, headers=headers)

    async def chat(self, *messages: dict[str, Any], **more: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"model": "m", "messages": list(messages), **more})


@asynccontextmanager
async def agent_of(server: ScriptedServer, **request: Any) -> AsyncIterator[Agent]:
    created = await server.create(EpisodeRequest(task=TaskRef(instruction="do it"), **request))
    async with httpx.AsyncClient(timeout=60) as http:
        yield Agent(created, http)


async def turns_of(server: ScriptedServer, agent: Agent) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await server.control.get(f"/episodes/{agent.episode_id}/turns")).json()["turns"]
    return found


async def episode_of(server: ScriptedServer, agent: Agent) -> Episode:
    return Episode.model_validate_json((await server.control.get(f"/episodes/{agent.episode_id}")).content)


def _body(dialect: str, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """Path and body of a first call with a tool."""
    user = {"role": "user", "content": "list"}
    match dialect:
        case "chat":
            tools = [{"type": "function", "function": TOOL}]
            return "/v1/chat/completions", {"model": "m", "messages": [user], "tools": tools, "stream": stream}
        case "responses":
            tools = [{"type": "function", **TOOL}]
            return "/v1/responses", {"model": "m", "input": [user], "tools": tools, "stream": stream}
        case "anthropic":
            tools = [{"name": "shell", "description": "Runs.", "input_schema": TOOL["parameters"]}]
            body = {"model": "m", "max_tokens": 99, "messages": [user], "tools": tools, "stream": stream}
            return "/v1/messages", body
        case _:
            method = "streamGenerateContent?alt=sse" if stream else "generateContent"
            contents = [{"role": "user", "parts": [{"text": "list"}]}]
            return f"/v1beta/models/m:{method}", {
                "contents": contents,
                "tools": [{"functionDeclarations": [TOOL]}],
            }


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["chat", "messages"])
async def test_every_dialect_is_passed_on_and_recorded(format_: Format) -> None:
    calls = (("shell", ARGUMENTS),)
    model = HostedModel(format_, [Reply(TEXT, THOUGHT, calls, END[format_])])
    async with evaluating(model) as server:
        for dialect in ("chat", "responses", "anthropic", "gemini"):
            for stream in (False, True):
                async with agent_of(server) as agent:
                    answer = await agent.post(*_body(dialect, stream=stream))
                    assert answer.status_code == 200, answer.text
                    assert TEXT in answer.text or stream
                    turn = (await turns_of(server, agent))[0]
                assert turn["reply"]["content"] == TEXT
                assert turn["reply"]["reasoning"] == THOUGHT
                assert [(call["name"], call["arguments"]) for call in turn["reply"]["tool_calls"]] == list(calls)
                assert turn["dialect"] == dialect
                assert turn["context_ids"] == turn["completion_ids"] == turn["logprobs"] == []
                assert turn["upstream"] == {
                    "model": f"{MODEL}-2026",
                    "finish": END[format_],
                    "prompt_tokens": 20,
                    "completion_tokens": 7,
                    "cached_tokens": 5,
                }


@pytest.mark.slow
async def test_an_episode_is_recorded_and_has_nothing_to_train() -> None:
    called = Reply("", "", (("shell", ARGUMENTS),), "tool_calls")
    model = HostedModel("chat", [called, Reply("Done.", finish="stop")])
    async with evaluating(model) as server, agent_of(server) as agent:
        user = {"role": "user", "content": "list"}
        first = (await agent.chat(user)).json()
        said = first["choices"][0]["message"]
        assert first["usage"] | {"prompt_tokens_details": None} == {
            "prompt_tokens": 20,
            "completion_tokens": 7,
            "total_tokens": 27,
            "prompt_tokens_details": None,
        }
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "a.txt"}
        assert (await agent.chat(user, said, result)).json()["choices"][0]["message"]["content"] == "Done."
        one, two = await turns_of(server, agent)
        assert (one["parent_id"], two["parent_id"]) == (None, one["turn_id"])
        assert [message["role"] for message in two["new_messages"]] == ["tool"]
        # Ids of calls are ours to the agent, and the same to the server when it gives them back.
        sent = model.bodies[1]["messages"]
        assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == result["tool_call_id"]
        await server.control.post(f"/episodes/{agent.episode_id}/finish")
        episode = await server.wait_for_end(agent.episode_id)
        assert (episode.status, episode.upstream) == (EpisodeStatus.COMPLETED, MODEL)
        assert episode.stats.upstream == {"prompt_tokens": 40, "completion_tokens": 14, "cached_tokens": 10}
        assert (episode.stats.sampled_tokens, episode.stats.turns) == (0, 2)
        at = f"/episodes/{agent.episode_id}"
        for method, path in (("GET", "samples"), ("GET", "tree"), ("POST", "audit")):
            refused = await server.control.request(method, f"{at}/{path}")
            assert (refused.status_code, refused.json()["error"]["type"]) == (409, "not_trainable")
            assert MODEL in refused.json()["error"]["message"]
        trained = await server.control.post(f"{at}/trained", json={"step": 1})
        assert (trained.status_code, trained.json()["error"]["type"]) == (409, "not_trainable")
        outlines = (await server.control.get(f"{at}/turns", params={"arrays": "false"})).json()["turns"]
        assert [turn["mean_logprob"] for turn in outlines] == [None, None]
        spans = (await server.control.get(f"{at}/spans")).json()
        assert '"completion_tokens": 7' in json.dumps(spans)
        engine = (await server.control.get("/engine")).json()
        assert (engine["upstream"], engine["model_name"], engine["context_length"]) == (True, MODEL, 9_000)
        held = await server.control.post("/engine/pause", json={})
        assert held.status_code == 400


async def test_a_retry_is_replayed_and_calls_at_once_are_one() -> None:
    model = HostedModel("chat", [Reply("hello", finish="stop")], silent=True)
    async with evaluating(model) as server, agent_of(server) as agent:
        user = {"role": "user", "content": "hi"}
        replies: list[httpx.Response] = []

        async def ask() -> None:
            replies.append(await agent.chat(user))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await model.asked.wait()
            tasks.start_soon(ask)
            model.go_on.set()
        assert len({reply.json()["id"] for reply in replies}) == len(model.bodies)
        assert len(await turns_of(server, agent)) == len(model.bodies)


async def test_a_caller_that_goes_away_ends_the_call_and_keeps_what_it_saw() -> None:
    model = HostedModel("chat", [Reply("hello there, this is long", finish="stop")], pieces_held=True)
    async with evaluating(model) as server:
        async with agent_of(server) as agent:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
            url, headers = f"{agent._url}/v1/chat/completions", {"authorization": f"Bearer {agent._key}"}
            async with agent._http.stream("POST", url, json=body, headers=headers) as stream:
                async for line in stream.aiter_lines():
                    if "hell" in line:
                        break
            with anyio.fail_after(30):
                await model.left.wait()
        with anyio.fail_after(30):
            while not (turns := await turns_of(server, agent)):  # noqa: ASYNC110 - the gate tells nobody of a turn
                await anyio.sleep(0.02)
        turn = turns[0]
        assert turn["finish_reason"] == "abort"
        assert turn["reply"]["content"].startswith("hell")
        assert turn["upstream"] | {"model": ""} == {
            "model": "",
            "finish": None,
            "prompt_tokens": None,
            "completion_tokens": None,
            "cached_tokens": None,
        }
        assert (await episode_of(server, agent)).stats.upstream == {"uncounted": 1}


async def test_budgets_hold_by_the_servers_count() -> None:
    model = HostedModel("chat", [Reply("hello", finish="stop")])
    async with evaluating(model) as server:
        async with agent_of(server, limits=Limits(max_sampled_tokens=10, max_completion_tokens=8)) as agent:
            for number in range(2):
                assert (await agent.chat({"role": "user", "content": str(number)})).status_code == 200
            spent = await agent.chat({"role": "user", "content": "more"})
        assert (spent.status_code, model.bodies[0]["max_completion_tokens"]) == (400, 8)
        assert model.bodies[1]["max_completion_tokens"] == 3
        assert (await server.wait_for_end(agent.episode_id)).status is EpisodeStatus.TRUNCATED


@pytest.mark.slow
async def test_a_server_that_refuses_the_first_call_is_a_fault_of_the_setup() -> None:
    model = HostedModel("chat", [(400, "this model takes no tools")])
    async with evaluating(model) as server, agent_of(server) as agent:
        refused = await agent.chat({"role": "user", "content": "hi"})
        assert (refused.status_code, "takes no tools" in refused.text) == (400, True)
        episode = await server.wait_for_end(agent.episode_id)
        assert episode.error is not None
        assert (episode.reward, episode.error.fault) == (None, Fault.SETUP)


@pytest.mark.slow
async def test_an_outage_is_the_infrastructures_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_engine, "RETRIES", 0)
    hello, again = Reply("hello", finish="end_turn"), Reply("again", finish="end_turn")
    model = HostedModel("messages", [hello, (529, "overloaded"), again])
    async with evaluating(model) as server, agent_of(server) as agent:
        user = {"role": "user", "content": "hi"}
        said = (await agent.chat(user)).json()["choices"][0]["message"]
        more = (user, said, {"role": "user", "content": "on"})
        down = await agent.chat(*more)
        assert (down.status_code, down.headers["x-should-retry"]) == (503, "true")
        assert (await server.control.get("/engine")).json()["ok"] is False
        assert (await agent.chat(*more)).json()["choices"][0]["message"]["content"] == "again"
        assert (await server.control.get("/engine")).json()["ok"] is True
        assert len(await turns_of(server, agent)) == 2


async def test_what_needs_tokens_is_refused_by_name() -> None:
    async with (
        evaluating(HostedModel("chat", [Reply("hello", finish="stop")])) as server,
        agent_of(server) as agent,
    ):
        user = {"role": "user", "content": "hi"}
        asked = await agent.chat(user, return_token_ids=True, logprobs=True)
        assert (asked.status_code, MODEL in asked.text) == (400, True)
        counted = await agent.post("/v1/messages/count_tokens", {"model": "m", "messages": [user]})
        assert (counted.status_code, "counts no tokens" in counted.text) == (400, True)
        adapter = EpisodeRequest(task=TaskRef(instruction="x"), adapter="lora")
        refused = await server.control.post("/episodes", json=adapter.model_dump(mode="json", exclude_unset=True))
        assert refused.status_code == 422


async def test_a_format_that_nothing_comes_of_in_time_is_no_outage() -> None:
    """By a schema that a server cannot compile an agent could have its episode end without a reward."""
    model = HostedModel("chat", [Reply("{}", finish="stop")], silent=True)
    async with evaluating(model, first_chunk_timeout_s=0.2) as server, agent_of(server) as agent:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
        late = await agent.chat({"role": "user", "content": "hi"}, response_format=schema)
        assert (late.status_code, "response_format" in late.text) == (504, True)
        assert "format_timeout" in late.text
        assert model.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.slow
async def test_what_another_model_was_fed_is_no_beginning_of_a_fork() -> None:
    """Its turns have no tokens, or those of another vocabulary."""
    model = HostedModel("chat", [Reply("hello", finish="stop")])
    async with evaluating(model) as server, agent_of(server) as agent:
        await agent.chat({"role": "user", "content": "hi"})
        [turn] = [Turn.model_validate(each) for each in await turns_of(server, agent)]
        forked = await server.control.post(f"/episodes/{agent.episode_id}/fork", json={"turn_id": turn.turn_id})
        assert forked.status_code == 201, forked.text  # under the same hosted model it goes on
    point = ForkPoint(ForkOrigin(episode_id=agent.episode_id, turn_id=turn.turn_id), (turn,), None)
    check_fork(point, turn.template_hash)
    check_fork(None, "another")
    with pytest.raises(Conflict, match="another model or chat template"):
        check_fork(point, "another")


async def test_pictures_are_no_part_of_an_evaluation() -> None:
    """The record of a hosted model is text, so it is shown text, and that is counted."""
    model = HostedModel(script=[Reply("I see none.", finish="stop")])
    async with evaluating(model) as server, agent_of(server) as agent:
        response = await agent.chat({"role": "user", "content": [{"type": "text", "text": "see "}, PICTURE]})
        assert response.status_code == 200
        [turn] = await turns_of(server, agent)
        assert turn["echo"] == ["image_omitted"]
    assert model.bodies[-1]["messages"] == [{"role": "user", "content": "see [image omitted]"}]


async def test_a_prompt_of_tokens_is_refused_by_name() -> None:
    async with evaluating(HostedModel()) as server, agent_of(server) as agent:
        for prompt in ("text", [1, 2]):
            response = await agent.post("/v1/completions", {"prompt": prompt})
            assert response.status_code == 400
            assert "/v1/completions" in response.json()["error"]["message"]
            assert MODEL in response.json()["error"]["message"]
