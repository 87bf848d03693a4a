"""The control door's routes of the ``trainer`` engine, and what becomes of completions: turns, samples, audits."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from gate_support import requests_begun
from openai.types.chat import ChatCompletion

from control_support import KEY, Door, OpenDoor, engine, open_door
from training_support import GO, SLOW_S, TrainerServer, trainer_server
from turnstile_server.demo.local_server import LocalServerError, serve
from waiting import wait_until

__all__ = ["engine", "open_door"]

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

END = "<|im_end|>"
NO_SANDBOX = ["--sandbox", "none"]
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


async def episode(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/episodes", json={"task": {"instruction": "t"}, **fields})
    assert response.status_code == 201, response.text
    created: dict[str, Any] = response.json()
    return created


async def pending(http: httpx.AsyncClient, created: dict[str, Any], wait: float = 30) -> dict[str, Any]:
    response = await http.get(f"/episodes/{created['episode_id']}/pending", params={"wait": wait})
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


async def complete(http: httpx.AsyncClient, created: dict[str, Any], **body: Any) -> httpx.Response:
    return await http.post(f"/episodes/{created['episode_id']}/completions", json=body)


class Asking:
    """An agent's model call, through the official SDK."""

    reply: ChatCompletion
    error: openai.APIError | None = None


@asynccontextmanager
async def asking(created: dict[str, Any], **fields: Any) -> AsyncIterator[Asking]:
    """A model call under way; the block's end waits for its reply."""
    asked = Asking()
    messages = fields.pop("messages", GO)

    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{created['model_url']}/v1", api_key=created["episode_key"], max_retries=0, timeout=SLOW_S
        ) as api:
            try:
                asked.reply = await api.chat.completions.create(model="policy", messages=messages, **fields)
            except openai.APIError as error:
                asked.error = error

    with anyio.fail_after(SLOW_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            yield asked


async def get_json(http: httpx.AsyncClient, created: dict[str, Any], what: str, **params: Any) -> Any:
    response = await http.get(f"/episodes/{created['episode_id']}{what}", params=params)
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_training_loop_samples_and_the_agent_never_knows(
    server: TrainerServer, http: httpx.AsyncClient
) -> None:
    created = await episode(http, sampling={"temperature": 0.7})
    ids = server.encode(f"Hello there.{END}")
    logprobs = [-0.125 * number for number in range(len(ids))]
    async with asking(created, max_tokens=50) as asked:
        shown = await pending(http, created)
        (call,) = shown["calls"]
        assert shown["status"] == "running"
        assert server.decode(call["input_ids"]).endswith(f"go{END}\n<|im_start|>assistant\n")
        assert (call["max_new_tokens"], call["sampling"]["temperature"], call["stop"]) == (50, 0.7, [])
        assert call["stop_token_ids"] == [ids[-1]]
        answer = await complete(http, created, call_id=call["call_id"], completion_ids=ids, logprobs=logprobs)
        assert answer.status_code == 200, answer.text
        assert answer.json() == {
            "call_id": call["call_id"],
            "tokens": len(ids),
            "finish_reason": "stop",
            "weight_version": "default",
        }
    assert asked.reply.choices[0].message.content == "Hello there."
    assert asked.reply.choices[0].finish_reason == "stop"
    (turn,) = (await get_json(http, created, "/turns"))["turns"]
    assert (turn["completion_ids"], turn["logprobs"]) == (ids, logprobs)
    assert turn["context_ids"] == call["input_ids"]
    assert not turn["sampling"]["given"]
    await http.post(f"/episodes/{created['episode_id']}/finish")
    samples = await get_json(http, created, "/samples")
    assert samples["untrained"] == []
    assert samples["samples"][0]["loss_mask"] == [0] * len(call["input_ids"]) + [1] * len(ids)
    again = await complete(http, created, call_id=call["call_id"], completion_ids=ids, logprobs=logprobs)
    assert again.json() == answer.json()
    other = await complete(http, created, call_id=call["call_id"], completion_ids=ids[1:], logprobs=logprobs[1:])
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict")


async def test_the_training_loop_is_shown_the_format_of_an_answer_and_the_turn_is_marked(
    server: TrainerServer, http: httpx.AsyncClient
) -> None:
    created = await episode(http)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    ids = server.encode(f'{{"a": 1}}{END}')
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with asking(created, response_format=wanted) as asked:
        (call,) = (await pending(http, created))["calls"]
        assert json.loads(call["json_schema"]) == schema
        answer = await complete(
            http, created, call_id=call["call_id"], completion_ids=ids, logprobs=[-0.5] * len(ids)
        )
        assert answer.status_code == 200, answer.text
    assert asked.reply.choices[0].message.content == '{"a": 1}'
    async with asking(created):
        (call,) = (await pending(http, created))["calls"]
        assert call["json_schema"] is None
        await complete(http, created, call_id=call["call_id"], completion_ids=ids, logprobs=[-0.5] * len(ids))
    turns = (await get_json(http, created, "/turns"))["turns"]
    assert [turn["sampling"]["constrained"] for turn in turns] == [True, False]
    await http.post(f"/episodes/{created['episode_id']}/finish")
    untrained = (await get_json(http, created, "/samples"))["untrained"]
    assert [(one["turn_id"], one["reason"]) for one in untrained] == [(turns[0]["turn_id"], "constrained")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_call_continues_the_first_ones_tokens(
    server: TrainerServer, http: httpx.AsyncClient, stream: bool
) -> None:
    created = await episode(http)
    first = server.encode(f"<think>\nhm\n</think>\n\nOne.{END}")
    async with asking(created) as asked:
        call = (await pending(http, created))["calls"][0]
        await complete(http, created, call_id=call["call_id"], completion_ids=first, logprobs=[-0.5] * len(first))
    messages = [*GO, {"role": "assistant", "content": asked.reply.choices[0].message.content}, *GO]
    async with asking(created, messages=messages, stream=stream):
        follow = (await pending(http, created))["calls"][0]
        whole = call["input_ids"] + first
        assert follow["input_ids"][: len(whole)] == whole
        await complete(
            http, created, call_id=follow["call_id"], completion_ids=first, logprobs=[-0.5] * len(first)
        )
    turns = (await get_json(http, created, "/turns"))["turns"]
    assert [turn["parent_id"] for turn in turns] == [None, turns[0]["turn_id"]]


async def test_a_text_is_encoded_closed_marked_and_not_trained(
    server: TrainerServer, http: httpx.AsyncClient
) -> None:
    created = await episode(http)
    text = 'Now.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    async with asking(created, tools=[TOOL]) as asked:
        call = (await pending(http, created))["calls"][0]
        answer = await complete(http, created, call_id=call["call_id"], text=text)
        assert answer.status_code == 200, answer.text
    message = asked.reply.choices[0].message
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == {"command": "ls"}  # type: ignore[union-attr]
    (turn,) = (await get_json(http, created, "/turns"))["turns"]
    assert turn["completion_ids"] == server.encode(text + END)
    assert turn["sampling"]["given"]
    assert set(turn["logprobs"]) == {0.0}
    await http.post(f"/episodes/{created['episode_id']}/finish")
    samples = await get_json(http, created, "/samples")
    assert (samples["samples"], samples["stats"]["trained_tokens"]) == ([], 0)
    assert [(row["reason"], row["tokens"]) for row in samples["untrained"]] == [
        ("given", len(turn["completion_ids"]))
    ]
    (row,) = (await get_json(http, created, "/samples", include_untrained=True))["samples"]
    assert set(row["weight_version"]) == {None}
    assert set(row["loss_mask"]) == {0}
    audit = (await http.post(f"/episodes/{created['episode_id']}/audit")).json()
    assert [turn["skipped"] for turn in audit["turns"]] == ["given"]


async def test_a_turn_that_was_given_can_be_the_parent_of_one_that_was_sampled(
    server: TrainerServer, http: httpx.AsyncClient
) -> None:
    created = await episode(http)
    async with asking(created) as asked:
        call = (await pending(http, created))["calls"][0]
        await complete(http, created, call_id=call["call_id"], text="Shown how.")
    messages = [*GO, {"role": "assistant", "content": asked.reply.choices[0].message.content}, *GO]
    ids = server.encode(f"Done.{END}")
    async with asking(created, messages=messages):
        call = (await pending(http, created))["calls"][0]
        await complete(http, created, call_id=call["call_id"], completion_ids=ids, logprobs=[-0.5] * len(ids))
    await http.post(f"/episodes/{created['episode_id']}/finish")
    samples = await get_json(http, created, "/samples")
    (row,) = samples["samples"]
    assert sum(row["loss_mask"]) == len(ids)
    assert [span["trained"] for span in row["turn_spans"]] == [False, True]
    assert samples["stats"]["sampled_tokens"] == len(ids) + len(server.encode(f"Shown how.{END}"))


async def test_an_audit_says_that_nothing_was_scored(server: TrainerServer, http: httpx.AsyncClient) -> None:
    created = await episode(http)
    ids = server.encode(f"Hello.{END}")
    async with asking(created):
        call = (await pending(http, created))["calls"][0]
        await complete(http, created, call_id=call["call_id"], completion_ids=ids, logprobs=[-0.5] * len(ids))
    await http.post(f"/episodes/{created['episode_id']}/finish")
    audit = (await http.post(f"/episodes/{created['episode_id']}/audit")).json()
    assert [turn["skipped"] for turn in audit["turns"]] == ["engine_cannot_score"]
    assert audit["max_abs_delta"] is None
    assert audit["passed"], audit
    assert len(audit["invariants"]) == 3


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"completion_ids": [1, 2], "logprobs": [-0.5]}, 422, "one for each"),
        ({"completion_ids": [1], "logprobs": [1e39]}, 422, "not finite"),
        ({"completion_ids": [10**6], "logprobs": [-0.5]}, 422, "vocabulary"),
        ({"completion_ids": [1, 2, 3, 4, 5], "logprobs": [-0.5] * 5}, 422, "max_new_tokens"),
        ({"completion_ids": [], "logprobs": []}, 422, "empty"),
        ({"text": "This is much longer than four tokens are."}, 422, "max_new_tokens"),
        ({"text": f"a{END}b"}, 422, "stop id"),
        ({"completion_ids": [1]}, 422, "logprobs"),
        ({"completion_ids": [1], "logprobs": [-0.5], "text": "x"}, 422, "not both"),
        ({"completion_ids": [1.5], "logprobs": [-0.5]}, 422, "completion_ids"),
        ({"completion_ids": [[1]], "logprobs": [-0.5]}, 422, "completion_ids"),
        ({"completion_ids": [True], "logprobs": [-0.5]}, 422, "completion_ids"),
        ({"completion_ids": [2**70], "logprobs": [-0.5]}, 422, "completion_ids"),
        ({"completion_ids": [1], "logprobs": ["-0.5"]}, 422, "logprobs"),
        ({"completion_ids": [1], "logprobs": [None]}, 422, "logprobs"),
        ({"completion_ids": [1], "logprobs": [{}]}, 422, "logprobs"),
        ({"completion_ids": [1], "logprobs": [-(10**400)]}, 422, "logprobs"),
        ({"completion_ids": [1], "logprobs": {"0": -0.5}}, 422, "logprobs"),
        ({"text": "x", "sampled_by": "me"}, 422, "sampled_by"),
    ],
)
async def test_the_trainer_is_told_what_is_wrong_and_nothing_is_lost(
    server: TrainerServer, http: httpx.AsyncClient, body: dict[str, Any], status: int, words: str
) -> None:
    created = await episode(http)
    async with asking(created, max_tokens=4):
        call = (await pending(http, created))["calls"][0]
        answer = await complete(http, created, call_id=call["call_id"], **body)
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert (await pending(http, created))["calls"] == [call]
        await complete(http, created, call_id=call["call_id"], text="ok")
    assert len((await get_json(http, created, "/turns"))["turns"]) == 1
    await http.post(f"/episodes/{created['episode_id']}/cancel")


