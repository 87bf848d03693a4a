"""A turn in its place in the token tree.

``tokens(node) = tokens(parent) ⊕ context_ids ⊕ completion_ids`` is exactly what the engine was fed and what it
sampled (invariant 1). A node keeps only its own part of that sum; ``Node.tokens`` adds up the path.
"""

from __future__ import annotations

import sys
from typing import Literal

import numpy as np
import numpy.typing as npt

from turnstile.models import Int32Array, Turn, WeightSpan
from turnstile_server.capture.keys import MessageGroup, PathKeys
from turnstile_server.capture.packed_parts import NodeParts, OpenBlocks, PackedParts
from turnstile_server.capture.path_buffer import PathBuffer

DeliveryState = Literal["pending", "written", "lost"]


def sampled_spans(turn: Turn) -> tuple[WeightSpan, ...]:
    """The weight versions that sampled a completion; none where its text was given."""
    return () if turn.sampling.given else turn.weight_spans


def trainable(turn: Turn) -> npt.NDArray[np.bool_]:
    """bool[m]: the sampled ids that a token stands behind, so that a row may train them."""
    found = np.ones(len(turn.completion_ids), np.bool_)
    found[list(turn.without_token)] = False
    return found


class Node:
    """A turn in its place. Four things change later: the tree adds ``children`` and sets ``repeated``,
    ``record_delivery`` records what became of the reply, and ``commit_s`` is told once it is known.

    The turn of an episode that rests may be packed. It is opened for whoever asks for it, each time as an object
    that equals the others and may be another one.
    """

    __slots__ = (
        "_open_blocks",
        "_packed",
        "_parts",
        "_path",
        "children",
        "commit_s",
        "delivery",
        "depth",
        "end",
        "group_count",
        "inherited",
        "merged_with_parent",
        "parent",
        "repeated",
        "sampled_count",
        "seq",
        "thinking_above",
        "token_count",
        "trainable_count",
        "turn_id",
    )

    def __init__(
        self,
        parts: NodeParts,
        parent: Node | None,
        end: PathKeys,
        *,
        merged_with_parent: bool,
        token_count: int,
        group_count: int,
        inherited: bool = False,
    ) -> None:
        """``merged_with_parent``: the call ended with the parent's own reply, so both replies come back merged
        into one message. ``groups`` begins with the parent's last group; the path does not hold that group twice.
        ``end``: keys of the whole path. ``group_count``: groups from the root to the end of this turn.
        ``inherited``: a turn of the episode that this one was forked from: its tokens are context here, and
        counted there."""
        turn = parts.turn
        self._parts: NodeParts | None = parts
        self._packed: tuple[PackedParts, int] | None = None
        self._open_blocks: OpenBlocks | None = None
        """The last two are set together, before ``_parts`` is None."""
        self.turn_id = turn.turn_id
        self.seq = turn.seq
        self.sampled_count = len(turn.completion_ids)
        self.trainable_count = self.sampled_count - len(turn.without_token)
        self.parent = parent
        self.merged_with_parent = merged_with_parent
        self.end = end
        self.token_count = token_count
        self.group_count = group_count
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: list[Node] = []
        self.inherited = inherited
        self.delivery: DeliveryState = "pending"
        self.commit_s: float | None = None
        """Seconds that it took to make the turn durable; None: not known."""
        self.repeated = False
        """A call that is no child holds this path with its reply: it renders the conversation again."""
        self._path: tuple[Int32Array, PathBuffer] | None = None
        """The result of ``tokens`` and where it lies, cached by the node of a path that was asked last."""
        self.thinking_above: bool = parent is not None and (
            parent.thinking_above or bool(parent.turn.reply.reasoning)
        )
        """A reply above it has reasoning."""

    def __repr__(self) -> str:
        return f"Node({self.turn_id})"

    @property
    def parts(self) -> NodeParts:
        """Its turn, and what was made of it."""
        parts = self._parts  # read once: a thread may look while the loop packs it
        if parts is not None:
            return parts
        packed, blocks = self._packed, self._open_blocks
        assert packed is not None
        assert blocks is not None
        return blocks.parts(packed[0])[packed[1]]

    @property
    def turn(self) -> Turn:
        parts = self._parts  # the rule, in one step
        return parts.turn if parts is not None else self.parts.turn

    @property
    def groups(self) -> tuple[MessageGroup, ...]:
        """New messages and the reply, grouped, without volatile text. The last group holds the reply, and any
        assistant message that the agent put directly before it."""
        parts = self._parts  # the rule, in one step
        return parts.groups if parts is not None else self.parts.groups

    @property
    def head(self) -> PathKeys:
        """Keys of the path without its last group."""
        parts = self._parts  # the rule, in one step
        return parts.head if parts is not None else self.parts.head

    def pack(self, block: PackedParts, index: int, blocks: OpenBlocks) -> None:
        """Its parts are those at ``index`` of ``block`` from now on, opened by ``blocks``."""
        self._open_blocks = blocks
        self._packed = block, index
        self._parts = None

    def copied(self, parent: Node | None) -> Node:
        """The node as it is now, below ``parent`` and without children."""
        copied, parts = Node.__new__(Node), self._parts  # the parts first: where they are gone, the block is there
        for name in Node.__slots__:
            setattr(copied, name, getattr(self, name))
        copied._parts, copied.parent, copied.children = parts, parent, []
        return copied

    @property
    def prompt_count(self) -> int:
        """Tokens the engine was fed for this turn."""
        return self.token_count - self.sampled_count

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
        """True if the agent is known to have the whole reply: it was written to its connection, or a later call
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
        if found is None:  # a sibling's tokens are there: this path goes on in a buffer of its own
            buffer = PathBuffer((tokens, ids))
            self._path = buffer.first(len(tokens)), buffer
            found = buffer.first(len(tokens) + len(ids))
        return found

    def _whole(self) -> tuple[Int32Array, PathBuffer]:
        # ``_path`` is read once per node: exports of an ended episode may run in two threads.
        known = self._path
        if known is not None:
            return known
        above = self.parent is not None and self.parent._path is not None
        below = None if above else self._buffer_below()
        self._path = whole = self._joined() if below is None else (below.first(self.token_count), below)
        return whole

    def _joined(self) -> tuple[Int32Array, PathBuffer]:
        """The path from the last turn above whose tokens lie in one piece."""
        parts: list[Int32Array] = []
        node: Node | None = self
        known: tuple[Int32Array, PathBuffer] | None = None
        while node is not None and (known := node._path) is None:
            parts += (node.turn.completion_ids, node.turn.context_ids)
            node = node.parent
        parts.reverse()
        if node is not None:
            node._path = None
        if known is not None:
            tokens, buffer = known
            found = buffer.extended(len(tokens), parts)
            if found is not None:
                return found, buffer
            parts.insert(0, tokens)
        buffer = PathBuffer(parts)
        return buffer.first(self.token_count), buffer

    def _buffer_below(self) -> PathBuffer | None:
        """The buffer of a path that goes on from this node by the latest turns; None: its tokens are not in one
        piece. A call that leaves a path some turns before its end finds them there."""
        node = self
        while node.children:
            node = node.children[-1]
            if (known := node._path) is not None:
                return known[1]
        return None
