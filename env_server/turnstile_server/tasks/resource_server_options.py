"""What the grader ``resource_server`` takes: a server that speaks NeMo-Gym's protocol, and the row it judges by.

What must hold: this server calls no address that a task file, a row or a request names. Only a source's own text
names one, and whoever writes that runs this server. So the options are made by a source, never read from a task.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import httpx
from pydantic import Field

from turnstile_server.tasks.part import GraderOptions


class ResourceServerOptions(GraderOptions):
    """A resource server's ``POST /verify`` gives the reward."""

    parts: ClassVar[bool] = True
    grader: Literal["resource_server"]
    url: str = Field(description="Address of the resource server, without `/verify`.")
    row: dict[str, Any] = Field(description="The row, which is sent as it is.")


def only_of_a_source(value: object) -> object:
    """Text from outside names no address that this server calls. Raises ValueError."""
    if not isinstance(value, ResourceServerOptions):
        raise ValueError(
            "resource servers are named by a source, `rows:PATH?verifier=URL`, and in no task, because the server "
            "would call whatever address a task names"
        )
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
