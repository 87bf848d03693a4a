"""Settings of the fleet: how calls are spread over several engines, queued, resumed and moved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from turnstile_server.settings.section import Section


class FleetSettings(Section):
    """The fleet ([workers](engines/workers.md)): the engines behind one server, each a worker of it, and the calls
    that wait for them."""

    adaptive: bool = Field(
        True,
        description="Whether the number of calls that a worker is given follows its own load (cache in use, "
        "retractions, queue); false: always `engine.max_connections`.",
    )
    start_calls: int = Field(
        16, ge=1, description="Calls that a worker is given at once before its load is known."
    )
    min_calls: int = Field(1, ge=1, description="Calls that a worker is given at once however full it is.")
    min_episodes: int = Field(
        2,
        ge=1,
        description="Episodes that take turns on a worker however little of their prompts its prefix cache keeps. "
        "With `adaptive` as many do as it keeps; the others wait with their next call.",
    )
    cache_fill: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a worker's prefix cache that the conversations of the episodes may fill that take "
        "turns on it. The rest is for what they sample next, and for what others left there.",
    )
    idle_episode_s: float = Field(
        30.0, gt=0, description="An episode without a model call for so long gives its turn on a worker up."
    )
    load_interval_s: float = Field(0.5, gt=0, le=60, description="How often a busy worker is asked for its load.")
    health_interval_s: float = Field(
        2.0, gt=0, le=600, description="How often a worker is asked whether it lives."
    )
    health_timeout_s: float = Field(10.0, gt=0, description="Time for the answer.")
    health_failures: int = Field(
        3,
        ge=1,
        description="Failures in a row after which a worker is down. A broken call counts as all of them. It "
        "serves again as soon as it answers and has the current weights.",
    )
    hang_s: float = Field(
        60.0,
        gt=0,
        description="A worker that has calls, and for so long does not tell its load although it takes requests, "
        "hangs (its scheduler stands still): it is down. Longer than the longest step of the engine. Calls that a "
        "worker that is down has said nothing of since then are given up there, and sent to another one if no "
        "token has left.",
    )
    load_factor: float = Field(
        1.25,
        ge=1,
        description="A new episode is not placed on a worker with more than this multiple of the mean number of "
        "calls.",
    )
    move_after_s: float = Field(
        2.0,
        ge=0,
        description="A call whose worker is full waits this long for it, for the sake of its prefix cache; then "
        "it goes to any worker that has room.",
    )
    remembered_episodes: int = Field(
        65_536, ge=1, description="Episodes whose worker is remembered, the latest used."
    )
    max_waiting: int = Field(
        16_384, ge=1, description="Model calls that wait for a place on a worker; more are 429."
    )
    starving_s: float = Field(
        60.0, ge=0, description="A call that has waited this long goes before all others, whatever its priority."
    )
    no_worker_s: float = Field(
        60.0,
        ge=0,
        description="How long calls wait while no worker serves (all down or fenced); then they are 503.",
    )
    failovers: int = Field(
        3, ge=0, description="How often a call of which no token has left is sent again when its worker fails."
    )
    busy_pause_s: float = Field(
        0.5,
        ge=0,
        description="Before a call that a busy engine refused (429, 503) is sent again; doubled each time.",
    )
    on_abort: Literal["resume", "keep"] = Field(
        "resume",
        description="A generation that the engine aborts (a pause with mode `abort`) is resumed with its own "
        "tokens, or ends and keeps what it has (an interrupted turn, untrained by default).",
    )
    max_resumes: int = Field(
        32, ge=0, description="How often one generation is resumed; then it ends and keeps what it has."
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
    catch_up_s: float = Field(
        10.0,
        gt=0,
        description="How often a worker that missed a weight update is given it again (from its folder).",
    )
    pause_alarm_s: float = Field(
        120.0, gt=0, description="`/ready` is 503 while a pause has lasted longer than this."
    )
