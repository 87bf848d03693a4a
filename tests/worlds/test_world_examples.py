"""The worlds of examples/, played over MCP in whole episodes, and the page that explains worlds."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client

from control_support import OpenDoor
from local import ROOT
from turnstile import AsyncClient
from turnstile.client import AsyncNewEpisodeHandle
from turnstile.models import Episode, TaskRef
from turnstile_server.settings import WorldSettings
from turnstile_server.testing.world_play import WorldAgent, WorldServer, world_server

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
async def shop() -> AsyncIterator[WorldServer]:
    async with world_server(EXAMPLES / "shop" / "shop.py") as running:
        yield running


async def got(agent: WorldAgent, tool: str, **arguments: Any) -> Any:
    """What a tool returned, as values."""
    result = await agent.call(tool, **arguments)
    assert not result.is_error, result.text
    structured = result.structured or {}
    return structured.get("result", structured)


async def serve(agent: WorldAgent) -> None:
    """Reads the errand and runs it, with what the tools say."""
    customer = await got(agent, "show_customer")
    (open_order,) = [order["id"] for order in customer["orders"] if order["status"] == "open"]
    if "Cancel" in agent.instruction or "Exchange" in agent.instruction:
        await agent.call("cancel_order", order_id=open_order)
    if "Cancel" in agent.instruction:
        return
    wanted = re.search(r"Order (\d+) of ([\w ]+)\.|order one ([\w ]+) instead", agent.instruction)
    assert wanted is not None
    name, quantity = wanted[2] or wanted[3], int(wanted[1] or 1)
    (product,) = [each["id"] for each in await got(agent, "find_products", text=name) if each["name"] == name]
    await agent.call("add_to_cart", product_id=product, quantity=quantity)
    order = await got(agent, "place_order")
    assert order["total"] > 0


@pytest.mark.parametrize("errand", ["buy", "cancel", "exchange"])
async def test_an_agent_that_runs_the_errand_is_right(shop: WorldServer, errand: str) -> None:
    for seed in range(3):
        assert (await shop.play(serve, task=f"shop-{errand}-{seed}")).reward == 1.0
    assert (await shop.play(serve, task=f"shop-{errand}-0", seed=77)).reward == 1.0


async def nothing(agent: WorldAgent) -> None:
    pass


async def serve_twice(agent: WorldAgent) -> None:
    await serve(agent)
    await agent.call("add_to_cart", product_id=1)
    await agent.call("place_order")


async def cancel_a_wrong_order_too(agent: WorldAgent) -> None:
    await serve(agent)
    for order in (await got(agent, "show_customer"))["orders"]:
        await agent.call("cancel_order", order_id=order["id"])


@pytest.mark.parametrize(
    "agent", [nothing, serve_twice, cancel_a_wrong_order_too], ids=lambda agent: agent.__name__
)
async def test_an_agent_that_does_nothing_or_too_much_scores_zero(shop: WorldServer, agent: Any) -> None:
    for errand in ("buy", "exchange"):
        assert (await shop.play(agent, task=f"shop-{errand}-1")).reward == 0.0


async def test_a_cart_that_was_tried_out_and_emptied_costs_nothing(shop: WorldServer) -> None:
    async def agent(agent: WorldAgent) -> None:
        await agent.call("add_to_cart", product_id=3, quantity=5)
        await agent.call("empty_cart")
        await serve(agent)

    assert (await shop.play(agent, task="shop-buy-0")).reward == 1.0


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("add_to_cart", {"product_id": 99}, "there is no product 99"),
        ("add_to_cart", {"product_id": 1, "quantity": 0}, "from 1 to 100"),
        ("place_order", {}, "the cart is empty"),
        ("cancel_order", {"order_id": 999}, "the customer has no order 999"),
        ("find_products", {"text": 3}, "wrong arguments for find_products"),
    ],
)
async def test_what_cannot_be_done_is_told_to_the_agent(
    shop: WorldServer, tool: str, arguments: dict[str, Any], said: str
) -> None:
    async def agent(agent: WorldAgent) -> None:
        result = await agent.call(tool, **arguments)
        assert result.is_error
        assert said in result.text

    assert (await shop.play(agent, task="shop-buy-0")).reward == 0.0


async def test_shops_that_are_open_at_once_have_databases_of_their_own(shop: WorldServer) -> None:
    ready, go = [], anyio.Event()

    async def together(agent: WorldAgent) -> None:
        ready.append(agent)
        if len(ready) == 6:
            go.set()
        await go.wait()

    episodes: dict[str, Episode] = {}

    async def one(task: str, *, serves: bool) -> None:
        async def agent(agent: WorldAgent) -> None:
            await together(agent)
            for _ in range(3):
                assert (await got(agent, "show_customer"))["cart"] == []
                await agent.call("add_to_cart", product_id=2)
                await agent.call("empty_cart")
            if serves:
                await serve(agent)

        episodes[f"{task} {serves}"] = await shop.play(agent, task=task)

    async with anyio.create_task_group() as tasks:
        for task in ("shop-buy-0", "shop-cancel-0", "shop-exchange-0"):
            for serves in (True, False):
                tasks.start_soon(lambda task=task, serves=serves: one(task, serves=serves))
    assert {name: episode.reward for name, episode in episodes.items()} == {
        name: float(name.endswith("True")) for name in episodes
    }
    assert len(episodes) == 6


async def test_the_number_game_rewards_a_search_and_not_a_guess() -> None:
    async def search(agent: WorldAgent) -> None:
        low, high = 1, 1000
        while low <= high:
            middle = (low + high) // 2
            said = (await agent.call("guess", number=middle)).text
            if said == "Right!":
                return
            low, high = (middle + 1, high) if "higher" in said else (low, middle - 1)

    async def guess(agent: WorldAgent) -> None:
        for _ in range(20):
            await agent.call("guess", number=random.Random(1).randint(1, 1000))

    async with world_server(EXAMPLES / "worlds" / "number_game.py") as server:
        for seed in range(3):
            assert (await server.play(search, task="number-1000", seed=seed)).reward == 1.0
        assert (await server.play(guess, task="number-1000")).reward == 0.0


async def refund(agent: WorldAgent, *, ask: bool, too_much: bool = False) -> None:
    said = (await agent.submit("What do you want to give back?")).user
    assert said is not None
    item = said.removeprefix("It is the ").removesuffix(".")
    if ask:
        await agent.submit("Shall I refund it?")
    for order in await got(agent, "list_orders"):
        if order["item"] == item or too_much:
            await agent.call("refund", order_id=order["id"])
    await agent.submit("Done.")


async def test_the_refund_desk_wants_the_right_refund_and_a_yes_before_it() -> None:
    async with world_server(EXAMPLES / "worlds" / "refund_desk.py") as server:
        for task in ("refund-0", "refund-1", "refund-2"):
            assert (await server.play(lambda agent: refund(agent, ask=True), task=task)).reward == 1.0
        unasked = await server.play(lambda agent: refund(agent, ask=False))
        assert unasked.reward_components == {"state": 1.0, "policy": 0.0}
        all_of_them = await server.play(lambda agent: refund(agent, ask=True, too_much=True))
        assert all_of_them.reward_components == {"state": 0.0, "policy": 1.0}


def test_openenv_and_tau_style_worlds_take_about_fifty_lines() -> None:
    for name in ("number_game.py", "refund_desk.py"):
        text = (EXAMPLES / "worlds" / name).read_text()
        body = text[text.index("class ") :]
        assert len(body.splitlines()) <= 55, name


async def test_the_page_about_worlds_is_true(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "worlds.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "number_game.py").write_text(blocks[0])
    names: dict[str, Any] = {}
    exec(blocks[1], names)
    async with world_server(tmp_path / "number_game.py") as server:
        assert (await server.play(names["guesses"], task="number-10", seed=3)).reward == 1.0
        for seed in range(5):
            assert (await server.play(names["guesses"], task="number-10", seed=seed)).reward == 1.0
    assert set(re.findall(r"`worlds\.(\w+)`", page)) == set(WorldSettings.model_fields)


@pytest.mark.slow
def test_the_loop_of_ten_lines_on_the_page_cancels_the_order(open_door: OpenDoor, tmp_path: Path) -> None:
    """As a program of its own, against a server with both listeners."""
    page = (ROOT / "docs" / "worlds.md").read_text()
    (program,) = re.findall(r"^```python\n(import anyio\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    with open_door(tasks={"sources": [str(EXAMPLES / "shop" / "shop.py")]}) as door:
        path = tmp_path / "loop.py"
        path.write_text(f"URL, KEY = {door.url!r}, {door.key!r}\n{program}")
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "You serve the customer" in done.stdout
    assert done.stdout.endswith("reward 1.0\n")


async def test_a_function_is_an_agent_of_rollouts_that_begins_when_its_world_is_there(open_door: OpenDoor) -> None:
    async def agent(episode: AsyncNewEpisodeHandle) -> None:
        assert (await episode.status()).status.value == "running"
        headers = {"authorization": f"Bearer {episode.episode_key}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            mcp.Client(streamable_http_client(episode.tool_url or "", http_client=http)) as tools,
        ):
            assert "guess" in [tool.name for tool in (await tools.list_tools()).tools]
            for number in range(1, 5):
                await tools.call_tool("guess", {"number": number})

    source = str(EXAMPLES / "worlds" / "number_game.py")
    with open_door(tasks={"sources": [source]}) as door:
        async with AsyncClient(door.url, key=door.key) as client:
            tasks = [TaskRef(id="number-10")]
            found = [rollout async for rollout in client.rollouts(tasks, agent=agent, n=4, seed=0)]
    assert [rollout.error for rollout in found] == [None] * 4
    hidden = {seed: random.Random(seed).randint(1, 10) for seed in range(4)}
    assert {rollout.episode.seed: rollout.reward for rollout in found if rollout.episode is not None} == {
        seed: float(number <= 4) for seed, number in hidden.items()
    }
