"""``@tool`` for the methods of a world: the decorator of own tools, where they run left out, because it is given.

A world's tools run on the host, with the world's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

from turnstile_server.own_tools import tool as own_tool

MethodT = TypeVar("MethodT", bound=Callable[..., object])


@overload
def tool(method: MethodT, /) -> MethodT: ...


@overload
def tool(
    *,
    name: str | None = None,
    title: str | None = None,
    timeout_s: float | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    idempotent: bool | None = None,
    open_world: bool | None = None,
) -> Callable[[MethodT], MethodT]: ...


def tool(
    method: MethodT | None = None,
    /,
    *,
    name: str | None = None,
    title: str | None = None,
    timeout_s: float | None = None,
    read_only: bool | None = None,
    destructive: bool | None = None,
    idempotent: bool | None = None,
    open_world: bool | None = None,
) -> MethodT | Callable[[MethodT], MethodT]:
    """Declares a method as a tool of the agent: ``@tool``, or ``@tool(name=…)``. The method itself is not changed.

    Its docstring is what the model reads, its annotations are the schema. The options are those of own tools
    (``docs/own-tools.md``).
    """
    mark = own_tool(
        where="host",
        name=name,
        title=title,
        timeout_s=timeout_s,
        read_only=read_only,
        destructive=destructive,
        idempotent=idempotent,
        open_world=open_world,
    )
    return mark if method is None else mark(method)
