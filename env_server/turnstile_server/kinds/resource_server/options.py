"""Options of the grader ``resource_server``: a server that speaks NeMo-Gym's protocol, and the row it judges by.

What must hold: this server calls no address that a task file, a row or a request names. Only a source's own text
names one, and whoever writes that runs this server. So the options are made by a source, never read from a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import httpx
from pydantic import Field

from turnstile_server.grading.bounds import GradingBounds
from turnstile_server.kinds.resource_server.tools import ResourceTools
from turnstile_server.own_tools.names import NamedTool, name_problem
from turnstile_server.settings import GradingSettings
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tools.protocol import ToolSpec

PARAMS = "responses_create_params"


class ResourceServerOptions(GraderOptions):
    """A resource server's ``POST /verify`` gives the reward."""

    parts: ClassVar[bool] = True
    grader: Literal["resource_server"]
    url: str = Field(description="Address of the resource server, without `/verify`.")
    row: dict[str, Any] = Field(description="The row, which is sent as it is.")

    @classmethod
    def of_entry(cls, entry: Mapping[str, object]) -> Self:
        """Raises ValueError: text from outside names no address that this server calls."""
        raise ValueError(
            "resource servers are named by a source, `rows:PATH?verifier=URL`, and in no task, because the server "
            "would call whatever address a task names"
        )

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Those that the server has for an agent."""
        return tools_of(self.row[PARAMS])

    @property
    def tools_of(self) -> str | None:
        return "a resource server" if self.tools else None

    def open_tools(self, settings: GradingSettings) -> ResourceTools:
        timeout_s, most = (
            settings.resource_server_timeout_s,
            settings.bounds_of(GradingBounds).max_resource_session_bytes,
        )
        return ResourceTools(self.url, self.row, self.tools, timeout_s, most)


def tools_of(params: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """The functions of a row's parameters. Raises ValueError, which names the one that is wrong."""
    given = params.get("tools") or []
    if not isinstance(given, list):
        raise ValueError("it is no list")
    found = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ValueError(f"{index}: {kind!r:.60} is no function with a name")
        schema = _without_nulls(tool.get("parameters") or {})
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise ValueError(f"{index}: its parameters are no JSON Schema of an object")
        found.append(ToolSpec(tool["name"], str(tool.get("description") or ""), {"type": "object", **schema}))
    problem = name_problem(NamedTool(spec.name, f"item {index}") for index, spec in enumerate(found))
    if problem is not None:
        raise ValueError(problem)
    return tuple(found)


def _without_nulls(value: object) -> Any:
    """Parquet writes a null for every field that another row has."""
    match value:
        case dict():
            return {name: _without_nulls(each) for name, each in value.items() if each is not None}
        case list():
            return [_without_nulls(each) for each in value]
    return value


def server_address(text: str) -> str:
    """The address as requests are made of it. Raises ValueError."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is no address: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{text!r} is no address like http://HOST:PORT")
    if url.userinfo:
        raise ValueError("an address with a user or a password, which messages would show")
    if url.query or url.fragment:
        raise ValueError(f"{text!r} has a query or a fragment; `/seed_session` and `/verify` are put to its end")
    return str(url).rstrip("/")
