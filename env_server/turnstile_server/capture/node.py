"""A turn in its place in the token tree.

``tokens(node) = tokens(parent) ⊕ context_ids ⊕ completion_ids`` is exactly what the engine was fed and what it
sampled (invariant 1). A node keeps only its own part of that sum; ``Node.tokens`` adds up the path.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from turnstile.models import Int32Array, Turn, WeightSpan
from turnstile_server.capture.keys import MessageGroup, PathKeys
from turnstile_server.capture.path_buffer import PathBuffer

DeliveryState = Literal["pending", "written", "lost"]


def sampled_spans(turn: Turn) -> tuple[WeightSpan, ...]:
    """The weight versions that sampled a completion; none where its text was given."""
    return () if turn.sampling.given else turn.weight_spans


@dataclass(slots=True, eq=False)
class Node:
    """A turn in its place. Four things change later: the tree adds ``children`` and sets ``repeated``,
    ``record_delivery`` records what became of the reply, and ``commit_s`` is told once it is known."""

    turn: Turn
    parent: Node | None
    groups: tuple[MessageGroup, ...]
    """New messages and the reply, grouped, without volatile text. The last group holds the reply, and any
    assistant message that the agent put directly before it."""
    merged_with_parent: bool
    """The call ended with the parent's own reply, so both replies come back merged into one message. ``groups``
    begins with the parent's last group; the path does not hold that group twice."""
    head: PathKeys
    """Keys of the path without its last group."""
    end: PathKeys
    """Keys of the whole path."""
    token_count: int
    group_count: int
    """Groups from the root to the end of this turn."""
    depth: int
    children: list[Node] = field(default_factory=list)
    inherited: bool = False
    """A turn of the episode that this one was forked from: its tokens are context here, and counted there."""
    delivery: DeliveryState = "pending"
    commit_s: float | None = None
    """How long it took to make the turn durable; None: not known."""
    repeated: bool = False
    """A call that is no child holds this path with its reply: it renders the conversation again."""
    _path: tuple[Int32Array, PathBuffer] | None = field(default=None, repr=False)
    """The result of ``tokens`` and where it lies, cached by the node of a path that was asked last."""
    thinking_above: bool = field(default=False, init=False)
    """A reply above it has reasoning."""

    def __post_init__(self) -> None:
        above = self.parent
        self.thinking_above = above is not None and (above.thinking_above or bool(above.turn.reply.reasoning))

    def copied(self, parent: Node | None) -> Node:
        """The node as it is now, below ``parent`` and without children."""
        return Node(
            self.turn,
            parent,
            self.groups,
            self.merged_with_parent,
            self.head,
            self.end,
            self.token_count,
            self.group_count,
            self.depth,
            [],
            self.inherited,
            self.delivery,
            self.commit_s,
            self.repeated,
            self._path,
        )

    @property
    def prompt_count(self) -> int:
        """Tokens the engine was fed for this turn."""
        return self.token_count - len(self.turn.completion_ids)

    @property
    def merged_bytes(self) -> int:
        """Memory for the last group, where it was merged from several messages: the turn's record does not have
        it."""
        last = self.groups[-1]
        if last.end - last.start == 1:
            return 0
        message = last.message
        return sum(map(sys.getsizeof, (message.content, message.reasoning, message.tool_calls)))

    def record_delivery(self, state: DeliveryState) -> bool:
        """Records what became of the reply. Returns False and changes nothing where the reply was written before:
        a reply that was written once stays written."""
        if self.delivery == "written":
            return False
        self.delivery = state
        return True

    @property
    def received(self) -> bool:
        """Whether the agent is known to have the whole reply: it was written to its connection, or a later call
        builds on it. False for "not known" too."""
        return self.delivery == "written" or bool(self.children) or self.repeated

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def cool(self) -> None:
        """Drops the path's tokens in one piece; ``tokens`` adds them up again."""
        self._path = None

    def tokens(self) -> Int32Array:
        """int32[token_count], read-only: everything fed and sampled from the root to the end of this turn."""
        return self._whole()[0]

    def extended(self, ids: Int32Array) -> Int32Array:
        """int32, read-only: ``tokens`` and then ``ids``, which cost what they are alone."""
        tokens, buffer = self._whole()
        found = buffer.extended(len(tokens), (ids,))
        if found is None:
            found = np.concatenate((tokens, ids), dtype=np.int32)
            found.flags.writeable = False
        return found

    def _whole(self) -> tuple[Int32Array, PathBuffer]:
        parts: list[Int32Array] = []
        node: Node | None = self
        known: tuple[Int32Array, PathBuffer] | None = None
        # ``_path`` is read once per node: exports of an ended episode may run in two threads.
        while node is not None and (known := node._path) is None:
            parts += (node.turn.completion_ids, node.turn.context_ids)
            node = node.parent
        if known is not None and node is self:
            return known
        parts.reverse()
        found: Int32Array | None = None
        if known is not None:
            tokens, buffer = known
            found = buffer.extended(len(tokens), parts)
            parts.insert(0, tokens)
        if found is None:
            buffer = PathBuffer(parts)
            found = buffer.begun
        if node is not None:
            node._path = None
        self._path = whole = found, buffer
        return whole
