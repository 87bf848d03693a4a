"""Invariant 9: the trainer pins the sampling; the agent's wishes are recorded and not obeyed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversation import GO, TOOL, body, call_text, raw, reply_ids, turns, url
from gate_support import Answer, Stage, fails, says, staged

from turnstile.models import Tool
from turnstile_server.errors import EngineRefused
from turnstile_server.rendering.reply_grammar import ReplyGrammar

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {
    "temperature": 0.01,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.4,
    "frequency_penalty": 1.5,
    "presence_penalty": -1.5,
    "repetition_penalty": 1.3,
    "seed": 7,
    "max_tokens": 11,
    "reasoning_effort": "high",
    "parallel_tool_calls": False,
}


async def ask(stage: Stage, episode: dict[str, Any], **fields: Any) -> None:
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(**fields))
        assert response.status_code == 200, response.text


async def test_what_the_agent_asks_is_recorded_and_not_obeyed(stage: Stage) -> None:
    episode = await stage.episode(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05})
    stage.engine.answers = [says(reply_ids(stage, "ok"))]
    await ask(stage, episode, **ASKED)
    told = stage.engine.calls[0].sampling
    assert (told.temperature, told.top_p, told.top_k, told.min_p) == (0.7, 0.9, 40, 0.05)
    [turn] = await turns(stage, episode)
    assert turn["asked_sampling"] == ASKED
    used = {key: turn["sampling"][key] for key in ("temperature", "top_p", "top_k", "min_p")}
    assert used == {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05}
    assert turn["sampling"]["constrained"] is False


async def test_an_episode_without_sampling_takes_the_servers(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, sampling={"temperature": 0.3, "top_k": 5}) as stage:
        episode = await stage.episode()
        await ask(stage, episode)
        told = stage.engine.calls[0].sampling
    assert (told.temperature, told.top_k, told.top_p) == (0.3, 5, 1.0)


async def test_the_agent_may_ask_for_less_than_the_limit(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_completion_tokens": 100})
    await ask(stage, episode, max_tokens=11)
    assert stage.engine.calls[0].sampling.max_new_tokens == 11
    await ask(stage, episode, max_tokens=11, max_completion_tokens=12)
    assert stage.engine.calls[1].sampling.max_new_tokens == 12


async def test_more_than_the_limit_is_cut_to_it(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_completion_tokens": 100})
    await ask(stage, episode, max_tokens=10_000)
    await ask(stage, episode)
    assert [call.sampling.max_new_tokens for call in stage.engine.calls] == [100, 100]
    [turn, _] = await turns(stage, episode)
    assert turn["sampling"]["max_new_tokens"] == 100


async def test_the_budget_left_bounds_a_completion(stage: Stage) -> None:
    episode = await stage.episode(limits={"max_sampled_tokens": 20})
    spent = reply_ids(stage, "ok")
    stage.engine.answers = [says(spent)]
    await ask(stage, episode, max_tokens=50)
    await ask(stage, episode, max_tokens=50)
    assert [call.sampling.max_new_tokens for call in stage.engine.calls] == [20, 20 - len(spent)]


async def test_the_context_left_bounds_a_completion(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, context_length=64) as stage:
        episode = await stage.episode()
        await ask(stage, episode, max_tokens=1000)
        [call] = stage.engine.calls
    assert call.sampling.max_new_tokens == 64 - len(call.input_ids)


async def test_the_stop_tokens_of_the_template_are_always_passed(stage: Stage) -> None:
    await ask(stage, await stage.episode())
    assert stage.engine.calls[0].sampling.stop_token_ids == tuple(stage.encode("<|im_end|>"))


async def test_greedy_turns_are_untrained(stage: Stage) -> None:
    ids = reply_ids(stage, "ok")
    stage.engine.answers = [says(ids)]
    episode = await stage.episode(sampling={"temperature": 0.0})
    await ask(stage, episode, temperature=1.0)
    assert stage.engine.calls[0].sampling.temperature == 0.0
    [turn] = await turns(stage, episode)
    exported = await stage.get(episode, "/samples")
    assert exported["samples"] == []
    assert exported["untrained"] == [{"turn_id": turn["turn_id"], "tokens": len(ids), "reason": "greedy"}]


async def test_forbidden_tools_leave_call_syntax_as_text(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, call_text("ls")))]
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(tools=[TOOL], tool_choice="none"))
    message = response.json()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert '"command": "ls"' in message["content"]


async def test_a_forced_call_is_sampled_freely_and_recorded_on_an_engine_without_grammars(stage: Stage) -> None:
    stage.engine.answers = [says(reply_ids(stage, "No need.")), says(reply_ids(stage, call_text("ls")))]
    episode = await stage.episode()
    named = {"type": "function", "function": {"name": TOOL["function"]["name"]}}
    async with raw(episode) as client:
        for choice in ("required", named):
            response = await client.post(url(episode), json=body(tools=[TOOL], tool_choice=choice))
            assert response.status_code == 200, response.text
    first, second = await turns(stage, episode)
    assert (first["reply"]["content"], len(second["reply"]["tool_calls"])) == ("No need.", 1)
    assert [turn["asked_sampling"]["tool_choice"] for turn in (first, second)] == ["required", named]
    assert not first["sampling"]["constrained"]


async def forced(stage: Stage, choice: object, answers: list[Answer], **fields: object) -> list[dict[str, Any]]:
    """The turns of a call that forces a tool call."""
    stage.engine.answers = answers
    episode = await stage.episode()
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(tools=[TOOL], tool_choice=choice, **fields))
    assert response.status_code == 200, response.text
    return await turns(stage, episode)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bash"}}])
async def test_a_forced_call_has_the_engines_grammar_where_it_has_one(stage: Stage, choice: object) -> None:
    stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
    (turn,) = await forced(stage, choice, [says(reply_ids(stage, call_text("ls")))])
    tag = json.loads(stage.engine.calls[0].sampling.structural_tag or "")
    assert (tag["type"], '"command"' in json.dumps(tag)) == ("structural_tag", True)
    assert stage.engine.calls[0].sampling.json_schema is None
    assert turn["sampling"]["constrained"]
    assert turn["asked_sampling"]["tool_choice"] == choice
    assert len(turn["reply"]["tool_calls"]) == 1


@pytest.mark.parametrize(("tools", "inline"), [(1, True), (100, False)])
async def test_the_grammar_of_many_tools_does_not_hold_up_the_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tools: int, inline: bool
) -> None:
    written, threads = ReplyGrammar.call, list[threading.Thread]()

    def call(self: ReplyGrammar, offered: Sequence[Tool], name: str, *, opened: bool) -> str | None:
        threads.append(threading.current_thread())
        return written(self, offered, name, opened=opened)

    monkeypatch.setattr(ReplyGrammar, "call", call)
    stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
    stage.engine.answers = [says(reply_ids(stage, call_text("ls")))]
    episode = await stage.episode()
    many = [{**TOOL, "function": {**TOOL["function"], "name": f"tool_{index}"}} for index in range(tools)]
    async with raw(episode) as client:
        response = await client.post(url(episode), json=body(tools=many, tool_choice="required"))
    assert response.status_code == 200, response.text
    assert [thread is threading.main_thread() for thread in threads] == [inline]
    assert f"tool_{tools - 1}" in (stage.engine.calls[0].sampling.structural_tag or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_whose_grammar_the_engine_refuses_is_free(stage: Stage, stream: bool) -> None:
    stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
    answers = [fails(EngineRefused("Unimplemented keys.")), says(reply_ids(stage, call_text("ls")))]
    form = {"type": "json_object"}
    (turn,) = await forced(stage, "required", answers, stream=stream, response_format=form)
    first, second = stage.engine.calls
    assert first.sampling.structural_tag is not None
    assert not second.sampling.constrained
    assert not turn["sampling"]["constrained"]


async def test_an_answer_whose_grammar_the_engine_refuses_has_the_schema_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplyGrammar, "answer", lambda self, schema, opened: "a tag")
    stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
    refusal = fails(EngineRefused("Unimplemented keys."))
    stage.engine.answers = [
        refusal,
        says(reply_ids(stage, "{}")),
        refusal,
        fails(EngineRefused("No such keyword.")),
    ]
    episode = await stage.episode()
    form = body(response_format={"type": "json_object"})
    async with raw(episode) as client:
        assert (await client.post(url(episode), json=form)).status_code == 200
        refused = await client.post(url(episode), json=form)
    assert (refused.status_code, "No such keyword." in refused.text) == (400, True)
    grammars = [
        (call.sampling.structural_tag is not None, call.sampling.json_schema is not None)
        for call in stage.engine.calls
    ]
    assert grammars == [(True, False), (False, True)] * 2
    (turn,) = await turns(stage, episode)
    assert turn["sampling"]["constrained"]


async def test_a_call_that_breaks_off_in_its_grammar_is_not_sampled_again(stage: Stage) -> None:
    stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
    stage.engine.answers = [fails(EngineRefused("Too complex."), [5, 6])]
    episode = await stage.episode()
    async with raw(episode) as client:
        answer = await client.post(url(episode), json=body(tools=[TOOL], tool_choice="required"))
    assert answer.status_code == 400
    assert len(stage.engine.calls) == 1


async def test_forced_calls_may_be_free_or_refused(tiny_model: Path, tmp_path: Path) -> None:
    for place, setting, status in (("a", "free", 200), ("b", "refuse", 400)):
        async with staged(tiny_model, tmp_path / place, gate={"forced_calls": setting}) as stage:
            stage.engine.can = replace(stage.engine.can, constrained=True, structural_tags=True)
            stage.engine.answers = [says(reply_ids(stage, "No need."))]
            episode = await stage.episode()
            async with raw(episode) as client:
                answer = await client.post(url(episode), json=body(tools=[TOOL], tool_choice="required"))
            assert answer.status_code == status, answer.text
            if status == 400:
                assert "gate.forced_calls = refuse" in answer.text
            else:
                assert not stage.engine.calls[0].sampling.constrained


async def test_the_model_list_is_the_engines(stage: Stage) -> None:
    async with stage.agent(await stage.episode()) as agent:
        [model] = (await agent.models.list()).data
    assert model.id == "scripted"
    assert model.owned_by == "turnstile"


@pytest.mark.slow
async def test_any_model_name_is_taken_and_echoed(stage: Stage) -> None:
    async with stage.agent(await stage.episode()) as agent:
        reply = await agent.chat.completions.create(model="gpt-anything", messages=GO)  # type: ignore[arg-type]
    assert reply.model == "gpt-anything"
