"""The official ``google-genai`` package against a real server: everything an agent does with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END, GO, TOOL, Held, call_text, chunked, one_by_one, raw, reply_ids, turns
from gate_support import CONTEXT, Stage, fails, says, staged
from google import genai
from google.genai import errors, types
from stepped_clock import loop_clock

from turnstile_server.errors import EngineRefused, EngineUnavailable
from waiting import PATIENCE_S

pytestmark = pytest.mark.anyio

USER = [types.Content(role="user", parts=[types.Part(text="go")])]
DECLARED = types.FunctionDeclaration(
    name=TOOL["function"]["name"],
    description=TOOL["function"]["description"],
    parameters=types.Schema(type=types.Type.OBJECT, properties={"command": types.Schema(type=types.Type.STRING)}),
)
TOOLS = [types.Tool(function_declarations=[DECLARED])]
THOUGHTS = types.ThinkingConfig(include_thoughts=True)
REPLY = f"<think>\nwhy\n</think>\n\nI look. {call_text('ls')}{END}"


@asynccontextmanager
async def client(episode: dict[str, Any], **options: Any) -> AsyncIterator[genai.client.AsyncClient]:
    """``options`` are those of HTTP."""
    http = types.HttpOptions(base_url=episode["model_url"], **options)
    async with genai.Client(api_key=episode["episode_key"], http_options=http).aio as agent:
        yield agent


def tooled(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(tools=[*TOOLS], **fields)


async def answered(
    agent: genai.client.AsyncClient,
    stream: bool,
    config: types.GenerateContentConfig | None = None,
    *,
    model: str = "m",
) -> list[types.GenerateContentResponse]:
    """The answer to USER, in as many responses as came."""
    if not stream:
        return [await agent.models.generate_content(model=model, contents=[*USER], config=config)]
    responses = await agent.models.generate_content_stream(model=model, contents=[*USER], config=config)
    return [response async for response in responses]


def parts_of(response: types.GenerateContentResponse) -> Sequence[types.Part]:
    assert response.candidates
    assert response.candidates[0].content
    return response.candidates[0].content.parts or ()


@pytest.mark.parametrize("version", ["v1", "v1beta"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_with_thoughts_text_and_a_call(stage: Stage, version: str, stream: bool) -> None:
    ids = stage.encode(REPLY)
    stage.engine.answers = [says(*one_by_one(ids))]
    episode = await stage.episode()
    async with client(episode, api_version=version) as agent:
        found = await answered(agent, stream, tooled(thinking_config=THOUGHTS), model="some/model:1")
    parts = [part for one in found for part in parts_of(one)]
    (turn,) = await turns(stage, episode)
    said = turn["reply"]
    assert "".join(part.text or "" for part in parts if part.thought) == said["reasoning"]
    assert "".join(part.text or "" for part in parts if not part.thought) == said["content"]
    (call,) = [part.function_call for part in parts if part.function_call]
    assert (call.id, call.name, call.args) == (said["tool_calls"][0]["id"], "bash", {"command": "ls"})
    last = found[-1]
    assert last.candidates
    assert last.usage_metadata
    assert last.candidates[0].finish_reason is types.FinishReason.STOP
    assert [one.candidates[0].finish_reason for one in found[:-1] if one.candidates] == [None] * (len(found) - 1)
    assert last.usage_metadata.prompt_token_count == len(stage.engine.calls[0].input_ids)
    assert last.usage_metadata.candidates_token_count == len(ids)
    assert {one.response_id for one in found} == {"gemini-" + turn["turn_id"].removeprefix("turn_")}
    assert {one.model_version for one in found} == {"some/model:1"}
    assert turn["dialect"] == "gemini"


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_that_were_not_asked_for_are_recorded_and_not_sent(stage: Stage, stream: bool) -> None:
    stage.engine.answers = [says(*one_by_one(stage.encode(REPLY)))]
    episode = await stage.episode()
    async with client(episode) as agent:
        found = await answered(agent, stream, tooled())
    assert not any(part.thought for one in found for part in parts_of(one))
    assert (await turns(stage, episode))[0]["reply"]["reasoning"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_that_calls_functions_is_one_path_of_exact_tokens(stage: Stage, stream: bool) -> None:
    """Automatic function calling: the package runs the function and sends its result back by itself."""
    first = stage.encode(f"<think>\nwhy\n</think>\n\n{call_text('ls')}{END}")
    stage.engine.answers = [says(*one_by_one(first)), says(reply_ids(stage, "done"))]
    ran: list[str] = []

    def bash(command: str) -> str:
        """Runs a command.

        Args:
          command: The command.
        """
        ran.append(command)
        return "README.md"

    episode = await stage.episode()
    async with client(episode) as agent:
        chat = agent.chats.create(model="m", config=types.GenerateContentConfig(tools=[bash]))
        if stream:
            said = "".join([one.text or "" async for one in await chat.send_message_stream("go")])
        else:
            said = (await chat.send_message("go")).text or ""
        stage.engine.answers = [says(reply_ids(stage, "again"))]
        await chat.send_message("more")
    assert (said.strip(), ran) == ("done", ["ls"])
    found = await turns(stage, episode)
    assert [turn["parent_id"] for turn in found] == [None, found[0]["turn_id"], found[1]["turn_id"]]
    assert [turn["break"] for turn in found] == [None] * 3
    (answer,) = found[1]["new_messages"]
    assert (answer["role"], answer["content"]) == ("tool", "README.md")
    assert answer["tool_call_id"] == found[0]["reply"]["tool_calls"][0]["id"]
    prompts = [call.input_ids.tolist() for call in stage.engine.calls]
    assert prompts[1][: len(prompts[0]) + len(first)] == prompts[0] + first


async def test_one_dialogue_has_the_same_tokens_here_and_in_chat_completions(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode(REPLY)), says(reply_ids(stage, "done"))] * 2
    async with stage.agent(await stage.episode()) as agent:
        messages: list[Any] = [{"role": "system", "content": "be brief"}, *GO]
        call = await agent.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[call-overload]
        said = call.choices[0].message
        messages += [said.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "x\n"}]
        await agent.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[call-overload]
    async with client(await stage.episode()) as gemini:
        config = tooled(system_instruction="be brief")
        reply = await gemini.models.generate_content(model="m", contents=[*USER], config=config)
        answer = types.Part.from_function_response(name="bash", response={"output": "x\n"})
        assert reply.candidates
        contents: list[Any] = [*USER, reply.candidates[0].content, types.Content(role="user", parts=[answer])]
        await gemini.models.generate_content(model="m", contents=contents, config=config)
    chat, other = ([call.input_ids.tolist() for call in stage.engine.calls[at : at + 2]] for at in (0, 2))
    assert chat == other


async def test_counting_is_true_and_leaves_no_trace(stage: Stage) -> None:
    episode = await stage.episode()
    async with client(episode) as agent:
        counted = await agent.models.count_tokens(model="m", contents=USER)
        assert await turns(stage, episode) == []
        await agent.models.generate_content(model="m", contents=USER)
    assert counted.total_tokens == len(stage.engine.calls[0].input_ids)


async def test_a_count_of_a_whole_request_has_its_instruction_and_tools(stage: Stage) -> None:
    episode = await stage.episode()
    wire = {
        "contents": [{"role": "user", "parts": [{"text": "go"}]}],
        "systemInstruction": {"parts": [{"text": "be brief"}]},
        "tools": [{"functionDeclarations": [{"name": "f"}]}],
    }
    path = f"{episode['model_url']}/v1beta/models/m"
    async with raw(episode) as http:
        counted = await http.post(f"{path}:countTokens", json={"generateContentRequest": wire})
        await http.post(f"{path}:generateContent", json=wire)
    assert counted.json() == {"totalTokens": len(stage.engine.calls[0].input_ids)}


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_the_one_model_is_listed_and_any_name_is_known(stage: Stage, version: str) -> None:
    async with client(await stage.episode(), api_version=version) as agent:
        (listed,) = [model async for model in await agent.models.list()]
        named = await agent.models.get(model="some/model")
    assert listed.name
    assert listed.name.startswith("models/")
    assert listed.input_token_limit == named.input_token_limit == CONTEXT
    assert named.supported_actions
    assert "generateContent" in named.supported_actions


@pytest.mark.slow
async def test_chat_completions_keeps_its_list_of_models(stage: Stage) -> None:
    async with stage.agent(await stage.episode()) as agent:
        assert [model.object async for model in agent.models.list()] == ["model"]


async def test_an_unknown_method_and_a_wrong_verb_are_told(stage: Stage) -> None:
    episode = await stage.episode()
    path = f"{episode['model_url']}/v1beta/models/m"
    async with raw(episode) as http:
        missing = await http.post(f"{path}:embedContent", json={})
        wrong = await http.get(f"{path}:generateContent")
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.json()["error"]["status"] == "INVALID_ARGUMENT"


# The two forms of streams -----------------------------------------------------------------------


async def test_without_alt_sse_a_stream_is_one_json_array(stage: Stage) -> None:
    stage.engine.answers = [says(*one_by_one(stage.encode(REPLY)))]
    episode = await stage.episode()
    body = {"contents": [{"parts": [{"text": "go"}]}], "tools": [{"functionDeclarations": [{"name": "bash"}]}]}
    path = f"{episode['model_url']}/v1beta/models/m:streamGenerateContent"
    async with raw(episode) as http:
        response = await http.post(path, json=body)
    assert response.headers["content-type"] == "application/json"
    found = [part for one in response.json() for part in one["candidates"][0]["content"]["parts"]]
    assert [part["functionCall"]["args"] for part in found if "functionCall" in part] == [{"command": "ls"}]
    assert response.json()[-1]["usageMetadata"]["candidatesTokenCount"] == len(stage.encode(REPLY))


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
async def test_text_leaves_in_both_forms_while_the_engine_still_samples(stage: Stage, alt: str) -> None:
    answer = Held(stage.encode("first part,"), stage.encode(f" second part{END}"))
    stage.engine.answers = [answer]
    answer.step()
    episode = await stage.episode()
    path = f"{episode['model_url']}/v1beta/models/m:streamGenerateContent{alt}"
    body = {"contents": [{"parts": [{"text": "go"}]}]}
    seen = ""
    async with raw(episode) as http, http.stream("POST", path, json=body) as response:
        with anyio.fail_after(PATIENCE_S):
            async for text in response.aiter_text():
                seen += text
                if "first part" in seen:
                    break
        assert answer.said == 1
        answer.step()
    if not alt:
        assert json.loads(seen + "]")


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
async def test_keep_alives_are_empty_lines_in_both_forms(tiny_model: Path, tmp_path: Path, alt: str) -> None:
    async with staged(tiny_model, tmp_path, gate={"keepalive_s": 0.05, "status_hold_s": 0.05}) as stage:
        answer = Held(reply_ids(stage, "late"))
        stage.engine.answers = [answer]
        episode = await stage.episode()
        path = f"{episode['model_url']}/v1beta/models/m:streamGenerateContent{alt}"
        body = {"contents": [{"parts": [{"text": "go"}]}]}
        seen = ""
        async with raw(episode) as http, http.stream("POST", path, json=body) as response:
            with anyio.fail_after(PATIENCE_S):
                async for text in response.aiter_text():
                    seen += text
                    if seen.count("\n") >= 3:
                        answer.all()
    assert seen.lstrip("[").startswith("\n\n\n")
    assert "late" in (seen if alt else json.dumps(json.loads(seen)))


async def test_keep_alives_are_invisible_to_the_package(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, gate={"keepalive_s": 0.02, "status_hold_s": 0.02}) as stage:
        answer = Held(*chunked(reply_ids(stage, "one two three"), 1, 2))
        stage.engine.answers = [answer]
        async with client(await stage.episode()) as agent, anyio.create_task_group() as tasks:

            async def speak() -> None:
                for _ in range(3):
                    with loop_clock() as clock:
                        await clock.let_pass(1)
                    answer.step()

            tasks.start_soon(speak)
            stream = await agent.models.generate_content_stream(model="m", contents=USER)
            assert "".join([one.text or "" async for one in stream]) == "one two three"


# Endings ----------------------------------------------------------------------------------------


async def test_a_reply_cut_by_its_length_says_so_to_gemini_s_clients(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("half"), finish="length")]
    async with client(await stage.episode()) as agent:
        config = types.GenerateContentConfig(max_output_tokens=3)
        reply = await agent.models.generate_content(model="m", contents=USER, config=config)
    assert reply.candidates
    assert reply.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    assert stage.engine.calls[0].sampling.max_new_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_nothing_is_an_empty_text(stage: Stage, stream: bool) -> None:
    stage.engine.answers = [says(stage.encode(END))]
    episode = await stage.episode()
    async with client(episode) as agent:
        found = await answered(agent, stream)
    assert [one.text for one in found] == [""]
    assert len(await turns(stage, episode)) == 1


async def test_text_stops_before_a_stop_sequence(stage: Stage) -> None:
    stage.engine.answers = [says(stage.encode("one STOP"))]
    async with client(await stage.episode()) as agent:
        config = types.GenerateContentConfig(stop_sequences=["STOP"])
        reply = await agent.models.generate_content(model="m", contents=USER, config=config)
    assert stage.engine.calls[0].sampling.stop == ("STOP",)
    assert (reply.text or "").strip() == "one"


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_a_client_error_that_names_the_field(stage: Stage, stream: bool) -> None:
    config = types.GenerateContentConfig(candidate_count=2)
    async with client(await stage.episode()) as agent:
        with pytest.raises(errors.ClientError, match=r"candidateCount must be 1") as caught:
            await answered(agent, stream, config)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")


async def test_a_wrong_key_is_unauthenticated(stage: Stage) -> None:
    episode = {**await stage.episode(), "episode_key": "wrong"}
    async with client(episode) as agent:
        with pytest.raises(errors.ClientError) as caught:
            await agent.models.generate_content(model="m", contents=USER)
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


async def test_an_overflow_is_told_in_google_s_words(tiny_model: Path, tmp_path: Path) -> None:
    async with staged(tiny_model, tmp_path, context_length=16) as stage, client(await stage.episode()) as agent:
        with pytest.raises(errors.ClientError, match=r"input token count.*exceeds the maximum") as caught:
            await agent.models.generate_content(model="m", contents="word " * 100)
    assert caught.value.code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_down_is_a_server_error(stage: Stage, stream: bool) -> None:
    stage.engine.answers = [fails(EngineUnavailable("down"))]
    async with client(await stage.episode()) as agent:
        with pytest.raises(errors.ServerError, match="down") as caught:
            await answered(agent, stream)
    assert (caught.value.code, caught.value.status) == (503, "UNAVAILABLE")


@pytest.mark.parametrize(("error", "kind"), [(EngineUnavailable("gone"), 503), (EngineRefused("gone"), 400)])
async def test_a_failure_within_a_stream_makes_the_package_raise(
    stage: Stage, error: Exception, kind: int
) -> None:
    stage.engine.answers = [fails(error, stage.encode("some text that is shown"))]
    seen = ""
    async with client(await stage.episode()) as agent:
        stream = await agent.models.generate_content_stream(model="m", contents=USER)
        with pytest.raises(errors.APIError, match="gone") as caught:  # noqa: PT012 - what was read before counts
            async for one in stream:
                seen += one.text or ""
    assert seen
    assert caught.value.code == kind


async def test_a_failure_within_an_array_is_its_last_element(stage: Stage) -> None:
    stage.engine.answers = [fails(EngineUnavailable("gone"), stage.encode("some text that is shown"))]
    episode = await stage.episode()
    path = f"{episode['model_url']}/v1beta/models/m:streamGenerateContent"
    async with raw(episode) as http:
        response = await http.post(path, json={"contents": [{"parts": [{"text": "go"}]}]})
    assert response.status_code == 200
    assert response.json()[-1]["error"]["status"] == "UNAVAILABLE"
