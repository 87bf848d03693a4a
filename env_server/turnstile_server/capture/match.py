"""Which turn a call continues: hash chain to find candidates, comparison to verify, a typed break if neither.

Parent = the deepest turn whose whole path *and reply* the call repeats. Everything after it, foreign or edited
assistant messages included, is context. Ties (turns with equal paths and equal replies) go by call ids, then
reasoning, then the latest written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnstile.models import Break, BreakAt, BreakReason, Message
from turnstile_server.capture.compare import Schemas, Verdict, compare_foreign, compare_reply
from turnstile_server.capture.keys import Group, Key, chain

if TYPE_CHECKING:
    from turnstile_server.capture.tree import Node


@dataclass(frozen=True, slots=True)
class Match:
    """Where a call belongs. ``echo``: names of the cosmetic differences of the parent's echoed reply.

    ``broken``: why the call is not simply the next one on a known path; None for the first call, a
    continuation, a sibling, or a branch that puts no words in the model's mouth.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    echo: tuple[str, ...]
    broken: Break | None


@dataclass(frozen=True, slots=True)
class Found:
    """The parent, how many messages of the call its path covers, and how many groups."""

    node: Node | None
    consumed: int
    groups: int
    echo: tuple[str, ...] = ()


def find_parent(
    groups: Sequence[Group], schemas: Schemas, tools_key: str, by_end: Mapping[Key, Sequence[Node]]
) -> Found:
    """The deepest verified turn among those whose end key occurs in the call's chain."""
    ends: list[tuple[int, Key]] = []
    key = tools_key.encode()
    for index, item in enumerate(groups):
        key = chain(key, item.message)
        if item.message.role == "assistant" and key in by_end:
            ends.append((index, key))
    for index, key in reversed(ends):
        verified: list[tuple[Node, Verdict]] = []
        for node in by_end[key]:
            verdict = _verify_path(node, groups[: index + 1], schemas)
            if verdict.edited is None:
                verified.append((node, verdict))
        if verified:
            echoed = groups[index].message
            node, verdict = max(verified, key=lambda pair: _preference(pair[0], pair[1], echoed))
            return Found(node, groups[index].end, index + 1, tuple(sorted(verdict.cosmetic)))
    return Found(None, 0, 0)


def _verify_path(node: Node, groups: Sequence[Group], schemas: Schemas) -> Verdict:
    """Compares the whole stored path with ``groups``; the verdict on the last reply, or the first edit."""
    end = len(groups)
    last: Verdict | None = None
    at: Node | None = node
    while at is not None:
        start = end - len(at.groups)
        if start < 0:
            return Verdict(edited="length")
        verdict = _compare_groups(at, groups[start:end], schemas)
        if verdict.edited is not None:
            return verdict
        if last is None:
            last = verdict
        end, at = start, at.parent
    return Verdict(edited="length") if end or last is None else last


def _compare_groups(node: Node, groups: Sequence[Group], schemas: Schemas) -> Verdict:
    for stored, incoming in zip(node.groups[:-1], groups[:-1], strict=True):
        verdict = compare_foreign(stored.message, incoming.message)
        if verdict.edited is not None:
            return verdict
    return compare_reply(node.groups[-1].message, groups[-1].message, schemas)


def _preference(node: Node, verdict: Verdict, echoed: Message) -> tuple[int, int, int, int]:
    ids = tuple(call.id for call in echoed.tool_calls)
    same_ids = bool(ids) and ids == tuple(call.id for call in node.groups[-1].message.tool_calls)
    same_reasoning = not any(kind.value.startswith("reasoning") for kind in verdict.cosmetic)
    return (same_ids, same_reasoning, node.delivery == "written", node.turn.seq)


def explain_break(
    groups: Sequence[Group], schemas: Schemas, tools_key: str, found: Found, roots: Sequence[Node]
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
class _Nearest:
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


def _nearest_path(groups: Sequence[Group], schemas: Schemas, tools_key: str, roots: Sequence[Node]) -> _Nearest:
    def closeness(nearest: _Nearest) -> tuple[int, bool, bool]:
        return (nearest.at, nearest.at_reply, nearest.tools_key == tools_key)

    best: _Nearest | None = None
    pending = [(root, 0) for root in reversed(roots)]
    while pending:
        node, start = pending.pop()
        nearest = _diverge(node, groups, start, schemas)
        if nearest is None:
            end = start + len(node.groups)
            if node.children and end < len(groups):
                pending.extend((child, end) for child in reversed(node.children))
                continue
            nearest = _Nearest(end, "", False, node.depth + 1, False, node.turn.tools_key)
        if best is None or closeness(nearest) > closeness(best):
            best = nearest
    assert best is not None  # the caller checked that there are roots
    return best


def _diverge(node: Node, groups: Sequence[Group], start: int, schemas: Schemas) -> _Nearest | None:
    """Where the call leaves this node's part of the path; None when it agrees with all of it."""
    reply_at = len(node.groups) - 1
    for offset, stored in enumerate(node.groups):
        index = start + offset
        if index >= len(groups):
            return _Nearest(index, "", False, node.depth, offset == reply_at, node.turn.tools_key)
        incoming = groups[index].message
        verdict = (
            compare_reply(stored.message, incoming, schemas)
            if offset == reply_at
            else compare_foreign(stored.message, incoming)
        )
        if verdict.edited is not None:
            return _Nearest(index, verdict.edited, offset == reply_at, node.depth, False, node.turn.tools_key)
    return None


def _at(groups: Sequence[Group], index: int, path: str) -> BreakAt:
    index = min(index, len(groups) - 1)
    item = groups[index]
    return BreakAt(message=item.start, path=path, kind=item.message.role)
