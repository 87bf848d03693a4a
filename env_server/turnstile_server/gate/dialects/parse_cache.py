"""The bodies of an episode's calls, each cut where it differs from the ones before.

An agent sends its whole history with every call: the bytes of the last one, and new items behind them. So the
messages of the items that came before are taken from there, and what stands around the history is read only where
it changed. Only the latest call of a few conversations is remembered.

Holds: the result is what reading the whole body would give. A message is taken from an earlier call only where the
body has the same bytes up to the end of its item, in the list that is surely the value of the history's key: the
rest of the body is parsed around it. Where anything is unclear (a key that comes twice, escapes in keys, half a
surrogate pair, what is no JSON), the body is read as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnstile.models import Message
from turnstile_server.gate.dialects.conversations import Conversation, NewItems, Outline
from turnstile_server.gate.dialects.json_lists import continued, find_items, find_list, read_outline
from turnstile_server.gate.dialects.tool_lists import ToolLists
from turnstile_server.http.json_values import Weight, weigh

CONVERSATIONS = 8
"""Histories that are remembered: one for each conversation (sub-agent) that is active."""

REMEMBERED_BYTES = 8 << 20
"""Bytes of bodies that are remembered for an episode and dialect; the oldest are forgotten first."""

REPLIED_TEXTS = 64
"""Texts of the latest replies that are expected to come back; an agent repeats a reply with its next call."""

TOOLS = "tools"
"""The list beside the history that may be long and seldom changes; all dialects call it so."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The start of a body's history (``start``, behind the ``[``; None: not found), and the conversation with
    which it shares the first ``count`` items; ``weight``: the whole body's, where it is known."""

    body: bytes
    start: int | None
    conversation: Conversation | None = None
    count: int = 0
    weight: Weight | None = None

    @property
    def size(self) -> int:
        """Bytes of those items."""
        return 0 if self.conversation is None else self.conversation.end(self.count)

    @property
    def resume(self) -> int:
        """The offset at which the new part begins."""
        return (self.start or 0) + self.size


@dataclass(frozen=True, slots=True)
class BodyParts:
    """A body whose history was found. ``values``: its items behind those of ``place``; ``ends``: of these.
    ``source`` None: ``outline`` is known."""

    place: _Place
    outline: Outline
    source: dict[str, Any] | None
    values: Sequence[Any]
    ends: Sequence[int]


