"""Types the break of a call that is not simply the next one on a known path, and finds the message that differs.

A call that continues, repeats or branches off a known path has no break. Any other call has one. It is explained
by the stored path that agrees with the call for longest. A call that shares no reply with any path may still
repeat one whose system text it changed (an agent that writes a clock into its system prompt): that is the same
conversation, not a new one. ``docs/matching.md`` prints the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.models import Break, BreakAt, BreakReason, Message
from turnstile_server.capture.compare import Schemas, compare_foreign, compare_reply
from turnstile_server.capture.keys import SYSTEM_ROLES, Key, MessageGroup, dialogue_chain
from turnstile_server.capture.match import ParentMatch
from turnstile_server.capture.node import Node

ALIKE_SHARE = 0.5
"""Two system texts are alike when they have at least this part of the longer one in common. A clock, a counter or
a list of files leaves most of a prompt as it was; a prompt for another purpose (a title, a summary) does not."""

COMPARED_CHARS = 200_000
"""Longer system texts are not compared word by word, because that takes time."""
MOST_COMPARED_CHARS = 1_000_000
"""Characters of system texts after which no other text of a call is compared, on the event loop: 20 ns each."""
CANDIDATES = 16
"""Turns with the same dialogue, the latest first, that are compared with a call."""
COMPARED_GROUPS = 20_000
"""Message groups that are compared before a search gives up, on the event loop: 1 µs each. A clock needs one
path of them; only a history that was edited at its beginning, or many times, needs more."""


def explain_break(
    groups: Sequence[MessageGroup],
    schemas: Schemas,
    tools_key: str,
    found: ParentMatch,
    roots: Sequence[Node],
    by_dialogue: Mapping[Key, Sequence[Node]],
) -> Break | None:
    """Types the break of a call, and finds its first divergent message.

    Walks the forest only when there is something to explain: a new root in an episode that has turns, or assistant
    messages after the parent's reply. ``by_dialogue``: turns by the key of their path without system text.
    """
    foreign = any(item.message.role == "assistant" for item in groups[found.groups :])
    if not roots or (found.node is not None and not foreign):
        return None
    nearest = _nearest_path(groups, schemas, tools_key, roots)
    agrees = nearest.edited == ""
    if agrees and nearest.at == found.groups and found.node is not None:
        return None  # the agent added a reply where the model was not asked
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
    if nearest.replies > 0:
        return Break(reason=BreakReason.HISTORY_EDITED, at=at)
    repeated = _repeated_dialogue(groups, schemas, tools_key, by_dialogue)
    if repeated is not None:
        index, path = _first_difference(path_groups(repeated), groups)
        continues = repeated.turn_id
        return Break(reason=BreakReason.SYSTEM_CHANGED, at=_at(groups, index, path), continues=continues)
    return Break(reason=BreakReason.NEW_CONVERSATION, at=at)


@dataclass(frozen=True, slots=True)
class _NearestPath:
    """The stored path that agrees with the call for longest. They differ at group ``at``."""

    at: int
    edited: str
    """Path inside the divergent message; "" when the stored path or the call ends there."""
    at_reply: bool
    replies: int
    """Replies of the model on the agreeing part."""
    whole: bool
    """The call ends where the stored path has a reply of the model."""
    tools_key: str


def _nearest_path(
    groups: Sequence[MessageGroup], schemas: Schemas, tools_key: str, roots: Sequence[Node]
) -> _NearestPath:
    """Looks at the latest roots first, and at no more of them once it has compared ``COMPARED_GROUPS``. Of paths
    that are equally near, the earliest counts."""

    def closeness(nearest: _NearestPath) -> tuple[int, bool, bool]:
        return (nearest.at, nearest.at_reply, nearest.tools_key == tools_key)

    best: _NearestPath | None = None
    looked = 0
    for root in reversed(roots):
        here: _NearestPath | None = None
        pending = [(root, 0)]
        while pending and (looked <= COMPARED_GROUPS or (best is None and here is None)):
            node, start = pending.pop()
            nearest = _diverge(node, groups, start, schemas)
            end = start + len(node.groups)
            looked += (end if nearest is None else nearest.at + 1) - start
            if nearest is None or nearest.at == end - 1:
                pending.extend((child, end - 1) for child in reversed(node.children) if child.merged_with_parent)
            if nearest is None:
                after = [child for child in node.children if not child.merged_with_parent]
                if after and end < len(groups):
                    pending.extend((child, end) for child in reversed(after))
                    continue
                nearest = _NearestPath(end, "", False, node.depth + 1, False, node.turn.tools_key)
            if here is None or closeness(nearest) > closeness(here):
                here = nearest
        if best is None or (here is not None and closeness(here) >= closeness(best)):
            best = here
        if looked > COMPARED_GROUPS:
            break
    assert best is not None  # the caller checked that there are roots
    return best


def _diverge(node: Node, groups: Sequence[MessageGroup], start: int, schemas: Schemas) -> _NearestPath | None:
    """The place where the call leaves this node's part of the path; None when it agrees with all of it."""
    reply_at = len(node.groups) - 1
    replies = node.depth - node.merged_with_parent
    for offset, stored in enumerate(node.groups):
        index = start + offset
        if index >= len(groups):
            return _NearestPath(index, "", False, replies, offset == reply_at, node.turn.tools_key)
        incoming = groups[index].message
        comparison = (
            compare_reply(stored.message, incoming, schemas)
            if offset == reply_at
            else compare_foreign(stored.message, incoming)
        )
        if comparison.edited is not None:
            return _NearestPath(index, comparison.edited, offset == reply_at, replies, False, node.turn.tools_key)
    return None


