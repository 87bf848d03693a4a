"""A row that a NeMo-Gym resource server verifies, to the fields of a task.

What must hold: of the row only the texts of its input reach an agent or ``GET /tasks``; all of it goes to the
resource server. A row whose dialogue cannot be played as one instruction is refused by name, never cut to fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnstile_server.kinds.resource_server.options import PARAMS, ResourceServerOptions, tools_of
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.rows.convert import task_of_fields
from turnstile_server.tasks.rows.kinds import RowFields
from turnstile_server.tasks.rows.options import RowMapping
from turnstile_server.tasks.rows.row_files import Row
from turnstile_server.tasks.rows.values import RowFault, filled, task_id

_ID_COLUMNS = ("id", "uuid", "instance_id", "task_id")
_ROLES = ("system", "developer", "user")
_OF_A_ROLLOUT = ("response", "reward")
"""Columns of rows that were saved after an earlier rollout. Sent along, they would be taken for this one's."""


@dataclass(frozen=True, slots=True)
class RowVerifier:
    """The resource server that verifies the rows. Only the text of a source names it."""

    url: str
    bounds: tuple[float, float] = (0.0, 1.0)


class VerifiedRowReader:
    """A ``RowReader``."""

    def __init__(self, mapping: RowMapping, verifier: RowVerifier) -> None:
        self._mapping = mapping
        self._verifier = verifier

    def convert(self, row: Row, number: int) -> Task | list[RowFault]:
        """See ``RowReader``."""
        fields = verified_fields(row, number, self._mapping, self._verifier)
        return fields if isinstance(fields, list) else task_of_fields(RowFields(fields))


def verified_fields(
    row: Row, number: int, mapping: RowMapping, verifier: RowVerifier
) -> dict[str, Any] | list[RowFault]:
    """The fields, or everything that is wrong with the row. ``number``: its position."""
    params = _params(row)
    if isinstance(params, str):
        return [(PARAMS, params)]
    faults = list(_refused(params))
    texts = _texts(params, faults)
    if not faults and not any(text.strip() for text in texts):
        faults.append((f"{PARAMS}.input", "it has no text"))
    sent = {name: value for name, value in row.items() if name not in _OF_A_ROLLOUT}
    sent[PARAMS] = params
    try:
        json.dumps(sent, allow_nan=False)
    except (TypeError, ValueError) as error:
        faults.append((None, f"it cannot be sent as JSON: {error}"))
    names = (mapping.columns["id"],) if "id" in mapping.columns else _ID_COLUMNS
    own = next((row[name] for name in names if _is_id(row.get(name))), None)
    values: dict[str, Any] = {
        "id": f"row-{number}" if own is None else task_id(str(own)),
        "instruction": "\n\n".join(texts),
        "grading": {
            "resource_server": ResourceServerOptions(grader="resource_server", url=verifier.url, row=sent)
        },
        "reward": {"bounds": verifier.bounds},
        "metadata": {"kind": "nemo-gym"},
    }
    for field, template in (("image", mapping.image), ("workdir", mapping.workdir)):
        if template is not None:
            try:
                values[field] = filled(template, row)
            except ValueError as error:
                faults.append((field, str(error)))
    return faults or values


def _is_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def _params(row: Row) -> dict[str, Any] | str:
    """The parameters without those that are null, which Parquet writes for every one that another row has; or what
    is wrong with them."""
    found = row.get(PARAMS)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return "not JSON"
    if not isinstance(found, dict):
        return (
            "there is none, and a resource server verifies only rows that have it"
            if found is None
            else ("it is not an object")
        )
    return {name: value for name, value in found.items() if value is not None}


def _refused(params: dict[str, Any]) -> Iterator[RowFault]:
    try:
        tools_of(params)
    except ValueError as error:
        yield f"{PARAMS}.tools", str(error)
    for name in ("prompt", "previous_response_id"):
        if name in params:
            yield f"{PARAMS}.{name}", "it names something that another server keeps"
    text = params.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    if isinstance(wanted, dict) and wanted.get("type") not in (None, "text"):
        yield f"{PARAMS}.text.format", f"no format ({wanted['type']!r:.40}) is forced on the agent's answer here"


def _texts(params: dict[str, Any], faults: list[RowFault]) -> list[str]:
    """``instructions`` and the texts of the input, in their order."""
    texts: list[str] = []
    instructions = params.get("instructions", "")
    if isinstance(instructions, str):
        texts += [instructions] if instructions.strip() else []
    else:
        faults.append((f"{PARAMS}.instructions", "it is not text"))
    given = params.get("input")
    if isinstance(given, str):
        return [*texts, given]
    if not isinstance(given, list):
        faults.append((f"{PARAMS}.input", "there is none" if given is None else "neither text nor messages"))
        return texts
    for index, item in enumerate(given):
        found = _text_of(item)
        if found is None:
            faults.append((f"{PARAMS}.input.{index}", _why_not(item)))
        elif found.strip():
            texts.append(found)
    return texts


def _text_of(item: object) -> str | None:
    """The text of a message; None where the item is none that an instruction can hold."""
    if not isinstance(item, dict) or item.get("type") not in (None, "message") or item.get("role") not in _ROLES:
        return None
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if _is_text(part) else None for part in content]
    return "\n".join(str(part) for part in parts) if all(isinstance(part, str) for part in parts) else None


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_text"


def _why_not(item: object) -> str:
    if not isinstance(item, dict):
        return "it is no message"
    kind = item.get("type")
    if kind not in (None, "message"):
        return f"{kind!r:.60}: dialogues that have begun already cannot be played; only messages are taken"
    role = item.get("role")
    if role == "assistant":
        return "a turn of the assistant: dialogues that have begun already cannot be played"
    if role not in _ROLES:
        return f"the role {role!r:.60} is none of {', '.join(_ROLES)}"
    return "its content is not text alone (text, or a list of `input_text`)"
