"""An index of nodes by a key that few of them share. A list for each key would take more than all else of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from turnstile_server.capture.node import Node

NodeKey = TypeVar("NodeKey", bytes, str)


class NodeIndex(Mapping[NodeKey, Sequence[Node]], Generic[NodeKey]):
    """Key to its nodes, in the order in which they were added."""

    def __init__(self) -> None:
        self._nodes: dict[NodeKey, Node | list[Node]] = {}

    def add(self, key: NodeKey, node: Node) -> None:
        found = self._nodes.setdefault(key, node)
        if found is node:
            return
        if isinstance(found, list):
            found.append(node)
        else:
            self._nodes[key] = [found, node]

    def __getitem__(self, key: NodeKey) -> Sequence[Node]:
        found = self._nodes[key]
        return found if isinstance(found, list) else (found,)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[NodeKey]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)
