"""Which task a ``reset`` without one begins: by the seed as in Gymnasium, else in the catalogue's order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gymnasium.utils import seeding
from openenv.core import GenericEnvClient
from openenv_support import REPLY_S, base_url, wired

from control_support import Door, OpenDoor, one_process
from training_support import trainer_server
from turnstile.gym import AgentEnv
from turnstile.models.draw import generator_of
from turnstile_server.tasks.catalog import TaskCatalog

pytestmark = pytest.mark.anyio

IDS = tuple(f"task-{number}" for number in range(7))
SEEDS = (0, 1, 3, 12345, 2**40)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tasks") / "seven.yaml"
    answer = "answer: {kind: exact, value: '42'}"
    lines = [f"- {{id: {name}, instruction: Solve {name}., {answer}}}\n" for name in IDS]
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="module")
def seven(open_door: OpenDoor, tasks: Path) -> Iterator[Door]:
    with open_door(tasks={"sources": [str(tasks)]}) as running:
        assert [task["id"] for task in httpx.get(f"{base_url(running)}/tasks").json()["tasks"]] == list(IDS)
        yield running


async def of_socket(door: Door, *resets: dict[str, Any]) -> list[str]:
    """The tasks of a socket's resets, one after another."""
    async with wired(door) as wire:
        found = []
        for parameters in resets:
            told = await wire.ask({"type": "reset", "data": parameters})
            assert told["type"] == "observation", told
            found.append((await wire.ask({"type": "state"}))["data"]["task_id"])
        return found


async def of_http(door: Door, path: str, body: dict[str, Any]) -> str:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
        told = (await http.post(path, json=body)).json()
        episode_id = told["result"]["session_id"] if path == "/mcp" else told["observation"]["episode_id"]
        if path == "/mcp":  # a session without parameters begins with its first call
            await http.post("/mcp", json=rpc_message("tools/list", session_id=episode_id))
        state: dict[str, Any] = (await http.get("/state", params={"episode_id": episode_id})).json()
        await http.post(f"/episodes/{episode_id}/cancel")
        found: str = state["task_id"]
        return found


def rpc_message(method: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def session(**params: Any) -> dict[str, Any]:
    return rpc_message("openenv/session/create", **params)


def of_gymnasium(seed: int, resets: int) -> list[str]:
    """What ``AgentEnv`` chooses: one reset with the seed, then resets without."""
    generator, _ = seeding.np_random(seed)
    found = []
    for number in range(resets):
        found.append(IDS[int(generator.integers(len(IDS)))])
        if number:
            generator.integers(2**31)
    return found


async def test_a_stored_task_is_read_in_a_thread_before_its_instruction_is_shown(
    seven: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    async def prefetch(_: TaskCatalog, task_id: str | None) -> None:
        asked.append(task_id)

    monkeypatch.setattr(TaskCatalog, "prefetch", prefetch)
    assert await of_socket(seven, {"task_id": "task-3"}) == ["task-3"]
    assert asked == ["task-3"]  # for the episode, whose record has what the observation shows


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_seed_chooses_the_same_task_on_every_path_as_in_gymnasium(seven: Door, seed: int) -> None:
    [expected] = of_gymnasium(seed, 1)
    assert await of_socket(seven, {"seed": seed}) == [expected]
    assert await of_http(seven, "/reset", {"seed": seed}) == expected
    assert await of_http(seven, "/mcp", session(seed=seed)) == expected


async def test_resets_after_one_with_a_seed_go_on_by_it_as_in_gymnasium(seven: Door) -> None:
    expected = of_gymnasium(3, 6)
    assert len(set(expected)) > 1
    assert await of_socket(seven, {"seed": 3}, *[{}] * 5) == expected


@pytest.mark.slow
@one_process
async def test_without_a_seed_tasks_come_in_the_order_of_the_catalogue(open_door: OpenDoor, tasks: Path) -> None:
    with open_door(tasks={"sources": [str(tasks)]}) as door:
        assert await of_socket(door, {}, {}) == [IDS[0], IDS[1]]
        assert await of_http(door, "/reset", {}) == IDS[2]
        assert await of_http(door, "/mcp", session()) == IDS[3]
        assert await of_socket(door, {"task_id": IDS[0]}, {}) == [IDS[0], IDS[4]]
        assert await of_socket(door, {}, {}, {}) == [IDS[5], IDS[6], IDS[0]]


async def test_the_published_client_resets_with_nothing_and_with_a_seed(seven: Door) -> None:
    async with GenericEnvClient(base_url=base_url(seven)) as env:
        assert (await env.reset()).observation["instruction"].startswith("Solve task-")
        assert (await env.reset(seed=3)).observation["instruction"] == f"Solve {of_gymnasium(3, 1)[0]}."
        assert (await env.reset(seed=None)).observation["status"] == "running"


@pytest.mark.parametrize("seed", [-1, -(2**127), 2**128 - 1])
async def test_every_seed_that_an_episode_may_have_chooses_a_task(seven: Door, seed: int) -> None:
    assert await of_socket(seven, {"seed": seed}, {"seed": seed}) == 2 * await of_socket(seven, {"seed": seed})


def test_the_generator_of_a_seed_is_gymnasium_s() -> None:
    for seed in SEEDS:
        theirs, _ = seeding.np_random(seed)
        assert generator_of(seed).integers(2**62, size=4).tolist() == theirs.integers(2**62, size=4).tolist()


@pytest.mark.slow
async def test_a_server_without_tasks_says_what_to_do(
    open_door: OpenDoor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnstile_server.backends.SHIPPED", tmp_path)
    with open_door() as door:
        async with wired(door) as wire:
            for parameters in ({}, {"seed": 3}):
                told = await wire.ask({"type": "reset", "data": parameters})
                assert (told["type"], told["data"]["code"]) == ("error", "VALIDATION_ERROR")
                assert "no tasks to choose from" in told["data"]["message"]
                assert "--tasks" in told["data"]["message"]
        async with httpx.AsyncClient(base_url=base_url(door), timeout=REPLY_S) as http:
            assert (await http.post("/reset", json={})).status_code == 422
            opened = (await http.post("/mcp", json=session())).json()["result"]["session_id"]
            for message in (session(seed=3), rpc_message("tools/list", session_id=opened)):
                refused = (await http.post("/mcp", json=message)).json()["error"]
                assert (refused["code"], refused["data"]["type"]) == (-32602, "invalid_value")


@pytest.mark.slow
def test_the_gymnasium_environment_and_openenv_begin_the_same_tasks(
    tiny_model: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sources = {"sources": [str(tasks)]}
    with trainer_server(
        tiny_model, tmp_path_factory.mktemp("data"), sandboxes={"kind": "local"}, tasks=sources
    ) as server:
        url = f"{server.url}/k/{server.key}"
        env = AgentEnv(server.url, key=server.key, agent="plain-loop", info_ids=True, max_prompt_tokens=8192)
        client = GenericEnvClient(base_url=url).sync()
        with client:
            theirs, ours = [], []
            for seed in (3, None, None, 11):
                _, info = env.reset(seed=seed)
                episode = httpx.get(f"{url}/episodes/{info['episode_id']}").json()
                theirs.append((episode["task"]["id"], episode["seed"]))
                begun = client.reset(seed=seed)
                episode = httpx.get(f"{url}/episodes/{begun.observation['episode_id']}").json()
                ours.append((episode["task"]["id"], episode["seed"]))
        env.close()
    assert ours == theirs
