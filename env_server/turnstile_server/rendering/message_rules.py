"""What a chat template does with messages that models were not taught to expect, and what is done about it.

Agents write system text in mid-conversation, two system messages, ``developer`` messages, two user messages in a
row, and text behind a tool's result. Templates keep such text in its place, move it to the front, leave it out
without a word, or refuse it. So each template is probed at start, and a message that it would not keep in its
place is written in another way that it does keep:

- ``developer`` text that is not kept is system text.
- Leading system messages that are not all kept are joined into one. Where a template takes no system message at
  all, they stand before the first user's text.
- System text in mid-conversation that is not kept is a user message in ``<system>`` tags.
- User messages in a row that are refused are joined into one.
- User text behind a tool's result that is refused stands behind that result, in the same message.

What a message becomes depends on it and on the messages between two replies alone. So it is the same at a first
render, in a continuation, and when a conversation is rendered anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any, Protocol

from turnstile.models import Message, ToolCall
from turnstile_server.errors import InvalidRequest

SYSTEM_ROLES = frozenset({"system", "developer"})
SEPARATOR = "\n\n"


class Rewritten(StrEnum):
    """The ways in which messages were written differently, by the names under which they are counted."""

    DEVELOPER_AS_SYSTEM = "developer_as_system"
    SYSTEM_JOINED = "system_joined"
    SYSTEM_AS_USER = "system_as_user"
    USERS_JOINED = "users_joined"
    USER_BEHIND_RESULT = "user_behind_result"
    RESULT_AS_USER = "result_as_user"
    TOOLS_AS_TEXT = "tools_as_text"
    """``rendering.tools_text`` shows the tools, and not the chat template."""
    CALLS_LEFT_OUT = "calls_left_out"
    """Of an earlier reply, rendered anew: the template writes no calls, or only the first of several."""
    TEXT_BESIDE_CALL = "text_beside_call"
    """Of an earlier reply, rendered anew: the template leaves out the text beside a call, or takes it for
    reasoning."""


@dataclass(frozen=True, slots=True)
class MessageRules:
    """What a template keeps in its place. Each is True where it does."""

    system: bool = True
    several_systems: bool = True
    late_system: bool = True
    developer: bool = True
    users_in_a_row: bool = True
    user_behind_result: bool = True
    results: bool = True

    def changes(self) -> tuple[Rewritten, ...]:
        """The ways in which messages will be written differently, if they come."""
        kept = {
            Rewritten.DEVELOPER_AS_SYSTEM: self.developer,
            Rewritten.SYSTEM_JOINED: self.several_systems,
            Rewritten.SYSTEM_AS_USER: self.system and self.late_system,
            Rewritten.USERS_JOINED: self.users_in_a_row,
            Rewritten.USER_BEHIND_RESULT: self.user_behind_result,
            Rewritten.RESULT_AS_USER: self.results,
        }
        return tuple(way for way, is_kept in kept.items() if not is_kept)

    def __and__(self, other: MessageRules) -> MessageRules:
        """What both templates keep."""
        return MessageRules(
            self.system and other.system,
            self.several_systems and other.several_systems,
            self.late_system and other.late_system,
            self.developer and other.developer,
            self.users_in_a_row and other.users_in_a_row,
            self.user_behind_result and other.user_behind_result,
            self.results and other.results,
        )

    def arranged(self, messages: Sequence[Message], *, begins: bool) -> tuple[list[Message], frozenset[Rewritten]]:
        """The messages as the template keeps them, and what was written differently. ``begins``: they are the
        beginning of a conversation; else they follow a reply."""
        done: list[Message] = []
        used: set[Rewritten] = set()
        for is_reply, group in groupby(messages, lambda message: message.role == "assistant"):
            if is_reply:
                done += group
                continue
            done += self._between_replies(list(group), used, begins=begins and not done)
        return done, frozenset(used)

    def _between_replies(self, messages: list[Message], used: set[Rewritten], *, begins: bool) -> list[Message]:
        leading = self._leading(messages, used) if begins else []
        rest = messages[len(list(_leading_systems(messages))) :] if begins else messages
        done = leading
        for message in rest:
            kept = self._late(message, used) if message.role in SYSTEM_ROLES else self._result(message, used)
            last = done[-1] if done else None
            if kept.role != "user" or last is None:
                done.append(kept)
            elif last.role == "user" and not self.users_in_a_row:
                used.add(Rewritten.USERS_JOINED)
                done[-1] = _joined(last, kept)
            elif last.role == "tool" and not self.user_behind_result:
                used.add(Rewritten.USER_BEHIND_RESULT)
                done[-1] = _joined(last, kept)
            else:
                done.append(kept)
        return done

    def _leading(self, messages: Sequence[Message], used: set[Rewritten]) -> list[Message]:
        systems = [self._role_kept(message, used) for message in _leading_systems(messages)]
        if len(systems) > 1 and not self.several_systems:
            used.add(Rewritten.SYSTEM_JOINED)
            systems = [replace(systems[0], content=SEPARATOR.join(each.content for each in systems))]
        if self.system:
            return systems
        if systems:
            used.add(Rewritten.SYSTEM_AS_USER)
        if self.users_in_a_row:
            return [_as_user(message) for message in systems]
        # Before the first user's text, as such templates themselves put it there.
        return [Message("user", SEPARATOR.join(message.content for message in systems))] if systems else []

    def _late(self, message: Message, used: set[Rewritten]) -> Message:
        if self.late_system:
            return self._role_kept(message, used)
        used.add(Rewritten.SYSTEM_AS_USER)
        return _as_user(message)

    def _result(self, message: Message, used: set[Rewritten]) -> Message:
        if message.role != "tool" or self.results:
            return message
        used.add(Rewritten.RESULT_AS_USER)
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")

    def _role_kept(self, message: Message, used: set[Rewritten]) -> Message:
        if message.role != "developer" or self.developer:
            return message
        used.add(Rewritten.DEVELOPER_AS_SYSTEM)
        return replace(message, role="system")


def _leading_systems(messages: Sequence[Message]) -> Iterable[Message]:
    for message in messages:
        if message.role not in SYSTEM_ROLES:
            return
        yield message


def _as_user(message: Message) -> Message:
    return Message("user", f"<system>\n{message.content}\n</system>")


def _joined(first: Message, second: Message) -> Message:
    return replace(first, content=f"{first.content}{SEPARATOR}{second.content}")


def callers_texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The texts of system, developer and user messages, which a template is to write as they are."""
    return [message["content"] for message in messages if message["role"] not in ("assistant", "tool")]


