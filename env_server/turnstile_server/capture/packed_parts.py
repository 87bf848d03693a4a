"""Turns of an episode that rests, compressed, and opened again for whoever looks at them.

What must hold: what comes out equals what went in, in every field and in the bytes that are stored
(``tests/capture/test_packed_parts.py``); its arrays are read-only. A turn that is opened twice is two equal
objects. Opened blocks are kept for the next look, ``Packing.open_blocks`` of them at most, until
``OpenBlocks.close``.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from turnstile.models import Turn
from turnstile_server.capture.keys import MessageGroup, PathKeys

_LEVEL = 3
"""23 µs for a turn of 290 tokens. Level 1 takes 21 and a tenth more memory, level 6 takes 37 for a tenth less."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Turns are packed in blocks of ``block_turns``, or of fewer that take ``block_bytes`` together: longer blocks
    are a little smaller, and hold the event loop longer. A turn of more than ``most_bytes`` stays as it is: to
    pack it would hold the loop for too long."""

    block_turns: int = 16
    block_bytes: int = 128 << 10
    most_bytes: int = 1 << 20
    open_blocks: int = 32


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The long parts of a node. ``groups``, ``head``: as ``Node`` says."""

    turn: Turn
    groups: tuple[MessageGroup, ...]
    head: PathKeys

    @property
    def size(self) -> int:
        """Roughly, in bytes: of arrays and texts."""
        turn = self.turn
        arrays = (turn.context_ids, turn.completion_ids, turn.logprobs, turn.routed_experts)
        size = sum(each.nbytes for each in arrays if each is not None)
        for message in (*turn.new_messages, turn.reply, *(group.message for group in self.groups)):
            size += len(message.content) + len(message.reasoning or "")
            size += sum(len(call.arguments) for call in message.tool_calls)
        return size


class PackedParts:
    """A block of ``parts``, compressed. Used by the event loop and by the threads of exports."""

    __slots__ = ("_arrays", "_objects", "_sizes", "opened")

    def __init__(self, parts: Sequence[NodeParts]) -> None:
        buffers: list[pickle.PickleBuffer] = []
        # Only what this process wrote is ever read: pickle is exact where JSON is not (lone surrogates, NaN).
        objects = pickle.dumps(tuple(parts), 5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        self._objects = zlib.compress(objects, _LEVEL)
        self._sizes = array("Q", map(len, arrays))
        self._arrays = zlib.compress(b"".join(arrays), _LEVEL)
        self.opened: tuple[NodeParts, ...] | None = None
        """Set by ``OpenBlocks`` alone."""

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        return len(self._objects) + len(self._arrays)

    def unpacked(self) -> tuple[NodeParts, ...]:
        arrays = memoryview(zlib.decompress(self._arrays))  # of bytes: what is made of it is read-only
        ends = accumulate(self._sizes, initial=0)
        buffers = [arrays[start:end] for start, end in pairwise(ends)]
        found: tuple[NodeParts, ...] = pickle.loads(zlib.decompress(self._objects), buffers=buffers)
        return found


class OpenBlocks:
    """The blocks of one tree that somebody looked at, the latest last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: deque[PackedParts] = deque()

    def parts(self, block: PackedParts) -> tuple[NodeParts, ...]:
        """The parts in the block."""
        opened = block.opened  # read once: another thread may close it
        if opened is None:
            opened = block.opened = block.unpacked()
            self._blocks.append(block)
            if len(self._blocks) > self._most:
                self._close_first()
        return opened

    def close(self) -> None:
        """Keeps none of them open."""
        while self._blocks:
            self._close_first()

    def _close_first(self) -> None:
        try:
            self._blocks.popleft().opened = None
        except IndexError:  # another thread was faster
            return
