"""A task that is a Python class, over OpenEnv: its instruction, its tools, and the user who talks."""

from __future__ import annotations

import pytest
from openenv_support import wired

from control_support import OpenDoor
from local import ROOT

pytestmark = pytest.mark.anyio


async def test_a_step_that_submits_shows_what_the_user_says_and_is_not_done(open_door: OpenDoor) -> None:
    source = str(ROOT / "examples" / "worlds" / "refund_desk.py")
    with open_door(tasks={"sources": [source]}) as door:
        async with wired(door) as wire:
            observation = await wire.reset(task={"id": "refund-1"}, seed=1)
            assert observation["instruction"].startswith("You work at the refund desk")
            listed = await wire.step(type="list_tools")
            assert [tool["name"] for tool in listed["observation"]["tools"]] == ["submit", "list_orders", "refund"]

            asked = await wire.step(type="call_tool", tool_name="submit", arguments={"answer": "What is it?"})
            assert asked["done"] is False
            said = asked["observation"]["result"]
            assert said.startswith("The user replies: It is the ")
            item = said.removeprefix("The user replies: It is the ").removesuffix(".")

            orders = (await wire.step(type="call_tool", tool_name="list_orders", arguments={}))["observation"]
            (order,) = [part for part in orders["result"].split("}") if f'"item": "{item}"' in part]
            order_id = order.split('"id": "')[1].split('"')[0]
            await wire.step(type="call_tool", tool_name="submit", arguments={"answer": "Shall I?"})
            await wire.step(type="call_tool", tool_name="refund", arguments={"order_id": order_id})
            over = await wire.step(type="call_tool", tool_name="submit", arguments={"answer": "Done."})
            assert (over["observation"]["result"], over["done"]) == ("The conversation is over.", False)
            finished = await wire.step(type="finish")
            assert (finished["done"], finished["reward"]) == (True, 1.0)
