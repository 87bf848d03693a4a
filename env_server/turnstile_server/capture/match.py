"""Which turn a call continues: a hash chain finds candidates, a comparison verifies them.

The parent is the deepest turn whose whole path *and reply* the call repeats. Everything behind that reply is
context, assistant messages that are foreign or edited included. Ties, between turns with equal paths and replies,
go by call ids, then by reasoning (of the last reply, then of the replies before it), then to the latest written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.models import Break, Message
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
    """The place of a call in the tree.

    ``echo``: names of the cosmetic differences between the call and the parent's path. ``broken``: why the call
    is not simply the next one on a known path; None for the first call, a continuation, a sibling, or a branch
    that puts no words in the model's mouth. ``request_messages``: ``new_messages`` as they identify the request,
    without volatile text.
    """

    parent: Node | None
    new_messages: tuple[Message, ...]
    echo: tuple[str, ...]
    broken: Break | None
    request_messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class EchoMatch:
    """The repetition of a stored path by a call.

    ``last``: the comparison of the path's last reply. ``ids``, ``reasonings``: how many of the path's replies came
    back with their call ids, and with their reasoning.
    """

    last: Comparison
    ids: int
    reasonings: int


Checked = dict[tuple[str, bool], EchoMatch | None]
"""By turn id, and by whether the turn's last group was compared: how the call repeats the path down to there."""


@dataclass(frozen=True, slots=True)
class ParentMatch:
    """The parent that was found (``node``, None for a new root), and how the call repeats its path (``echo``).
    ``consumed``, ``groups``: messages and groups of the call that the path covers."""

    node: Node | None
    consumed: int
    groups: int
    echo: EchoMatch | None = None


@dataclass(frozen=True, slots=True)
class PathCache:
    """The path that an earlier call repeated, down to its parent ``node``.

    A call with the same tools that begins with the same ``messages`` repeats that path in the same way, so the
    search for its parent may start there.
    """

    tools_key: str
    messages: tuple[Message, ...]
    groups: tuple[MessageGroup, ...]
    node: Node
    echo: EchoMatch

    def begins(self, messages: Sequence[Message], tools_key: str) -> bool:
        """The call begins with this path. An assistant message behind it would belong to the path's last group."""
        count = len(self.messages)
        return (
            self.tools_key == tools_key
            and len(messages) >= count
            and messages[count - 1] == self.messages[-1]  # paths that part do so near their ends
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

    Each stored turn is compared at most once, however many candidates share it. ``known``: a path that the call
    begins with; only what follows it is hashed and compared.
    """
    ends: list[tuple[int, Key]] = []
    checked: Checked = {}
    key, start = tools_key.encode(), 0
    if known is not None:
        key, start = known.node.end.full, len(known.groups)
        ends.append((start - 1, key))
        checked[known.node.turn_id, True] = known.echo
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
    """The call's repetition of the path to ``node``; None when it does not repeat it. Results are cached in
    ``checked``."""
    unchecked: list[tuple[Node, bool]] = []
    at: Node | None = node
    whole = True
    while at is not None and (at.turn_id, whole) not in checked:
        unchecked.append((at, whole))
        whole = not at.merged_with_parent
        at = at.parent
    echo = EchoMatch(SAME, 0, 0) if at is None else checked[at.turn_id, whole]
    for item, to_its_end in reversed(unchecked):
        if echo is not None:
            echo = _verify_node(item, groups, schemas, echo, whole=to_its_end)
        checked[item.turn_id, to_its_end] = echo
    return echo


def _verify_node(
    node: Node, groups: Sequence[MessageGroup], schemas: Schemas, before: EchoMatch, *, whole: bool
) -> EchoMatch | None:
    """Extends ``before`` by one node. ``whole`` False: without the node's last group, because a merged child holds
    it too and compares it."""
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
    """Sort key among candidates. The last reply decides. Where it is the same for all (a plain "ok" of two
    parallel sub-agents), the replies before it decide, then the delivery."""
    last = (_same_ids(node, echoed), _same_reasoning(echo.last))
    return (*last, echo.ids, echo.reasonings, node.delivery == "written", node.seq)