async def test_a_call_is_told_as_soon_as_it_is_made(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the end of the wait, which is far longer than this test."""
    wait_s = 10 * SLOW_S
    control = {"port": 0, "key": KEY, "max_wait_s": wait_s}
    shown: list[dict[str, Any]] = []
    with trainer_server(tiny_model, tmp_path, control=control) as server:
        async with server.http() as http:
            created = await episode(http)
            begun = requests_begun(monkeypatch)

            async def wait() -> None:
                shown.append(await pending(http, created, wait_s))

            async with anyio.create_task_group() as waiting:
                waiting.start_soon(wait)
                await wait_until(lambda: begun)
                assert (await pending(http, created, wait=0))["calls"] == []
                async with asking(created):
                    await wait_until(lambda: shown)
                    await complete(http, created, call_id=shown[0]["calls"][0]["call_id"], text="Hi.")
    assert len(shown[0]["calls"]) == 1


async def test_a_logprob_that_is_no_number_is_no_json(server: TrainerServer, http: httpx.AsyncClient) -> None:
    created = await episode(http)
    raw = b'{"call_id": "call_1", "completion_ids": [1], "logprobs": [NaN]}'
    answer = await http.post(f"/episodes/{created['episode_id']}/completions", content=raw)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request")


async def test_unknown_calls_and_episodes_are_404(server: TrainerServer, http: httpx.AsyncClient) -> None:
    created = await episode(http)
    assert (await complete(http, created, call_id="call_x", text="x")).status_code == 404
    nowhere = {"episode_id": "ep_nowhere"}
    assert (await complete(http, nowhere, call_id="call_x", text="x")).status_code == 404
    assert (await http.get("/episodes/ep_nowhere/pending?wait=5")).status_code == 404
    assert await pending(http, created, wait=0.05) == {
        "episode_id": created["episode_id"],
        "status": "running",
        "calls": [],
    }


@pytest.mark.parametrize("end", ["cancel", "finish", "delete"])
async def test_an_episodes_end_answers_who_waits_and_releases_its_calls(
    server: TrainerServer, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    created = await episode(http)
    begun = requests_begun(monkeypatch)
    path = f"/episodes/{created['episode_id']}"
    seen: list[Any] = []

    async def wait() -> None:
        seen.append(await http.get(f"{path}/pending", params={"wait": 50}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await wait_until(lambda: begun)
        assert (await pending(http, created, wait=0))["calls"] == []
        await (http.delete(path) if end == "delete" else http.post(f"{path}/{end}"))
    if end == "delete":  # a moment between its end and its deletion may be seen
        assert seen[0].status_code == 404 or seen[0].json()["status"] == "cancelled"
    else:
        assert seen[0].json()["status"] == {"cancel": "cancelled", "finish": "completed"}[end]
        assert seen[0].json()["calls"] == []


async def test_a_call_of_a_cancelled_episode_takes_no_completion(
    server: TrainerServer, http: httpx.AsyncClient
) -> None:
    created = await episode(http)
    async with asking(created) as asked:
        call = (await pending(http, created))["calls"][0]
        await http.post(f"/episodes/{created['episode_id']}/cancel")
        late = await complete(http, created, call_id=call["call_id"], text="late")
        assert (late.status_code, late.json()["error"]["type"]) == (410, "episode_ended")
    assert asked.error is not None
    assert (await get_json(http, created, "/turns"))["turns"] == []


async def test_an_agent_that_hangs_up_releases_its_call(server: TrainerServer, http: httpx.AsyncClient) -> None:
    created = await episode(http)
    url = f"{created['model_url']}/v1/chat/completions"
    headers = {"authorization": f"Bearer {created['episode_key']}"}

    async def waiting_calls() -> list[Any]:
        return list((await pending(http, created, wait=0))["calls"])

    async def none_waits() -> bool:
        return not await waiting_calls()

    async with httpx.AsyncClient(headers=headers, timeout=None) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(partial(agent.post, url, json={"model": "m", "messages": GO}))
        await wait_until(waiting_calls)
        tasks.cancel_scope.cancel()
    await wait_until(none_waits)


async def test_an_agents_call_that_nobody_completes_ends_with_a_clear_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    with trainer_server(tiny_model, tmp_path, engine={"completion_timeout_s": 0.2}) as hasty:
        async with hasty.http() as http:
            created = await episode(http)
            async with asking(created) as asked:
                pass
    assert isinstance(asked.error, openai.APIStatusError)
    assert asked.error.status_code == 504
    assert "engine.completion_timeout_s" in asked.error.message


async def test_stopping_the_server_releases_agent_and_trainer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_last: list[dict[str, Any]] = []
    grace = {"shutdown_grace_s": 3 * SLOW_S}  # whoever is not released is waited for this long
    running = trainer_server(tiny_model, tmp_path, **grace)
    server = running.__enter__()
    async with server.http() as http:
        created, other = await episode(http), await episode(http)

        async def wait() -> None:
            async with server.http() as own:
                told_last.append(await pending(own, other, 50))

        async with asking(created) as asked, anyio.create_task_group() as tasks:
            assert (await pending(http, created))["calls"]
            begun = requests_begun(monkeypatch)
            tasks.start_soon(wait)
            await wait_until(lambda: begun)
            assert (await pending(http, other, wait=0))["calls"] == []
            await anyio.to_thread.run_sync(running.__exit__, None, None, None)
    assert asked.error is not None
    assert told_last[0]["calls"] == []


async def test_the_engine_says_who_samples_and_takes_names_of_weights(tiny_model: Path, tmp_path: Path) -> None:
    with trainer_server(tiny_model, tmp_path) as server:
        async with server.http() as http:
            created = await episode(http)
            async with asking(created):
                call = (await pending(http, created))["calls"][0]
                info = (await http.get("/engine")).json()
                assert (info["ok"], info["weight_version"], info["paused"]) == (True, "default", False)
                assert info["detail"] == "1 calls wait for the training loop"
                await http.post("/engine/weights", json={"path": "unread", "version": "step-1"})
                await http.post("/engine/pause", json={})
                assert (await http.get("/engine")).json()["paused"]
                answer = await complete(http, created, call_id=call["call_id"], text="x")
                assert answer.json()["weight_version"] == "step-1"
            assert not (await http.post("/engine/resume")).json()["paused"]


async def test_a_server_whose_engine_samples_refuses_both_routes(open_door: OpenDoor) -> None:
    with open_door() as door:
        assert isinstance(door, Door)
        async with httpx.AsyncClient(base_url=f"{door.url}/k/{door.key}", timeout=SLOW_S) as http:
            created = await episode(http)
            path = f"/episodes/{created['episode_id']}"
            for answer in (
                await http.get(f"{path}/pending?wait=5"),
                await complete(http, created, call_id="call_1", text="x"),
            ):
                assert answer.status_code == 400
                assert "--engine trainer" in answer.json()["error"]["message"]


def without_weights(model: Path, copy: Path) -> Path:
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


async def test_turnstile_serve_knows_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    """The real command, on a folder without weights."""
    folder = without_weights(tiny_model, tmp_path / "model")
    async with serve(folder, tmp_path / "data", engine="trainer", options=NO_SANDBOX) as running:
        headers = {"authorization": f"Bearer {running.control_key}"}
        async with httpx.AsyncClient(base_url=running.control_url, headers=headers, timeout=SLOW_S) as http:
            created = await episode(http)
            async with asking(created) as asked:
                call = (await pending(http, created))["calls"][0]
                await complete(http, created, call_id=call["call_id"], text="Hi.")
        assert asked.reply.choices[0].message.content == "Hi."


async def kill_while_a_call_waits(model: Path, data_dir: Path) -> tuple[dict[str, Any], str]:
    """One turn, then SIGKILL under a second call; the episode and the id of that call."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(serve(model, data_dir, engine="trainer", options=NO_SANDBOX))
        headers = {"authorization": f"Bearer {running.control_key}"}
        http = httpx.AsyncClient(base_url=running.control_url, headers=headers, timeout=SLOW_S)
        await stack.enter_async_context(http)
        created = await episode(http)
        async with asking(created):
            call = (await pending(http, created))["calls"][0]
            await complete(http, created, call_id=call["call_id"], text="Kept.")
        async with asking(created, messages=[*GO, *GO]) as asked:
            call = (await pending(http, created))["calls"][0]
            os.kill(running.pid, signal.SIGKILL)
        assert isinstance(asked.error, openai.APIConnectionError)
        with pytest.raises(httpx.TransportError):
            await complete(http, created, call_id=call["call_id"], text="Lost.")
        with pytest.raises(LocalServerError, match="exited with "):
            await stack.aclose()
    return created, call["call_id"]


@pytest.mark.thorough
async def test_a_server_killed_while_a_call_waits_keeps_what_was_acknowledged(
    tiny_model: Path, tmp_path: Path
) -> None:
    """After kill -9 the first turn is there, the waiting call is not, and the episode has failed."""
    created, call_id = await kill_while_a_call_waits(tiny_model, tmp_path / "data")
    async with serve(tiny_model, tmp_path / "data", engine="trainer", options=NO_SANDBOX) as running:
        headers = {"authorization": f"Bearer {running.control_key}"}
        async with httpx.AsyncClient(base_url=running.control_url, headers=headers, timeout=SLOW_S) as http:
            shown = await get_json(http, created, "")
            assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
            turns = (await get_json(http, created, "/turns"))["turns"]
            assert [turn["reply"]["content"] for turn in turns] == ["Kept."]
            assert (await pending(http, created))["calls"] == []
            assert (await complete(http, created, call_id=call_id, text="Lost.")).status_code == 404
