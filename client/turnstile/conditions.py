"""The conditions by which clients choose among recorded episodes. Data only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from pydantic import ValidationError

from turnstile import errors
from turnstile.models import EpisodeFilter, EpisodeStatus, Fault
from turnstile.models.faults import fault_text


class EpisodeConditions(TypedDict, total=False):
    """Which episodes are meant: all conditions that are given must hold. Fields as in ``EpisodeFilter``."""

    status: EpisodeStatus | str | None
    group_id: str | None
    run_id: str | None
    in_run: bool | None
    train_step: int | None
    task: str | None
    tag: str | None
    agent: str | None
    error_type: str | None
    fault: Fault | str | None
    version: str | None
    graded: bool | None
    reward_min: float | None
    reward_max: float | None
    breaks: str | None
    min_turns: int | None
    stale: bool | None
    created_after: float | None
    created_before: float | None
    text: str | None
    metadata: Sequence[str]


def condition_params(conditions: EpisodeConditions) -> Mapping[str, str | list[str]]:
    """The query of the conditions. Raises InvalidRequest, naming what is wrong."""
    try:
        wanted = EpisodeFilter.model_validate(conditions)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in found["loc"])
        raise errors.InvalidRequest(f"{place}: {fault_text(found)}") from error
    given = wanted.model_dump(mode="json", exclude_none=True)
    return {name: list(value) if isinstance(value, list) else _text(value) for name, value in given.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
