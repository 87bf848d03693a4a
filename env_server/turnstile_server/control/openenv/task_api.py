"""OpenEnv's Task API: the catalogue by split and index, as ``reset(split=…, index=…)`` counts it.

Six routes in shapes of the Open Reward Standard (https://huggingface.co/docs/openenv/guides/task-api). A task is
shown as ``GET /tasks`` shows it, so hidden tests and solutions are not. Splits are the label ``split`` of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio.to_thread
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from turnstile_server.control.body import json_response
from turnstile_server.control.catalog import task_info
from turnstile_server.control.openenv.openenv_parts import NAME
from turnstile_server.control.openenv.task_choice import TaskOrder
from turnstile_server.errors import InvalidRequest, NotFound
from turnstile_server.tasks.catalog import TaskCatalog

MAX_TASKS = 1000
"""Tasks of one answer. ``/tasks`` ends there, as the Task API allows, and a longer range is refused; ``num_tasks``
counts them all."""

_TYPES = frozenset({"train", "validation", "test"})


class SplitQuery(BaseModel):
    """Body of ``POST /{env}/tasks`` and ``/num_tasks``."""

    model_config = ConfigDict(extra="forbid")

    split: str


class IndexQuery(SplitQuery):
    """Body of ``POST /{env}/task``."""

    index: int


class TaskRangeQuery(SplitQuery):
    """Body of ``POST /{env}/task_range``: a slice as Python counts it."""

    start: int | None = None
    stop: int | None = None


def build_task_router(catalog: TaskCatalog | None) -> APIRouter:
    """The six routes. Errors: 404 for an environment that is not this one, 400 for a split, index or range."""
    router = APIRouter()
    order = TaskOrder(catalog)

    async def shown(ids: Sequence[str]) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            assert catalog is not None  # without one there are no splits
            return [task_info(catalog.get(task_id)).model_dump(mode="json") for task_id in ids]

        return await anyio.to_thread.run_sync(read)  # rows of large sets are read from disk

    @router.get("/list_environments")
    async def list_environments() -> Response:
        return json_response([NAME])

    @router.get("/{env_name}/splits")
    async def splits(env_name: str) -> Response:
        _checked(env_name)
        return json_response([{"name": name, "type": _type_of(name)} for name in order.splits])

    @router.post("/{env_name}/tasks")
    async def tasks(env_name: str, query: SplitQuery) -> Response:
        _checked(env_name)
        return json_response({"tasks": await shown(order.ids(query.split)[:MAX_TASKS]), "env_name": NAME})

    @router.post("/{env_name}/num_tasks")
    async def num_tasks(env_name: str, query: SplitQuery) -> Response:
        _checked(env_name)
        return json_response({"num_tasks": len(order.ids(query.split))})

    @router.post("/{env_name}/task")
    async def task(env_name: str, query: IndexQuery) -> Response:
        _checked(env_name)
        return json_response({"task": (await shown([order.at(query.split, query.index)]))[0]})

    @router.post("/{env_name}/task_range")
    async def task_range(env_name: str, query: TaskRangeQuery) -> Response:
        _checked(env_name)
        ids = order.ids(query.split)[query.start : query.stop]
        if len(ids) > MAX_TASKS:
            raise InvalidRequest(f"the range has {len(ids)} tasks, an answer at most {MAX_TASKS}: ask in pieces")
        return json_response({"tasks": await shown(ids)})

    return router


def _checked(env_name: str) -> None:
    if env_name.lower() != NAME:
        raise NotFound(f"there is no environment {env_name!r}: this server's is {NAME!r}")


def _type_of(split: str) -> str:
    return split if split in _TYPES else "validation"
