"""Dialect-free messages and tools: what every dialect is parsed into and written from.

Content is text. A list of text parts is the concatenation of its parts; a string is one part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of an assistant message.

    ``arguments`` is the JSON text exactly as the model wrote it (in a foreign reply: as the agent sent it). ``id``
    is the server's or the agent's; in matching it only breaks ties. ``own_id``: the id that the model itself
    wrote, in formats that have one; the model's context keeps it, agents never see it.
    """

    name: str
    arguments: str
    id: str | None = None
    own_id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``reasoning`` and ``tool_calls`` occur on ``assistant``, ``tool_call_id`` on ``tool``.

    ``name`` is the participant's name where the dialect has one. Absent text is ``""``. ``omitted``: the kinds of
    the parts that the model was not shown (``image``, ``document``, ``audio``, ``video``); each has a text in its
    place in ``content``.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    omitted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool offered to the model.

    ``spec`` is the whole OpenAI envelope ``{"type": "function", "function": {...}}`` with the caller's own
    key order, because chat templates print it as it comes.
    """

    name: str
    spec: Mapping[str, Any] = field(hash=False)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of the arguments; empty when the tool declares none."""
        schema = self.spec.get("function", {}).get("parameters")
        return schema if isinstance(schema, Mapping) else {}
