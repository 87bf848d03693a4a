"""Settings of the fleet: how calls are spread over several engines, queued, resumed and moved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile_server.settings.section import BoundedSection


class FleetSettings(BoundedSection):
    """The fleet ([workers](engines/workers.md)): the engines behind one server, each a worker of it, and the calls
    that wait for them."""

    adaptive: bool = Field(
        True,
        description="Whether the number of calls that a worker is given follows its own load (cache in use, "
        "retractions, queue); false: always `engine.max_connections`.",
    )
    cache_fill: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a worker's prefix cache that the conversations of the episodes may fill that take "
        "turns on it. The rest is for what they sample next, and for what others left there.",
    )
    hang_s: float = Field(
        60.0,
        gt=0,
        description="A worker that has calls, and for so long does not tell its load although it takes requests, "
        "hangs (its scheduler stands still): it is down. Longer than the longest step of the engine. Calls that a "
        "worker that is down has said nothing of since then are given up there, and sent to another one if no "
        "token has left.",
    )
    max_waiting: int = Field(
        16_384, ge=1, description="Model calls that wait for a place on a worker; more are 429."
    )
    no_worker_s: float = Field(
        60.0,
        ge=0,
        description="How long calls wait while no worker serves (all down or fenced); then they are 503.",
    )
    on_abort: Literal["resume", "keep"] = Field(
        "resume",
        description="A generation that the engine aborts (a pause with mode `abort`) is resumed with its own "
        "tokens, or ends and keeps what it has (an interrupted turn, untrained by default).",
    )
    drain_s: float = Field(
        120.0,
        ge=0,
        description="Time for the calls of a worker that is removed; then they go on elsewhere or fail.",
    )
    sleep_wait_s: float = Field(
        600.0, ge=0, description="How long `sleep` waits for the calls that run; then it is refused (409)."
    )
    update_idle_s: float = Field(
        300.0,
        gt=0,
        description="Time between two pieces of a weight update; then it is cancelled, so that a trainer that "
        "died does not leave the engines paused.",
    )
    pause_alarm_s: float = Field(
        120.0, gt=0, description="`/ready` is 503 while a pause has lasted longer than this."
    )