def _repeated_dialogue(
    groups: Sequence[MessageGroup], schemas: Schemas, tools_key: str, by_dialogue: Mapping[Key, Sequence[Node]]
) -> Node | None:
    """The deepest turn whose path and reply the call repeats, system text aside, in the same conversation.

    A repeated reply of the model is the evidence: a sub-agent may begin with the first user message of its caller,
    but it does not begin with the caller's replies. With other tools the system texts must be alike too: agents
    ask for titles and summaries by another prompt, without tools, over the same messages.
    """
    dialogue = [item for item in groups if item.message.role not in SYSTEM_ROLES]
    system = _system_text(groups)
    key: Key = b""
    ends: list[tuple[int, Key]] = []
    for count, item in enumerate(dialogue, 1):
        key = dialogue_chain(key, item.message)
        if item.message.role == "assistant" and key in by_dialogue:
            ends.append((count, key))
    looked = 0
    purpose = _Purpose(system)
    for count, key in reversed(ends):
        latest = by_dialogue[key][: -CANDIDATES - 1 : -1]
        looked += sum(node.group_count for node in latest)
        if looked > COMPARED_GROUPS:
            return None
        candidates = [node for node in latest if _repeats(node, dialogue[:count], schemas)]
        same_tools = (node for node in candidates if node.turn.tools_key == tools_key)
        same_purpose = (node for node in candidates if purpose.is_of(_system_text(path_groups(node))))
        repeated = next(same_tools, None) or next(same_purpose, None)
        if repeated is not None:
            return repeated
    return None


def _repeats(node: Node, dialogue: Sequence[MessageGroup], schemas: Schemas) -> bool:
    """True when ``dialogue`` is the node's path without system text, within the tolerance that replies have."""
    stored = [(item, own) for item, own in _own_replies(node) if item.message.role not in SYSTEM_ROLES]
    return len(stored) == len(dialogue) and all(
        (
            compare_reply(ours.message, theirs.message, schemas)
            if own
            else compare_foreign(ours.message, theirs.message)
        ).edited
        is None
        for (ours, own), theirs in zip(stored, dialogue, strict=True)
    )


def path_groups(node: Node) -> list[MessageGroup]:
    """The groups of the path to a node. A merged child repeats its parent's last group."""
    return [item for item, _ in _own_replies(node)]


def _own_replies(node: Node) -> list[tuple[MessageGroup, bool]]:
    """The same, each with whether it is a reply of the model."""
    found: list[tuple[MessageGroup, bool]] = []
    for step in node.path():
        if step.merged_with_parent:
            found.pop()
        groups = step.groups
        found += ((item, False) for item in groups[:-1])
        found.append((groups[-1], True))
    return found


def _first_difference(stored: Sequence[MessageGroup], groups: Sequence[MessageGroup]) -> tuple[int, str]:
    """Index of the first group of a call that is not the stored one, system text included, and the path inside."""
    for index, (ours, theirs) in enumerate(zip(stored, groups, strict=False)):
        if ours.message.role == "assistant" and theirs.message.role == "assistant":
            continue  # compared already, with the tolerance that replies have
        edited = compare_foreign(ours.message, theirs.message).edited
        if edited is not None:
            return index, edited
    return min(len(stored), len(groups) - 1), ""


def _system_text(groups: Sequence[MessageGroup]) -> str:
    return "\n".join(item.message.content for item in groups if item.message.role in SYSTEM_ROLES)


class _Purpose:
    """Tells whether system texts are like that of a call. Each text is compared once, and none after
    ``MOST_COMPARED_CHARS``."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._known: dict[str, bool] = {}
        self._compared = 0

    def is_of(self, text: str) -> bool:
        if text not in self._known and self._compared <= MOST_COMPARED_CHARS:
            self._compared += len(text) + len(self._system)
            self._known[text] = alike(text, self._system)
        return self._known.get(text, False)


def alike(left: str, right: str) -> bool:
    """Two system texts have ``ALIKE_SHARE`` in common: as beginning and end, or word by word in any order."""
    shorter, longer = sorted((left, right), key=len)
    if not shorter:
        return not longer
    start = _common_prefix(shorter, longer)
    end = _common_prefix(shorter[start:][::-1], longer[start:][::-1])
    if start + end >= ALIKE_SHARE * len(longer):
        return True
    if len(longer) > COMPARED_CHARS:
        return False
    words = Counter(longer.split())
    shared = words & Counter(shorter.split())
    total = _characters(words)
    return total > 0 and _characters(shared) >= ALIKE_SHARE * total


def _characters(words: Counter[str]) -> int:
    return sum(count * len(word) for word, count in words.items())


def _common_prefix(left: str, right: str) -> int:
    """Length of the common beginning, by bisection: comparing slices is quick, comparing characters is not."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _at(groups: Sequence[MessageGroup], index: int, path: str) -> BreakAt:
    index = min(index, len(groups) - 1)
    item = groups[index]
    message: Message = item.message
    return BreakAt(message=item.start, path=path, kind=message.role)
