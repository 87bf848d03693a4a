"""``GET /tasks``, ``GET /agents`` and ``GET /sandboxes``: what a trainer can choose, and where it would run.

Hidden tests and solutions are not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Query
from starlette.responses import Response

from turnstile.models import AgentInfo, AgentList, SandboxInfo, TaskInfo, TaskPage
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.control.body import JSON, cursor_position
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.selection import TaskSelection

MAX_PAGE = 1000
"""Ceiling of ``GET /tasks?limit=``."""


def build_catalog_router(
    tasks: TaskCatalog,
    agents: AgentRegistry,
    installed: Callable[[AgentSpec], bool],
    sandboxes: SandboxProvider,
    page_size: int,
) -> APIRouter:
    router = APIRouter()

    @router.get("/tasks")
    async def task_page(
        cursor: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = page_size,
        where: Annotated[list[str] | None, Query()] = None,
        shard: str | None = None,
        shuffle: int | None = None,
        epoch: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        selection = TaskSelection.parse(where or (), shard, shuffle, epoch)
        start = cursor_position(cursor) or 0
        # In a thread: rows of large sets are read from disk.
        page = await anyio.to_thread.run_sync(_page, tasks, selection, start, limit)
        return Response(page.model_dump_json(), media_type=JSON)

    @router.get("/agents")
    async def agent_list() -> Response:
        listed = AgentList(agents=tuple(agent_info(spec, installed(spec)) for spec in agents))
        return Response(listed.model_dump_json(), media_type=JSON)

    @router.get("/sandboxes")
    async def sandbox_info() -> Response:
        found = SandboxInfo(
            kind=sandboxes.name,
            isolated=sandboxes.isolated,
            description=sandboxes.description,
            missing=sandboxes.missing,
        )
        return Response(found.model_dump_json(), media_type=JSON)

    return router


def _page(tasks: TaskCatalog, selection: TaskSelection, start: int, limit: int) -> TaskPage:
    selected = tasks.select(selection)
    found = tuple(task_info(tasks.get(task_id)) for task_id in selected.ids[start : start + limit])
    more = start + limit < len(selected.ids)
    cursor = str(start + limit) if more else None
    return TaskPage(tasks=found, cursor=cursor, total=len(selected.ids), digest=selected.digest)


def task_info(task: Task) -> TaskInfo:
    return TaskInfo(
        id=task.id,
        instruction=task.instruction,
        graded_by=tuple(sorted(task.graders, reverse=True)),
        trust=task.trust,
        needs_sandbox=task.needs_sandbox,
        image=task.image,
        difficulty=task.difficulty,
        tags=task.tags,
        metadata=task.metadata,
    )


def agent_info(spec: AgentSpec, installed: bool) -> AgentInfo:
    return AgentInfo(
        name=spec.name,
        version=spec.version,
        summary=spec.summary,
        installed=installed,
        uses_tools=spec.uses_tools,
        user=spec.user,
        resumes=spec.can_resume,
    )
