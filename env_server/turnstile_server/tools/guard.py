"""The path of a call to an own tool: what a user's tool may cost, and what becomes of its faults.

Holds, whatever the tool does: its arguments fit its schema and are bounded; the call ends in time; its exceptions
are results that say what was raised; its result is bounded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import anyio

from turnstile_server.errors import TurnstileError
from turnstile_server.settings import ToolSettings
from turnstile_server.tools.bounds import McpBounds
from turnstile_server.tools.functions import cut_middle
from turnstile_server.tools.protocol import (
    EpisodeTools,
    Progress,
    ServedTool,
    ToolResult,
    ToolSpec,
    WrongArguments,
)

_LOG = logging.getLogger(__name__)

SHOWN_CHARS = 500
"""Characters shown in a result, of an exception's text or of a value that does not fit its schema."""


async def guarded_call(
    tool: ServedTool,
    episode: EpisodeTools,
    arguments: Mapping[str, Any],
    progress: Progress,
    settings: ToolSettings,
) -> ToolResult:
    """Calls an own tool. Raises WrongArguments and TurnstileErrors, as ``ServedTool.call``."""
    spec = tool.spec
    timeout_s = settings.own_timeout_s if spec.timeout_s is None else spec.timeout_s
    result = ToolResult(f"{spec.name} took longer than its limit of {timeout_s:g} s", is_error=True)
    try:
        _check_arguments(spec, arguments, settings)  # inside: a mounted server's schema may be no schema at all
        with anyio.move_on_after(timeout_s):
            result = await tool.call(episode, arguments, progress)
    except (WrongArguments, TurnstileError):
        raise
    except Exception as error:  # noqa: BLE001 - the boundary to a user's code: its fault is a result
        _LOG.exception("own tool %s failed", spec.name, extra={"episode_id": episode.episode_id})
        result = ToolResult(f"{spec.name} failed: {described(error)}", is_error=True)
    return _bounded(spec, result, settings)


def described(error: BaseException) -> str:
    """The exception as the last line of a traceback shows it, cut to ``SHOWN_CHARS``."""
    text = str(error)
    return f"{type(error).__name__}: {text[:SHOWN_CHARS]}" if text else type(error).__name__


def _check_arguments(spec: ToolSpec, arguments: Mapping[str, Any], settings: ToolSettings) -> None:
    size, most = _json_size(arguments), settings.bounds_of(McpBounds).own_max_arguments_bytes
    if size > most:
        raise WrongArguments(f"the arguments for {spec.name} have {size} bytes; the most is {most}")
    problem = schema_problem(spec.input_schema, arguments)
    if problem is not None:
        takes = ", ".join(spec.input_schema.get("properties", {})) or "no arguments"
        raise WrongArguments(f"wrong arguments for {spec.name}: {problem}. It takes {takes}.")


def _json_size(value: Any) -> int:
    """Bytes of a value as JSON. Not by orjson, which refuses integers above 64 bits."""
    return len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace"))


def schema_problem(schema: Mapping[str, Any], value: Any) -> str | None:
    """Error text for a ``value`` that does not fit the JSON Schema; None where it fits. References lead to the
    schema's own definitions only: nothing is fetched."""
    # Imported at the first call of an own tool: a server without any starts quicker.
    from jsonschema import Draft202012Validator  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    validator = Draft202012Validator(schema, registry=Registry())
    found = next(validator.iter_errors(value), None)
    if found is None:
        return None
    where = ".".join(str(part) for part in found.absolute_path)
    said = found.message[:SHOWN_CHARS]
    return f"{where}: {said}" if where else said


def _bounded(spec: ToolSpec, result: ToolResult, settings: ToolSettings) -> ToolResult:
    """``result`` within its bounds: long text is cut in the middle; what cannot be cut is an error."""
    most = settings.own_max_result_bytes
    size = 0 if result.structured is None else _json_size(result.structured)
    size += sum(len(block.model_dump_json()) for block in result.content)
    if size > most:
        return ToolResult(f"the result of {spec.name} has {size} bytes; the most is {most}", is_error=True)
    text = cut_middle(result.text, settings.own_max_text_chars)
    return ToolResult(text, result.is_error, result.structured, result.content)
