"""The seam for call formats: how a model writes a tool call between two tags."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from turnstile.models import ParseStatus, ToolCall


@runtime_checkable
class CallFormat(Protocol):
    """The form of one tool call in a model's text. Pure and stateless: one instance serves all calls at once."""

    @property
    def opening(self) -> str:
        """The tag before a call, such as ``<tool_call>``. An added token of the vocabulary counts only as that
        token; any other text counts wherever the model writes it."""
        ...

    @property
    def closing(self) -> str:
        """The tag behind a call."""
        ...

    def asked_by(self, template: str) -> bool:
        """True where the chat template, a Jinja text, asks the model for calls of this form."""
        ...

    def parse(self, text: str, known: Collection[str]) -> ToolCall | ParseStatus:
        """The call that ``text``, all that stands between the tags, is; or why it is none. Does not raise.

        ``known``: names of the offered tools. The arguments of the call are JSON text: the exact slice that the
        model wrote, where its form is JSON. Anything but a call is shown to the agent as text, tags included.
        """
        ...
