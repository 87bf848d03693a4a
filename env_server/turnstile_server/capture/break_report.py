"""The messages of breaks: what a call had where it left the known path, and what was known there.

A turn records the reason and the place of its break (``breaks``). The messages are found again in the tree, as it
was before the turn: on the path that agrees with the call for longest. This is for people to read, and decides
nothing; a call that ran at the same time may have seen another tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from turnstile.models import BreakAt, BreakEntry, BreakReason, Message
from turnstile_server.capture.breaks import COMPARED_GROUPS, path_groups
from turnstile_server.capture.compare import compare_foreign
from turnstile_server.capture.keys import SYSTEM_ROLES, MessageGroup, group
from turnstile_server.capture.node import Node
from turnstile_server.capture.tree import Turns


def broken_turns(tree: Turns) -> list[Node]:
    """The episode's own turns with a break, in commit order."""
    return [node for node in tree if node.turn.break_ is not None and not node.inherited]


def break_entry(tree: Turns, node: Node) -> BreakEntry:
    """The break of one of ``broken_turns``, with its messages as far as they can be found."""
    broken = node.turn.break_
    assert broken is not None
    entry = BreakEntry(
        turn_id=node.turn_id,
        seq=node.seq,
        reason=broken.reason,
        at=broken.at,
        continues=broken.continues,
    )
    if broken.at is None:
        return entry
    call, first_new = _call_groups(node)
    at = _group_at(call, first_new, broken.at)
    truncated = broken.reason is BreakReason.HISTORY_TRUNCATED
    if broken.continues is not None and broken.continues in tree:
        repeated = tree[broken.continues]
        stored = path_groups(repeated)
        found = _Place(repeated, stored[at].message if at < len(stored) else None)
    else:
        found = _known_place(tree.roots, [item.message for item in call], at + truncated, node.seq)
    incoming = None if truncated else call[at].message
    known_turn_id = None if found.node is None else found.node.turn_id
    return entry.model_copy(update={"known_turn_id": known_turn_id, "known": found.message, "incoming": incoming})


def _call_groups(node: Node) -> tuple[list[MessageGroup], int]:
    """The groups of the call, placed in its messages, and the first that it added to its parent's path."""
    messages: Sequence[Message] = node.turn.new_messages
    above: list[MessageGroup] = []
    if node.parent is not None:
        above = path_groups(node.parent)
        if messages and messages[0].role == "assistant":
            messages = (above.pop().message, *messages)
    starts = list(accumulate((item.end - item.start for item in above), initial=0))
    placed = [
        MessageGroup(at, at + item.end - item.start, item.message) for at, item in zip(starts, above, strict=False)
    ]
    added = [
        MessageGroup(starts[-1] + item.start, starts[-1] + item.end, item.message) for item in group(messages)
    ]
    return placed + added, len(above)


def _group_at(call: Sequence[MessageGroup], first_new: int, at: BreakAt) -> int:
    """The index of the group that begins at the message.

    An agent may have sent a stored reply as several messages; then all behind it lie further on than the tree
    knows, and the last group before the place that has the recorded role is meant.
    """
    index = max((index for index, item in enumerate(call) if item.start <= at.message), default=0)
    same_role = (i for i in range(index, first_new - 1, -1) if call[i].message.role == at.kind)
    return next(same_role, index)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place on a stored path. ``node``: the turn that has it; ``message``: None behind the path's end."""

    node: Node | None
    message: Message | None


def _known_place(roots: Sequence[Node], call: Sequence[Message], at: int, before: int) -> _Place:
    """The stored message at group ``at`` of the path, of turns with a ``seq`` below ``before``, that agrees with
    the call for longest; of several the one that differs there, then the latest."""
    best: tuple[tuple[int, int, bool, int], _Place] | None = None
    pending = [(root, 0, 0) for root in roots if root.seq < before]
    looked = 0
    while pending and looked <= COMPARED_GROUPS:
        node, start, strange = pending.pop()
        here = _compared(node, call, start, at, strange)
        looked += here.looked
        differs = here.message is not None and (
            at >= len(call) or compare_foreign(here.message, call[at]).edited is not None
        )
        rank = (here.agrees, -here.strange, differs, node.seq)
        if best is None or rank > best[0]:
            best = rank, _Place(node, here.message)
        for child in node.children:
            begins = start + len(node.groups) - child.merged_with_parent
            if child.seq < before and begins <= min(here.agrees, at):
                pending.append((child, begins, here.strange))
    return _Place(None, None) if best is None else best[1]


@dataclass(frozen=True, slots=True)
class _Agreement:
    agrees: int
    """Groups from the root on in which path and call agree, ``at`` at most."""
    strange: int
    """Number of these groups that are system messages and differ."""
    message: Message | None
    """The path's message at ``at``, if it agrees up to there and the node has it."""
    looked: int


def _compared(node: Node, call: Sequence[Message], start: int, at: int, strange: int) -> _Agreement:
    for offset, stored in enumerate(node.groups):
        index = start + offset
        if index == at:
            return _Agreement(index, strange, stored.message, offset + 1)
        if index >= len(call) or not _alike(stored.message, call[index]):
            return _Agreement(index, strange, None, offset + 1)
        strange += stored.message.content != call[index].content and call[index].role in SYSTEM_ROLES
    return _Agreement(start + len(node.groups), strange, None, len(node.groups))


def _alike(stored: Message, incoming: Message) -> bool:
    """More tolerant than matching, which has the tools' schemas and the agent's volatile patterns."""
    if stored.role != incoming.role:
        return False
    if stored.role in SYSTEM_ROLES:
        return True
    calls = [[call.name for call in message.tool_calls] for message in (stored, incoming)]
    return calls[0] == calls[1] and stored.content.strip() == incoming.content.strip()
