"""``/ws``: each frame and the frame that answers it, as openenv-core 0.3.0 writes them."""

from __future__ import annotations

from typing import Any

import pytest
from openenv_support import ANSWER, TASK, wired
from websockets.exceptions import ConnectionClosed

from control_support import Door, OpenDoor

pytestmark = pytest.mark.anyio


def step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


def reset(**parameters: Any) -> dict[str, Any]:
    return {"type": "reset", "data": parameters}


REFUSED: list[tuple[Any, str, str]] = [
    ("{", "INVALID_JSON", "Invalid JSON"),
    ("[]", "UNKNOWN_TYPE", "Unknown message type"),
    ({"type": "dance"}, "UNKNOWN_TYPE", "dance"),
    ({"type": ["reset"]}, "UNKNOWN_TYPE", "Unknown message type"),
    ({"type": "state", "more": 1}, "VALIDATION_ERROR", "more"),
    ({"type": "step"}, "VALIDATION_ERROR", "data"),
    (step(type="dance"), "VALIDATION_ERROR", "type"),
    (step(type="call_tool"), "VALIDATION_ERROR", "tool_name"),
    (step(type="wait", tool_name="bash"), "VALIDATION_ERROR", "wait takes no tool_name"),
    (step(type="wait", more=1), "VALIDATION_ERROR", "more"),
    (step(type="wait", timeout_s=0), "VALIDATION_ERROR", "timeout_s"),
    (step(type="generate"), "VALIDATION_ERROR", "messages, or prompt"),
    (step(type="generate", prompt="a", messages=[]), "VALIDATION_ERROR", "not both"),
    (step(type="generate", prompt="a", call_id="call_1"), "VALIDATION_ERROR", "call_id"),
    (step(type="wait"), "EXECUTION_ERROR", "send reset first"),
    (step(type="finish"), "EXECUTION_ERROR", "send reset first"),
    (reset(idempotency_key="k"), "VALIDATION_ERROR", "a task or a seed"),
    (reset(task=TASK, task_id="x"), "VALIDATION_ERROR", "not both"),
    (reset(task=TASK, colour="red"), "VALIDATION_ERROR", "colour"),
    (reset(task=TASK, limits={"max_turns": 10**9}), "VALIDATION_ERROR", "max_turns"),
    (reset(task=TASK, episode_id="no spaces"), "VALIDATION_ERROR", "episode_id"),
    (reset(task=TASK, agent="nobody"), "VALIDATION_ERROR", "nobody"),
    (reset(task_id="no-such-task"), "VALIDATION_ERROR", "no-such-task"),
]


@pytest.mark.parametrize(("frame", "code", "said"), REFUSED)
async def test_what_cannot_be_done_is_an_error_frame_and_the_socket_goes_on(
    door: Door, frame: Any, code: str, said: str
) -> None:
    async with wired(door) as wire:
        told = await wire.ask(frame)
        assert (told["type"], told["data"]["code"]) == ("error", code)
        assert said in told["data"]["message"]
        assert (await wire.ask({"type": "state"}))["type"] == "state"


async def test_an_episode_from_reset_to_reward(door: Door) -> None:
    async with wired(door) as wire:
        told = await wire.ask(reset(task=TASK, seed=3, group_id="g", episode_id="wire-to-reward"))
        first = told["data"]["observation"]
        assert (told["data"]["reward"], told["data"]["done"]) == (None, False)
        assert (first["episode_id"], first["status"], first["step"]) == ("wire-to-reward", "running", 0)
        assert first["instruction"] == TASK["instruction"]
        assert first["model_url"].endswith("/e/wire-to-reward")
        assert first["episode_key"]

        tools = await wire.step(type="list_tools")
        assert [tool["name"] for tool in tools["observation"]["tools"]] == ["submit"]
        replied = await wire.step(type="generate", prompt="Hello", max_tokens=4, offer_tools=True)
        assert replied["observation"]["message"]["role"] == "assistant"
        assert replied["observation"]["usage"]["completion_tokens"] <= 4
        said = await wire.step(type="call_tool", tool_name="submit", arguments={"answer": ANSWER})
        assert (said["done"], said["reward"]) == (False, None)
        assert said["observation"]["result"]
        assert "tools" not in said["observation"]

        ended = await wire.step(type="finish")
        assert (ended["done"], ended["reward"]) == (True, 1.0)
        assert ended["observation"]["reward_components"] == {"answer": 1.0}
        assert ended["observation"]["why"] == "1: the answer is right; its caller finished it after 1 turn"
        state = (await wire.ask({"type": "state"}))["data"]
        shown = {
            name: state[name] for name in ("episode_id", "status", "reward", "step_count", "group_id", "turns")
        }
        assert shown == {
            "episode_id": "wire-to-reward",
            "status": "completed",
            "reward": 1.0,
            "step_count": 4,
            "group_id": "g",
            "turns": 1,
        }


