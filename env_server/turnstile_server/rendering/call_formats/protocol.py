"""The seam for call formats: how a model writes its tool calls.

A reply is shown as it comes until something stands there that may begin a call (``openings``). From there on it is
held until the reply ends, and read as a whole (``read``): where a call ends is often decided only by what follows
it, so nothing may be shown before that. A reply that comes in pieces and the same reply in one can therefore not
differ. Formats that mark up everything would hold all of it, so theirs is shown as far as nothing can change it
(``SettlingFormat``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from turnstile.models import ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas


@dataclass(frozen=True, slots=True)
class Opening:
    """A literal that may begin a call. ``first``: only where no visible text stands before it."""

    text: str
    first: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """Text for the agent."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Reasoning, in formats that write it between calls and text."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A call that was read. ``notes``: the liberties that were taken (``ParseNote``, or a format's own words)."""

    call: ToolCall
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unread:
    """What began as a call and cannot be read in one way only: shown as text, tags included. ``status``: why."""

    text: str
    status: ParseStatus


Segment = Shown | Thought | Called | Unread


@runtime_checkable
class CallFormat(Protocol):
    """The form of the tool calls in a model's text. Pure and stateless: one instance serves all calls at once."""

    @property
    def openings(self) -> tuple[Opening, ...]:
        """What may begin a call."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """The literals that mean something in this format, the openings among them.

        One that is an added token of the vocabulary counts only as that token; any other counts wherever the
        model writes it.
        """
        ...

    @property
    def frames_text(self) -> bool:
        """True where the format marks up text too, so that replies to calls without tools are read as well."""
        ...

    def read(self, text: str, offered: ToolSchemas, *, ended: bool) -> list[Segment]:
        """The segments of ``text``, a reply from an opening to its end. Does not raise.

        ``ended``: the model ended the reply itself; False where it was cut. No text is lost: what is no call is in
        a ``Shown``, ``Thought`` or ``Unread``, but for the markup around calls that were read. The arguments of a
        call are a JSON object, as the exact slice that the model wrote where its form is JSON.
        """
        ...

    def own_id(self, call: ToolCall, index: int) -> str | None:
        """The id that this model's context has for ``call``, the ``index``-th (from 0) of the conversation.

        None where the agent's id does. For calls whose own id is not known: the model did not write them.
        """
        ...


@runtime_checkable
class SettlingFormat(CallFormat, Protocol):
    """A format whose marks say where a message of text begins and ends, so that it is shown while it comes. For
    vocabularies in which each mark is one token."""

    def settled(self, text: str, offered: ToolSchemas) -> tuple[list[Segment], str]:
        """The segments of a held reply that are the same however it goes on, and the text that stays held. Where
        there are none, nothing but a further mark changes that.

        ``read`` of what stays held, with all that follows, gives the segments that ``read`` of the whole gives
        behind these; texts may be cut in two.
        """
        ...
