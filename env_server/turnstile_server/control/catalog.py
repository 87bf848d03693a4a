"""``GET /tasks``, ``GET /agents`` and ``GET /sandboxes``: what a trainer can choose, and where it would run.

Hidden tests and solutions are not shown.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from turnstile.models import AgentInfo, AgentList, SandboxInfo, TaskInfo, TaskPage
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.control.body import JSON, cursor_position
from turnstile_server.sandboxes.protocol import SandboxProvider
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.model import Task

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
        cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = page_size
    ) -> Response:
        start = cursor_position(cursor) or 0
        found = tuple(islice(tasks, start, start + limit))
        more = start + limit < len(tasks)
        page = TaskPage(tasks=tuple(map(task_info, found)), cursor=str(start + limit) if more else None)
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
    )