async def test_a_wrong_answer_is_reward_0_and_no_grader_is_no_reward(door: Door) -> None:
    async with wired(door) as wire:
        await wire.reset()
        await wire.step(type="call_tool", tool_name="submit", arguments={"answer": "41"})
        assert (await wire.step(type="finish"))["reward"] == 0.0
        await wire.reset(task={"instruction": "Nobody will judge this."})
        ended = await wire.step(type="finish")
        assert (ended["done"], ended["reward"]) == (True, None)


async def test_a_call_that_cannot_be_made_is_told_in_the_observation(door: Door) -> None:
    async with wired(door) as wire:
        await wire.reset()
        unknown = (await wire.step(type="call_tool", tool_name="bash"))["observation"]
        assert unknown["error"]["error_type"] == "tool_not_found"
        wrong = (await wire.step(type="call_tool", tool_name="submit", arguments={"anser": "1"}))["observation"]
        assert wrong["is_error"] is True
        assert "anser" in wrong["result"]
        refused = (await wire.step(type="generate", messages=[{"role": "nobody", "content": "x"}]))["observation"]
        assert refused["error"]["message"].startswith("invalid_request")
        await wire.step(type="finish")
        late = await wire.step(type="call_tool", tool_name="submit", arguments={"answer": "1"})
        assert late["done"] is True
        assert late["observation"]["error"]["message"].startswith("episode_ended")


async def test_generate_is_the_model_door_s_own_path_so_its_turn_continues_the_conversation(door: Door) -> None:
    async with wired(door) as wire:
        await wire.reset()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
        first = (await wire.step(type="generate", messages=messages, max_tokens=4))["observation"]["message"]
        messages += [first, {"role": "user", "content": "And?"}]
        await wire.step(type="generate", messages=messages, max_tokens=4)
        state = (await wire.ask({"type": "state"}))["data"]
        assert state["turns"] == 2
        assert 2 <= state["sampled_tokens"] <= 8


async def test_wait_answers_at_its_own_time_and_at_the_episode_s_end(door: Door) -> None:
    async with wired(door) as wire:
        await wire.reset()
        assert (await wire.step(type="wait", timeout_s=0.05))["done"] is False
        await wire.step(type="finish")
        assert (await wire.step(type="wait"))["done"] is True


async def test_tools_are_known_before_reset(door: Door) -> None:
    async with wired(door) as wire:
        tools = (await wire.step(type="list_tools"))["observation"]["tools"]
        assert {"bash", "submit"} <= {tool["name"] for tool in tools}
        assert (await wire.ask({"type": "state"}))["data"]["episode_id"] is None


async def test_json_rpc_on_the_socket_acts_in_its_episode(door: Door) -> None:
    async with wired(door) as wire:
        episode_id = (await wire.reset())["episode_id"]

        async def rpc(method: str, **params: Any) -> dict[str, Any]:
            message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            told = await wire.ask({"type": "mcp", "data": message})
            assert told["type"] == "mcp"
            data: dict[str, Any] = told["data"]
            return data

        assert [tool["name"] for tool in (await rpc("tools/list"))["result"]["tools"]] == ["submit"]
        assert (await rpc("openenv/session/create"))["result"] == {"session_id": episode_id}
        done = await rpc("tools/call", name="submit", arguments={"answer": ANSWER})
        assert done["result"]["isError"] is False
        assert (await rpc("dance"))["error"]["code"] == -32601
        assert (await wire.step(type="finish"))["reward"] == 1.0


async def test_frames_sent_ahead_are_answered_in_their_order(door: Door) -> None:
    async with wired(door) as wire:
        await wire.send({"type": "state"})
        await wire.send(reset(task=TASK))
        await wire.send(step(type="wait", timeout_s=0.05))
        await wire.send("{")
        kinds = [(await wire.receive())["type"] for _ in range(4)]
        assert kinds == ["state", "observation", "observation", "error"]


async def test_a_socket_that_sends_too_far_ahead_is_closed(open_door: OpenDoor) -> None:
    with open_door(openenv={"max_ahead": 2}) as door:
        async with wired(door) as wire:
            await wire.reset()
            await wire.send(step(type="wait", timeout_s=30))
            for _ in range(4):
                await wire.send({"type": "state"})
            with pytest.raises(ConnectionClosed) as closed:
                await wire.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008


async def test_a_binary_message_ends_the_socket(door: Door) -> None:
    async with wired(door) as wire:
        await wire.connection.send(b"{}")
        with pytest.raises(ConnectionClosed) as closed:
            await wire.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1003


async def test_a_frame_of_too_many_values_is_refused(open_door: OpenDoor) -> None:
    with open_door(control={"max_body_values": 100}) as door:
        async with wired(door) as wire:
            told = await wire.ask(step(type="generate", prompt="x", more=[*range(200)]))
            assert told["data"]["code"] == "VALIDATION_ERROR"
            assert "control.max_body_values" in told["data"]["message"]


async def test_a_frame_over_the_limit_is_refused(open_door: OpenDoor) -> None:
    with open_door(control={"max_body_bytes": 1024}) as door:
        async with wired(door) as wire:
            told = await wire.ask(step(type="generate", prompt="x" * 2000))
            assert told["data"]["code"] == "VALIDATION_ERROR"
            assert "control.max_body_bytes" in told["data"]["message"]
