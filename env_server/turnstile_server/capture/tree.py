"""The token tree of one episode: a forest of turns that only grows.

``tokens(node) = tokens(parent) ⊕ context_ids ⊕ completion_ids`` is exactly what the engine was fed and what it
sampled (invariants 1 and 3). A sub-agent is a new root. A rewritten history is a branch or a new root. A retry is
a sibling. Nothing is deleted, merged or rejected while serving, and no method waits. The parent of a call is
fixed before its generation, so concurrent calls become siblings.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

from turnstile.models import EpisodeStats, Int32Array, Message, Tool, Turn
from turnstile_server.capture.breaks import explain_break
from turnstile_server.capture.compare import Cosmetic
from turnstile_server.capture.flattened_calls import FlattenedCalls
from turnstile_server.capture.id_match import match_ids
from turnstile_server.capture.keys import SYSTEM_ROLES, Key, PathKeys, group, schemas_of
from turnstile_server.capture.match import CallMatch, PathCache, find_parent
from turnstile_server.capture.node import Node
from turnstile_server.capture.node_index import NodeIndex
from turnstile_server.capture.packed_parts import NodeParts, OpenBlocks, PackedParts, Packing
from turnstile_server.capture.statistics import RunningStatistics
from turnstile_server.capture.volatile import VolatileText

CACHED_PATHS = 8
"""Paths that are cached for the search of a parent, the latest used: one for each conversation that takes turns at
the same time, and of each the last ones, for a call that leaves it a few turns before its end."""


class Turns:
    """The turns of an episode in their places, to be read."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.inherited = 0
        """Turns of the episode that this one was forked from; they are its first ones."""
        self._nodes: dict[str, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """All nodes in commit order."""
        return iter(sorted(self._nodes.values(), key=lambda node: node.seq))

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self._nodes

    def __getitem__(self, turn_id: str) -> Node:
        return self._nodes[turn_id]

    @property
    def newest(self) -> Node | None:
        """The one that was added last."""
        return next(reversed(self._nodes.values()), None)

    def leaves(self) -> list[Node]:
        """Childless nodes in commit order."""
        return [node for node in self if not node.children]

    def snapshot(self) -> Turns:
        """The turns as they are now, for a thread: they no longer change. About 2 µs a turn."""
        copied = Turns()
        copied.inherited = self.inherited
        for turn_id, node in self._nodes.items():  # a parent is before its children
            parent = copied._nodes[node.parent.turn_id] if node.parent is not None else None
            copied._nodes[turn_id] = own = node.copied(parent)
            (parent.children if parent is not None else copied.roots).append(own)
        return copied


class TokenTree(Turns):
    """All turns of one episode, and the indexes that find a call's parent in time O(its messages)."""

    def __init__(self, volatile: VolatileText | None = None, packing: Packing | None = None) -> None:
        super().__init__()
        self._volatile = volatile if volatile is not None else VolatileText()
        self._packing = packing or Packing()
        self._flattened = FlattenedCalls()
        self._open_blocks = OpenBlocks(self._packing.open_blocks)
        self._unpacked: deque[Node] = deque()
        """In commit order, without those that are too large to be packed."""
        self._by_end: NodeIndex[Key] = NodeIndex()
        self._by_dialogue: NodeIndex[Key] = NodeIndex()
        self._by_request: NodeIndex[str] = NodeIndex()
        self._paths: list[PathCache] = []
        """The last used at the end."""
        self._statistics = RunningStatistics()

    def match(self, messages: Sequence[Message], tools: Sequence[Tool], tools_key: str) -> CallMatch:
        """Finds the deepest turn whose path and reply the call repeats, and types the break if there is one.

        Never changes the tree. It caches the path that it found, so that the next call on that path costs only
        what that call adds.
        """
        compared = self._compared(messages)
        deepest_first = sorted(self._paths, key=lambda path: len(path.messages), reverse=True)
        known = next((path for path in deepest_first if path.begins(compared, tools_key)), None)
        groups = group(compared) if known is None else [*known.groups, *group(compared, len(known.messages))]
        schemas = schemas_of(tools)
        found = find_parent(groups, schemas, tools_key, self._by_end, known)
        reason = explain_break(groups, schemas, tools_key, found, self.roots, self._by_dialogue)
        consumed, echo = found.consumed, found.echo
        cosmetic = set(echo.last.cosmetic) if echo is not None else set()
        if found.node is not None and echo is not None:
            if known is None or found.node is not known.node:
                path, covered = tuple(compared[:consumed]), tuple(groups[: found.groups])
                known = PathCache(tools_key, path, covered, found.node, echo)
            self._paths = [*(path for path in self._paths if path is not known), known][-CACHED_PATHS:]
            last = groups[found.groups - 1]
            if any(compared[at] is not messages[at] for at in range(last.start, last.end)):
                cosmetic.add(Cosmetic.CALLS_AS_TEXT)
            if compared is not messages and _system_messages(messages[:consumed]) != _stored_system(found.node):
                cosmetic.add(Cosmetic.SYSTEM_VOLATILE)
        return CallMatch(
            parent=found.node,
            new_messages=tuple(messages[consumed:]),
            echo=tuple(sorted(cosmetic)),
            broken=reason,
            request_messages=tuple(compared[consumed:]),
        )

    def match_ids(self, ids: Int32Array) -> CallMatch:
        """The place of a prompt that came as ids, in time O(its path, and the turns beside it). Its new messages
        are not known: it has none. Never changes the tree."""
        parent, broken = match_ids(self.roots, ids)
        new = ids if parent is None else ids[parent.token_count :]
        digest = hashlib.blake2b(new.tobytes(), digest_size=16).hexdigest()
        return CallMatch(parent, (), (), broken, (Message("user", digest),))

    def identical(self, request_key: str) -> Node | None:
        """The latest turn of this episode that answered an identical request and was not interrupted."""
        known = self._by_request.get(request_key, ())
        nodes = [n for n in known if n.turn.finish_reason != "abort" and not n.inherited]
        return nodes[-1] if nodes else None

    def latest(self, request_key: str) -> Node | None:
        """The latest turn of an identical request, interrupted or not: siblings are fed the same context."""
        nodes = self._by_request.get(request_key)
        return nodes[-1] if nodes else None

    def graft(self, turns: Iterable[Turn]) -> None:
        """Begins the tree with a path of another episode's tree, its root first: calls continue it."""
        for turn in turns:
            self.add(turn, inherited=True)
            self.inherited += 1

    def add(self, turn: Turn, *, inherited: bool = False) -> Node:
        """Puts a committed turn in its place. Raises KeyError for an unknown parent and ValueError for a repeated
        turn id; both mean that the caller broke the commit order."""
        if turn.turn_id in self._nodes:
            raise ValueError(f"turn {turn.turn_id} is in the tree already")
        parent = self._nodes[turn.parent_id] if turn.parent_id is not None else None
        messages = (*self._compared(turn.new_messages), turn.reply)
        above, end = 0, PathKeys(turn.tools_key.encode())
        merged = parent is not None and messages[0].role == "assistant"
        if parent is not None and merged:
            messages = (parent.groups[-1].message, *messages)
            above, end = parent.group_count - 1, parent.head
        elif parent is not None:
            above, end = parent.group_count, parent.end
        if parent is not None and turn.tools_key != parent.turn.tools_key:
            end = PathKeys(turn.tools_key.encode())  # ids that go on from messages: no messages lead here
        groups = tuple(group(messages))
        head = end
        for item in groups:
            head, end = end, end.then(item.message)
            if turn.break_ is not None and item.message.role == "assistant" and item is not groups[-1]:
                self._repeats(end)
        before = parent.token_count if parent is not None else 0
        node = Node(
            NodeParts(turn, groups, head),
            parent,
            end,
            merged_with_parent=merged,
            token_count=before + len(turn.context_ids) + len(turn.completion_ids),
            group_count=above + len(groups),
            inherited=inherited,
        )
        self._nodes[turn.turn_id] = node
        self._unpacked.append(node)
        self._by_end.add(end.full, node)
        self._by_dialogue.add(end.dialogue, node)
        self._by_request.add(turn.request_key, node)
        siblings = parent.children if parent is not None else self.roots
        if siblings or parent is None:
            siblings.append(node)
        else:
            parent.children = [node]  # a list that is made at once has no room to spare: most turns have one child
        self._flattened.add(node)
        self._statistics.add(node)
        return node

    def cool(self) -> None:
        """Drops what is kept to make the next call cheaper. Nothing else depends on it."""
        self._paths.clear()
        self._flattened.cool()
        self._open_blocks.close()
        for node in self._nodes.values():
            node.cool()

    def pack(self) -> bool:
        """Compresses the oldest turns that are not, in some milliseconds. Returns whether there were enough for a
        block: a call may go on from the latest ones, and few turns pack badly. Every node stays what it is."""
        nodes: list[Node] = []
        size = 0
        while self._unpacked and len(nodes) < self._packing.block_turns and size < self._packing.block_bytes:
            node = self._unpacked.popleft()
            own = node.parts.size
            if own <= self._packing.most_bytes:
                nodes.append(node)
                size += own
        if len(nodes) < self._packing.block_turns and size < self._packing.block_bytes:
            self._unpacked.extendleft(reversed(nodes))
            return False
        block = PackedParts([node.parts for node in nodes])
        for index, node in enumerate(nodes):
            node.pack(block, index, self._open_blocks)
        return True

    def _compared(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as they are compared: without volatile text, and with the calls that are sent as text."""
        return self._flattened.restored(self._volatile.masked(messages), self._nodes.values())

    def _repeats(self, keys: PathKeys) -> None:
        """A call that left the known paths holds a path with these keys: its agent has the reply that ends it. One
        of several equal replies is meant, and where one is known to be received it was that one."""
        nodes = self._by_dialogue.get(keys.dialogue, ())
        if nodes and not any(node.received for node in nodes):
            nodes[-1].repeated = True

    def statistics(self, discarded: Mapping[str, int]) -> EpisodeStats:
        """The statistics that ``export_samples`` gives, at the same cost however many turns there are."""
        return self._statistics.figures(self.roots, self._nodes.values(), discarded)


def _system_messages(messages: Iterable[Message]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages if message.role in SYSTEM_ROLES]


def _stored_system(node: Node) -> list[tuple[str, str]]:
    return [item for step in node.path() for item in _system_messages(step.turn.new_messages)]
