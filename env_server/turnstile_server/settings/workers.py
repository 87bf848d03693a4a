"""Settings of the worker processes: how many there are, when one is started again, how they are asked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from turnstile_server.settings.section import BoundedSection

MAX_WORKERS = 256


def _told_in_one(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """One sentence about what it may be, instead of one for each kind."""
    try:
        return check(value)
    except ValidationError:
        raise ValueError(f"it must be a number from 1 to {MAX_WORKERS}, or auto") from None


WorkerCount = Annotated[Annotated[int, Field(ge=1, le=MAX_WORKERS)] | Literal["auto"], WrapValidator(_told_in_one)]
"""``auto``: as many as this process may use cores."""


class WorkerSettings(BoundedSection):
    """Worker processes ([workers](workers.md)): each is a whole server on one core, and owns its episodes. They
    have one control API."""

    count: WorkerCount = Field(
        1,
        description="How many there are; `auto`: as many as whole cores, by affinity and the container's quota. "
        "1: the server is one process, without these.",
    )
    one_agent_port: bool | None = Field(
        None,
        description="True: agents reach all workers by one port (`gate.port`), through the process in front, "
        "which costs each call a hop. False: each worker has a port of its own, from `gate.port` on. None: one "
        "port where `gate.public_url` is set, because one URL leads to one port.",
    )
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of one worker within five minutes; when one more is needed it is given up: "
        "its episodes are 503 until the server is started again.",
    )
    backoff_ceiling_s: float = Field(30.0, ge=0, description="Longest wait before a restart.")
    wait_s: float = Field(
        8.0,
        ge=0,
        description="A request for a worker that is being started again waits this long; then it is 503 with "
        "`Retry-After`.",
    )
