"""Tasks by filter, shard and seed: the same everywhere, each once, and resumed where the stream was left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from turnstile.errors import Conflict, InvalidRequest
from turnstile.models import TaskPage
from turnstile.task_stream import AsyncTaskStream, TaskPageRequest, TaskStream, TaskStreamState
from turnstile_server.control.catalog import build_catalog_router
from turnstile_server.errors import InvalidRequest as RefusedRequest
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.selection import TaskSelection

LEVELS = ("easy", "medium", "hard")
TASKS = [
    Task.model_validate(
        {
            "id": f"t{number}",
            "instruction": "Do it.",
            "difficulty": LEVELS[number % 3],
            "tags": ["odd" if number % 2 else "even", "all"],
            "metadata": {"repo": f"quill/{number % 4}", "fast": number < 5},
        }
    )
    for number in range(25)
]

Fetch = Callable[[TaskPageRequest], TaskPage]


def served_tasks(tasks: Iterable[Task], page_size: int = 4) -> Fetch:
    """``GET /tasks`` as the control API serves it."""
    app = FastAPI()
    unused = cast(Any, None)
    app.include_router(build_catalog_router(TaskCatalog(list(tasks)), unused, unused, unused, page_size))
    http = TestClient(app)

    def fetch(asked: TaskPageRequest) -> TaskPage:
        params = {name: value for name, value in asked.params().items() if value is not None}
        return TaskPage.model_validate_json(http.get("/tasks", params=params).content)

    return fetch


FETCH = served_tasks(TASKS)


def ids(stream: TaskStream, count: int | None = None) -> list[str]:
    return [task.id for _, task in zip(range(10_000 if count is None else count), stream, strict=False)]


def test_without_a_selection_the_tasks_come_in_the_servers_order() -> None:
    assert ids(TaskStream(FETCH, 1, None, {})) == [task.id for task in TASKS]


def test_a_seed_gives_one_order_and_each_epoch_another() -> None:
    seen = ids(TaskStream(FETCH, 2, None, {"shuffle": 7}))
    first, second = seen[:25], seen[25:]
    assert sorted(first) == sorted(second) == sorted(task.id for task in TASKS)
    assert first != second
    assert first != ids(TaskStream(FETCH, 1, None, {"shuffle": 8}))
    # Another server, other pages, and the sources in another order.
    assert ids(TaskStream(served_tasks(reversed(TASKS), page_size=9), 2, None, {"shuffle": 7})) == seen


def test_the_order_of_a_seed_is_part_of_the_format() -> None:
    assert TaskSelection(shuffle=7).ordered(["a", "b", "c", "d", "e"]) == ["e", "a", "d", "c", "b"]


@given(st.integers(1, 30), st.none() | st.integers(-5, 5), st.integers(0, 3))
def test_shards_have_no_task_in_common_and_leave_none_out(count: int, seed: int | None, epoch: int) -> None:
    names = [task.id for task in TASKS]
    shards = [TaskSelection((), (which, count), seed, epoch).ordered(names) for which in range(1, count + 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(names)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("taken", [0, 1, 4, 12, 13, 14, 30])
def test_a_stream_that_is_resumed_goes_on_with_the_next_task_over_epochs_too(taken: int) -> None:
    selection: Any = {"shuffle": 3, "shard": (1, 2), "where": "repo!=quill/9"}
    whole = ids(TaskStream(FETCH, 3, None, selection))
    stream = TaskStream(FETCH, 3, None, selection)
    assert ids(stream, taken) == whole[:taken]
    saved = stream.state().model_dump_json()
    resumed = TaskStream(served_tasks(TASKS, page_size=5), 3, TaskStreamState.model_validate_json(saved), {})
    assert ids(resumed) == whole[taken:]


@pytest.mark.anyio
async def test_the_async_stream_gives_the_same() -> None:
    async def fetch(asked: TaskPageRequest) -> TaskPage:
        return FETCH(asked)

    stream = AsyncTaskStream(fetch, None, None, {"shuffle": 1, "shard": "2/3"})
    seen = [(await anext(stream)).id for _ in range(20)]
    assert seen == ids(TaskStream(FETCH, None, None, {"shuffle": 1, "shard": "2/3"}), 20)
    assert stream.state().epoch == 2


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        (["difficulty=easy"], {0, 3, 6, 9, 12, 15, 18, 21, 24}),
        (["repo=quill/[12]", "tags=odd", "id!=t1*"], {5, 9, 21}),
        (["fast=true", "difficulty!=easy"], {1, 2, 4}),
    ],
)
def test_conditions_choose_by_id_difficulty_tags_and_metadata(where: list[str], wanted: set[int]) -> None:
    assert set(ids(TaskStream(FETCH, 1, None, {"where": where}))) == {f"t{number}" for number in wanted}


@pytest.mark.parametrize(
    ("where", "shard", "said"),
    [
        (["colour=red"], None, "no task has 'colour'; there are difficulty, fast, id, repo, tags"),
        (["repo"], None, "is not `name=pattern`"),
        ([], "5/4", "is not WHICH/COUNT"),
        ([], "0/4", "is not WHICH/COUNT"),
    ],
)
def test_a_selection_that_cannot_be_meant_is_refused(where: list[str], shard: str | None, said: str) -> None:
    with pytest.raises(RefusedRequest, match=r"^(where|shard): ") as refused:
        TaskCatalog(TASKS).select(TaskSelection.parse(where, shard, None, 0))
    assert said in refused.value.message


def test_a_state_of_other_tasks_and_a_selection_of_none_are_errors() -> None:
    stream = TaskStream(FETCH, 1, None, {"shuffle": 1})
    ids(stream, 3)
    with pytest.raises(Conflict, match="not those that this stream began with"):
        next(TaskStream(served_tasks(TASKS[1:]), 1, stream.state(), {}))
    with pytest.raises(InvalidRequest, match="no task of the server"):
        next(TaskStream(FETCH, None, None, {"where": "id=nobody"}))
    with pytest.raises(InvalidRequest, match="give no selection beside it"):
        TaskStream(FETCH, 1, stream.state(), {"shuffle": 2})
    with pytest.raises(InvalidRequest, match="counts from 1"):
        TaskStream(FETCH, 1, None, {"shard": (0, 4)})
