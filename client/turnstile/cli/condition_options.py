"""An option for every condition by which the API chooses episodes (``EpisodeFilter``), under its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from turnstile.conditions import EpisodeConditions
from turnstile.models import EpisodeFilter

_HELP = {
    "status": "Only episodes of this status.",
    "group_id": "Only episodes of this group.",
    "run_id": "Of this run.",
    "train_step": "Of this training step.",
    "agent": "By this agent.",
    "error_type": "With this type of error.",
    "fault": "Ended by this one's fault.",
    "stale": "Whether it got older than its bound.",
    "min_turns": "With at least so many model calls.",
}
"""Of the fields that say nothing of themselves."""


def with_conditions(command: Callable[..., None]) -> Callable[..., None]:
    """The command with these options before its own; it takes what was given as ``conditions``."""
    own = inspect.signature(command, eval_str=True)
    options = {name: _option(name, field) for name, field in EpisodeFilter.model_fields.items()}

    @wraps(command)
    def with_options(*args: Any, **given: Any) -> None:
        found = {name: given.pop(name) for name in options}
        conditions = {name: value for name, value in found.items() if value not in (None, [])}
        command(*args, conditions=EpisodeConditions(**conditions), **given)  # type: ignore[typeddict-item]

    parts = [each for each in own.parameters.values() if each.name != "conditions"]
    asked = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in options.items()
    ]
    first = [each for each in parts if _is_argument(each)]
    later = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parts if not _is_argument(each)]
    signature = own.replace(parameters=[*first, *asked, *later])
    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in signature.parameters.values()}
    return with_options


def _option(name: str, field: FieldInfo) -> Any:
    """The annotation of a condition's option."""
    flag = "--" + name.replace("_", "-")
    if field.annotation == tuple[str, ...]:
        return Annotated[list[str] | None, typer.Option(flag, metavar="KEY=VALUE", help=field.description)]
    (kind,) = [each for each in get_args(field.annotation) if each is not type(None)]
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    flags = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    return Annotated[kind | None, typer.Option(flags, help=field.description or _HELP[name], show_default=False)]


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(each, typer.models.ArgumentInfo) for each in get_args(parameter.annotation))
