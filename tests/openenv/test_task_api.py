"""OpenEnv's Task API, and ``reset(split=…, index=…)``, which counts as it does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openenv_support import base_url, wired

from control_support import Door, OpenDoor
from turnstile.models.draw import draw_position, generator_of
from turnstile_server.control.openenv.task_api import MAX_TASKS

pytestmark = pytest.mark.anyio
TASKS = "\n".join(
    f"{{id: {name}, instruction: Say {name}., answer: {{kind: exact, value: '{name}'}}, metadata: {{{split}}}}}"
    for name, split in (("a", "split: train"), ("b", ""), ("c", "split: test"), ("d", "split: hard"), ("e", ""))
)


@pytest.fixture(scope="module")
def door(open_door: OpenDoor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    source: Path = tmp_path_factory.mktemp("tasks") / "tasks.yaml"
    source.write_text("\n".join(f"- {line}" for line in TASKS.splitlines()))
    with open_door(tasks={"sources": [str(source)]}) as running:
        yield running


@pytest.fixture
async def http(door: Door) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=base_url(door), timeout=60) as client:
        yield client


async def asked(http: httpx.AsyncClient, route: str, **body: Any) -> Any:
    answer = await http.post(f"/turnstile/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(tasks: list[dict[str, Any]]) -> str:
    return "".join(task["id"] for task in tasks)


async def test_the_catalogue_is_read_by_split_and_index(http: httpx.AsyncClient) -> None:
    assert (await http.get("/list_environments")).json() == ["turnstile"]
    assert (await http.get("/Turnstile/splits")).json() == [
        {"name": "train", "type": "train"},
        {"name": "test", "type": "test"},
        {"name": "hard", "type": "validation"},
    ]
    listed = await asked(http, "tasks", split="train")
    assert (ids(listed["tasks"]), listed["env_name"]) == ("abe", "turnstile")
    assert await asked(http, "num_tasks", split="train") == {"num_tasks": 3}
    task = (await asked(http, "task", split="test", index=0))["task"]
    assert (task["id"], task["instruction"]) == ("c", "Say c.")
    assert "answer" not in task
    assert ids((await asked(http, "task_range", split="train", start=1))["tasks"]) == "be"
    assert ids((await asked(http, "task_range", split="train", start=-1, stop=None))["tasks"]) == "e"


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("other/task", {"split": "train", "index": 0}, 404, "'turnstile'"),
        ("turnstile/task", {"split": "train", "index": 3}, 400, "has 3 tasks"),
        ("turnstile/task", {"split": "train", "index": -1}, 400, "counted from 0"),
        ("turnstile/num_tasks", {"split": "dev"}, 400, "there are: train, test, hard"),
        ("turnstile/num_tasks", {"split": "train", "index": 0}, 422, "index"),
        ("turnstile/task", {"split": "train"}, 422, "index"),
    ],
)
async def test_what_there_is_not_is_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = await http.post(f"/{path}", json=body)
    assert answer.status_code == status
    assert said in answer.text


@pytest.mark.slow
async def test_a_catalogue_beyond_one_answer_is_read_in_ranges(open_door: OpenDoor, tmp_path: Path) -> None:
    source = tmp_path / "tasks.jsonl"
    count = MAX_TASKS + 1
    source.write_text("\n".join(json.dumps({"id": f"t{number}", "instruction": "x"}) for number in range(count)))
    with open_door(tasks={"sources": [str(source)]}) as running:
        async with httpx.AsyncClient(base_url=base_url(running), timeout=60) as http:
            assert len((await asked(http, "tasks", split="train"))["tasks"]) == MAX_TASKS
            assert await asked(http, "num_tasks", split="train") == {"num_tasks": count}
            last = (await asked(http, "task_range", split="train", start=1))["tasks"]
            assert (len(last), last[-1]["id"]) == (MAX_TASKS, f"t{MAX_TASKS}")
            refused = await http.post("/turnstile/task_range", json={"split": "train"})
            assert (refused.status_code, "ask in pieces" in refused.text) == (400, True)


async def test_a_reset_that_names_no_task_leaves_the_episode_as_it_is(door: Door) -> None:
    async with wired(door) as wire:
        begun = await wire.reset()
        told = await wire.ask({"type": "reset", "data": {"split": "dev"}})
        assert told["data"]["code"] == "VALIDATION_ERROR"
        state = (await wire.ask({"type": "state"}))["data"]
        assert (state["episode_id"], state["done"]) == (begun["metadata"]["episode_id"], False)


async def test_a_reset_takes_the_task_that_split_and_index_name(door: Door) -> None:
    async with wired(door) as wire:

        async def task(**parameters: Any) -> str:
            told = await wire.ask({"type": "reset", "data": parameters})
            assert told["type"] == "observation", told
            data = told["data"]
            assert data["metadata"] == data["observation"]["metadata"]
            found: str = data["metadata"]["task_id"]
            return found

        assert await task(split="train", index=2, seed=7) == "e"
        assert await task(index=3) == "d"
        seeded = draw_position(generator_of(7), 3)
        assert await task(split="train", seed=7) == "abe"[seeded]
    async with wired(door) as wire:
        assert [await task(split="train") for _ in range(4)] == ["a", "b", "e", "a"]
        for wrong, said in (
            ({"split": "dev"}, "no split 'dev'"),
            ({"split": "test", "index": 1}, "has 1 tasks"),
            ({"index": -1}, "index"),
            ({"task_id": "a", "index": 0}, "name one task"),
        ):
            told = await wire.ask({"type": "reset", "data": wrong})
            assert told["data"]["code"] == "VALIDATION_ERROR"
            assert said in told["data"]["message"]
        assert await task(task_id="c") == "c"


@pytest.mark.slow
async def test_a_step_has_a_number_only_where_a_validator_wants_one(door: Door, open_door: OpenDoor) -> None:
    async with wired(door) as wire:
        await wire.reset()
        assert (await wire.step(type="list_tools"))["reward"] is None
    with open_door(openenv={"step_reward": 0.0}) as other:
        async with wired(other) as wire:
            begun = await wire.ask({"type": "reset", "data": {"task": {"instruction": "x"}}})
            assert begun["data"]["reward"] is None
            assert (await wire.step(type="list_tools"))["reward"] == 0.0
            ended = await wire.step(type="finish")
            assert (ended["done"], ended["reward"]) == (True, None)  # a task without a grader: never a made-up 0