class Renderable(Protocol):
    """What the probes ask of a template."""

    def __call__(self, messages: Sequence[Message]) -> str:
        """The rendered text. Raises InvalidRequest where the template refuses the messages."""
        ...


def probe_rules(render: Renderable) -> MessageRules:
    """The rules of a template, found by rendering short conversations in which every text is a word of its own."""

    def kept(*messages: Message) -> bool:
        try:
            text = render(messages)
        except InvalidRequest:
            return False
        return in_order(text, [message.content for message in messages if message.role != "assistant"])

    def all_kept(*conversations: tuple[Message, ...]) -> bool:
        return all(kept(*conversation) for conversation in conversations)

    first, later, reply = (
        Message("user", "probeuserone"),
        Message("user", "probeusertwo"),
        Message("assistant", "ok"),
    )
    system, more = Message("system", "probesystemone"), Message("system", "probesystemtwo")
    developer, said = Message("developer", "probedeveloper"), Message("developer", "probedevelopertwo")
    calling = Message("assistant", "", tool_calls=(ToolCall("probe", "{}", "call_0"),))
    result = Message("tool", "proberesult", tool_call_id="call_0")
    results = kept(first, calling, result)
    late = [(first, reply, more, later), (system, first, reply, more, later), (first, reply, later, more)]
    if results:
        late.append((system, first, calling, result, more))
    return MessageRules(
        # Some put it before the last user's text: then it moves with every turn.
        system=all_kept((system, first), (system, first, reply, later)),
        several_systems=kept(system, more, first),
        late_system=all_kept(*late),
        developer=all_kept((developer, first), (system, developer, first))
        and (not kept(first, reply, more, later) or kept(first, reply, said, later)),
        users_in_a_row=all_kept((first, later), (first, reply, first, later)),
        user_behind_result=not results or kept(first, calling, result, later),
        results=results,
    )


def in_order(text: str, parts: Iterable[str]) -> bool:
    """True where ``parts`` stand in ``text`` one behind another, white space around them aside; as JSON's strings
    where a template writes them so."""
    position = 0
    for part in parts:
        wanted = part.strip()
        found = text.find(wanted, position)
        if found < 0:
            wanted = json.dumps(wanted, ensure_ascii=False)[1:-1]
            found = text.find(wanted, position)
        if found < 0:
            return False
        position = found + len(wanted)
    return True
