"""Which turn a call continues: hash chain to find candidates, comparison to verify, a typed break if neither.

Parent = the deepest turn whose whole path *and reply* the call repeats. Everything after it, foreign or edited
assistant messages included, is context. Ties (turns with equal paths and equal replies) go by call ids, then
reasoning (of the last reply, then of the path before it), then the latest written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.models import Break, BreakAt, BreakReason, Message
from turnstile_server.capture.compare import (
    SAME,
    Comparison,
    Cosmetic,
    Schemas,
    compare_foreign,
    compare_reply,
)
from turnstile_server.capture.keys import Key, MessageGroup, chain
from turnstile_server.capture.node import Node


@dataclass(frozen=True, slots=True)
class CallMatch:
    """Where a call belongs. ``echo``: names of the cosmetic differences of the parent's echoed reply.

    ``broken``: why the call is not simply the next one on a known path; None for the first call, a
    continuation, a sibling, or a branch that puts no words in the model's mouth.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    echo: tuple[str, ...]
    broken: Break | None


@dataclass(frozen=True, slots=True)
class EchoMatch:
    """How a call repeats a stored path: the verdict on its last reply, and how many of the path's replies came
    back with their call ids and with their reasoning."""

    last: Comparison
    ids: int
    reasonings: int


Checked = dict[tuple[str, bool], EchoMatch | None]
"""Turn id, and whether its last group was compared too, to how the call repeats the path down to there."""


@dataclass(frozen=True, slots=True)
class ParentMatch:
    """The parent, how the call repeats its path, and how many messages and groups of the call its path covers."""

    node: Node | None
    consumed: int
    groups: int
    echo: EchoMatch | None = None


@dataclass(frozen=True, slots=True)
class PathCache:
    """An earlier call's way down to its parent. A call with the same tools that begins with the same ``messages``
    repeats the path to ``node`` in the same way, so its own walk may start there."""

    tools_key: str
    messages: tuple[Message, ...]
    groups: tuple[MessageGroup, ...]
    node: Node
    echo: EchoMatch

    def begins(self, messages: Sequence[Message], tools_key: str) -> bool:
        """A reply goes on in the assistant messages that follow it, so none may follow ``messages``."""
        count = len(self.messages)
        return (
            self.tools_key == tools_key
            and tuple(messages[:count]) == self.messages
            and (len(messages) == count or messages[count].role != "assistant")
        )


def find_parent(
    groups: Sequence[MessageGroup],
    schemas: Schemas,
    tools_key: str,
    by_end: Mapping[Key, Sequence[Node]],
    known: PathCache | None = None,
) -> ParentMatch:
    """The deepest verified turn among those whose end key occurs in the call's chain.

    Every stored turn is compared at most once, however many candidates share it. ``known`` begins the call: only
    what follows it is hashed and compared.
    """
    ends: list[tuple[int, Key]] = []
    checked: Checked = {}
    key, start = tools_key.encode(), 0
    if known is not None:
        key, start = known.node.end_key, len(known.groups)
        ends.append((start - 1, key))
        checked[known.node.turn.turn_id, True] = known.echo
    for index, item in enumerate(groups[start:], start):
        key = chain(key, item.message)
        if item.message.role == "assistant" and key in by_end:
            ends.append((index, key))
    for index, key in reversed(ends):
        verified: list[tuple[Node, EchoMatch]] = []
        for node in by_end[key]:
            echo = _verify_path(node, groups, schemas, checked)
            if echo is not None:
                verified.append((node, echo))
        if verified:
            node, echo = max(verified, key=lambda pair: _preference(pair[0], pair[1], groups[index].message))
            return ParentMatch(node, groups[index].end, index + 1, echo)
    return ParentMatch(None, 0, 0)


def _verify_path(
    node: Node, groups: Sequence[MessageGroup], schemas: Schemas, checked: Checked
) -> EchoMatch | None:
    """How the call repeats the path to ``node``, None when it does not. ``checked`` remembers, by turn id."""
    unchecked: list[tuple[Node, bool]] = []
    at: Node | None = node
    whole = True
    while at is not None and (at.turn.turn_id, whole) not in checked:
        unchecked.append((at, whole))
        whole = not at.joined
        at = at.parent
    echo = EchoMatch(SAME, 0, 0) if at is None else checked[at.turn.turn_id, whole]
    for item, to_its_end in reversed(unchecked):
        if echo is not None:
            echo = _verify_node(item, groups, schemas, echo, whole=to_its_end)
        checked[item.turn.turn_id, to_its_end] = echo
    return echo


def _verify_node(
    node: Node, groups: Sequence[MessageGroup], schemas: Schemas, before: EchoMatch, *, whole: bool
) -> EchoMatch | None:
    """``whole`` False: without the node's last group, which a joined child compares with its own."""
    part = groups[node.group_count - len(node.groups) : node.group_count]
    if len(part) != len(node.groups):
        return None
    for stored, incoming in zip(node.groups[:-1], part[:-1], strict=True):
        if compare_foreign(stored.message, incoming.message).edited is not None:
            return None
    if not whole:
        return before
    verdict = compare_reply(node.groups[-1].message, part[-1].message, schemas)
    if verdict.edited is not None:
        return None
    return EchoMatch(
        verdict,
        before.ids + _same_ids(node, part[-1].message),
        before.reasonings + _same_reasoning(verdict),
    )