class ParseCache:
    """The histories of one episode in one dialect. Not for several threads at once."""

    def __init__(self) -> None:
        self._tool_lists = ToolLists()
        self._conversations: list[Conversation] = []
        """The one that was used last is the last."""
        self._placed: _Place | None = None
        """The place of the body that was weighed last, while nothing has changed."""
        self._replied: dict[str, str] = {}
        """Texts of replies, each by itself; the latest is the last."""
        self.continued = 0
        """Bodies that continued an earlier one."""

    @property
    def size(self) -> int:
        """Bytes of text that it keeps."""
        return sum(conversation.size for conversation in self._conversations)

    def weigh(self, body: bytes, key: str) -> tuple[Weight, Weight]:
        """The weight of the new part of the body, and of the whole body. The time that it takes grows with the new
        part."""
        self._placed = place = self._place(body, key)
        if place.conversation is None or place.start is None or place.conversation.outline is None:
            whole = weigh(body)
            self._placed = replace(place, weight=whole)
            return whole, whole
        outline, known = place.conversation.outline, place.conversation.weight(place.count)
        end = len(body) - len(outline.tail)
        if body.startswith(outline.head) and place.resume <= end and body.endswith(outline.tail):
            new = weigh(body, place.resume, end)
            return new, new + known + outline.weight
        new = weigh(body, 0, place.start) + weigh(body, place.resume, len(body))
        return new, new + known

    def share(self, tool_lists: ToolLists) -> None:
        """Uses these lists of tools from now on: those of all episodes."""
        self._tool_lists = tool_lists

    def replied(self, reply: Message) -> None:
        """A reply of the episode: the message that repeats it shares its texts, so that they are held once."""
        for text in _texts(reply):
            self._replied.pop(text, None)
            self._replied[text] = text
        while len(self._replied) > REPLIED_TEXTS:
            del self._replied[next(iter(self._replied))]

    def cool(self) -> None:
        """Forgets all, for an episode that rests. Its turns have the messages, packed."""
        self._placed = None
        self._replied.clear()
        self._conversations.clear()

    def adopt(self, other: ParseCache) -> None:
        """Takes over what another cache read in a thread."""
        self._placed = None
        for conversation in other._conversations:
            self._remember(conversation)

    def parts(self, body: bytes, key: str) -> BodyParts | None:
        """The body in parts; None where it must be read as a whole."""
        place, self._placed = self._placed, None
        if place is None or place.body is not body:
            place = self._place(body, key)
        outline = None if place.conversation is None else place.conversation.outline
        likely_end = None if outline is None else len(body) - len(outline.tail)
        if place.start is None or (found := find_items(body, place.resume, likely_end)) is None:
            return None
        ends, end = found
        values = continued(body[place.resume : end], begun=place.count > 0)
        if values is None or len(values) != len(ends):
            return None
        outline = self._known_outline(body, place.start, end)
        if outline is not None:
            return BodyParts(place, outline, None, values, ends)
        head, tail = body[: place.start], body[end:]
        read = read_outline(head, tail, key, TOOLS, self._tool_lists)
        if read is None:
            return None
        source, tools = read
        if tools is not None:
            self._tool_lists.use(tools)
        return BodyParts(place, Outline(head, tail, weigh(head) + weigh(tail), tools), source, values, ends)

    def remember(self, parts: BodyParts, new: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
        """Keeps a body; ``new``: the messages of its new items. Returns all messages."""
        place = parts.place
        before, count = place.conversation, place.count
        new = self._sharing(new)
        if before is None:
            messages = self._interned(new)
            conversation = Conversation(parts.outline)
        elif 2 * count >= len(before):
            messages = before.interned(new, count)
            self._conversations.remove(before)  # this call continues that conversation
            conversation = before
            conversation.keep_first(count)
        else:
            messages = before.interned(new, count)
            conversation = before.first(count)
        conversation.outline = parts.outline
        # Blanks behind the last item have a size, and no other weight.
        weight = None if before is not None or place.weight is None else place.weight - parts.outline.weight
        conversation.extend(NewItems(place.body, place.resume, parts.ends, messages, weight))
        self.continued += count > 0
        self._remember(conversation)
        return tuple(conversation.messages)

    def remember_messages(self, new: Sequence[tuple[Message, ...]]) -> tuple[Message, ...]:
        """Keeps what a body said that was read as a whole. Returns its messages."""
        conversation = Conversation(None)
        conversation.messages += (message for some in self._interned(self._sharing(new)) for message in some)
        self._remember(conversation)
        return tuple(conversation.messages)

    def _sharing(self, new: Sequence[tuple[Message, ...]]) -> Sequence[tuple[Message, ...]]:
        """``new`` with the texts of replies in place of equal ones."""
        return [tuple(map(self._shared, some)) for some in new] if self._replied else new

    def _shared(self, message: Message) -> Message:
        texts = self._replied
        if message.role != "assistant" or not any(text in texts for text in _texts(message)):
            return message
        calls = (replace(call, arguments=texts.get(call.arguments, call.arguments)) for call in message.tool_calls)
        reasoning = message.reasoning
        return replace(
            message,
            content=texts.get(message.content, message.content),
            reasoning=None if reasoning is None else texts.get(reasoning, reasoning),
            tool_calls=tuple(calls),
        )

    def _interned(self, new: Sequence[tuple[Message, ...]]) -> Sequence[tuple[Message, ...]]:
        """``new``, a whole history, with the equal messages of an earlier call in their places."""
        first = list(new[0][:1]) if new else []
        before = next((each for each in reversed(self._conversations) if each.messages[:1] == first), None)
        if before is None or not first:
            return new
        if before.outline is None:
            self._conversations.remove(before)  # its text is not known: this call stands for it
        return before.interned(new, 0)

    def _remember(self, conversation: Conversation) -> None:
        self._placed = None
        self._conversations.append(conversation)
        del self._conversations[:-CONVERSATIONS]
        while len(self._conversations) > 1 and self.size > REMEMBERED_BYTES:
            del self._conversations[0]
        if self.size > REMEMBERED_BYTES:
            conversation.cool()

    def _place(self, body: bytes, key: str) -> _Place:
        """The conversation that the body continues furthest."""
        start: int | None = None
        searched = False
        best: _Place | None = None
        for conversation in reversed(self._conversations):
            outline = conversation.outline
            if outline is None:
                continue
            if body.startswith(outline.head):
                begin = len(outline.head)
            else:
                if not searched:
                    start, searched = find_list(body, key), True
                if start is None:
                    continue
                begin = start
            count = conversation.common(body, begin)
            if best is None or conversation.end(count) > best.size:
                best = _Place(body, begin, conversation if count else None, count)
            if count and count == len(conversation):
                break
        return best or _Place(body, start if searched else find_list(body, key))

    def _known_outline(self, body: bytes, start: int, end: int) -> Outline | None:
        for conversation in reversed(self._conversations):
            outline = conversation.outline
            if (
                outline is not None
                and len(outline.head) == start
                and len(outline.tail) == len(body) - end
                and body.startswith(outline.head)
                and body.endswith(outline.tail)
            ):
                return outline
        return None


def _texts(message: Message) -> list[str]:
    """The texts of an assistant's message that may be long."""
    return [
        text for text in (message.content, message.reasoning, *(c.arguments for c in message.tool_calls)) if text
    ]