def _same_ids(node: Node, echoed: Message) -> bool:
    ids = tuple(call.id for call in echoed.tool_calls)
    return bool(ids) and ids == tuple(call.id for call in node.groups[-1].message.tool_calls)


def _same_reasoning(verdict: Comparison) -> bool:
    return not verdict.cosmetic & {Cosmetic.REASONING_CHANGED, Cosmetic.REASONING_DROPPED}


def _preference(node: Node, echo: EchoMatch, echoed: Message) -> tuple[int, ...]:
    """The echoed reply decides; where it looks the same (a plain "ok" in two parallel sub-agents), the replies
    before it do."""
    last = (_same_ids(node, echoed), _same_reasoning(echo.last))
    return (*last, echo.ids, echo.reasonings, node.delivery == "written", node.turn.seq)


def explain_break(
    groups: Sequence[MessageGroup], schemas: Schemas, tools_key: str, found: ParentMatch, roots: Sequence[Node]
) -> Break | None:
    """Types the break of a call, and finds its first divergent message.

    Only walks the forest when there is something to explain: a new root in an episode that has turns, or
    assistant messages after the parent's reply.
    """
    foreign = any(item.message.role == "assistant" for item in groups[found.groups :])
    if not roots or (found.node is not None and not foreign):
        return None
    nearest = _nearest_path(groups, schemas, tools_key, roots)
    agrees = nearest.edited == ""
    if agrees and nearest.at == found.groups and found.node is not None:
        return None  # the agent added a reply of its own where the model was never asked
    if agrees and nearest.at == len(groups):
        if nearest.tools_key != tools_key:
            return Break(reason=BreakReason.TOOLS_CHANGED, at=_at(groups, len(groups) - 1, ""))
        if nearest.whole or found.node is not None:
            return None  # a sibling
        return Break(reason=BreakReason.HISTORY_TRUNCATED, at=_at(groups, len(groups) - 1, ""))
    at = _at(groups, nearest.at, nearest.edited)
    if agrees and nearest.tools_key != tools_key:
        return Break(reason=BreakReason.TOOLS_CHANGED, at=at)
    if nearest.at_reply:
        return Break(reason=BreakReason.REPLY_EDITED, at=at)
    if nearest.replies == 0:
        return Break(reason=BreakReason.NEW_CONVERSATION, at=at)
    return Break(reason=BreakReason.HISTORY_EDITED, at=at)


@dataclass(frozen=True, slots=True)
class _NearestPath:
    """The stored path that agrees with the call for longest: it differs at group ``at``."""

    at: int
    edited: str
    """Path inside the divergent message; "" when one of both simply ends."""
    at_reply: bool
    replies: int
    """Replies of the model on the agreeing part."""
    whole: bool
    """The call ends exactly where the model's reply would come."""
    tools_key: str


def _nearest_path(
    groups: Sequence[MessageGroup], schemas: Schemas, tools_key: str, roots: Sequence[Node]
) -> _NearestPath:
    def closeness(nearest: _NearestPath) -> tuple[int, bool, bool]:
        return (nearest.at, nearest.at_reply, nearest.tools_key == tools_key)

    best: _NearestPath | None = None
    pending = [(root, 0) for root in reversed(roots)]
    while pending:
        node, start = pending.pop()
        nearest = _diverge(node, groups, start, schemas)
        end = start + len(node.groups)
        if nearest is None or nearest.at == end - 1:
            pending.extend((child, end - 1) for child in reversed(node.children) if child.joined)
        if nearest is None:
            after = [child for child in node.children if not child.joined]
            if after and end < len(groups):
                pending.extend((child, end) for child in reversed(after))
                continue
            nearest = _NearestPath(end, "", False, node.depth + 1, False, node.turn.tools_key)
        if best is None or closeness(nearest) > closeness(best):
            best = nearest
    assert best is not None  # the caller checked that there are roots
    return best


def _diverge(node: Node, groups: Sequence[MessageGroup], start: int, schemas: Schemas) -> _NearestPath | None:
    """Where the call leaves this node's part of the path; None when it agrees with all of it."""
    reply_at = len(node.groups) - 1
    replies = node.depth - node.joined
    for offset, stored in enumerate(node.groups):
        index = start + offset
        if index >= len(groups):
            return _NearestPath(index, "", False, replies, offset == reply_at, node.turn.tools_key)
        incoming = groups[index].message
        verdict = (
            compare_reply(stored.message, incoming, schemas)
            if offset == reply_at
            else compare_foreign(stored.message, incoming)
        )
        if verdict.edited is not None:
            return _NearestPath(index, verdict.edited, offset == reply_at, replies, False, node.turn.tools_key)
    return None


def _at(groups: Sequence[MessageGroup], index: int, path: str) -> BreakAt:
    index = min(index, len(groups) - 1)
    item = groups[index]
    return BreakAt(message=item.start, path=path, kind=item.message.role)
