"""Trees of one long conversation, to be packed."""

from __future__ import annotations

from capture.turns import make_turn
from turnstile.models import Message
from turnstile_server.capture import Node, TokenTree
from turnstile_server.capture.packed_parts import Packing


def long_tree(turns: int, packing: Packing | None = None) -> TokenTree:
    """One conversation, whose reader has each reply."""
    tree, messages = TokenTree(packing=packing), [Message("user", "go")]
    for seq in range(turns):
        match = tree.match(messages, (), "tools")
        reply = Message("assistant", f"reply {seq} " * 20)
        ids = range(seq, seq + 5)
        node = tree.add(
            make_turn(match, reply, seq=seq, tools_key="tools", completion_ids=ids, context_ids=[seq] * 9)
        )
        node.record_delivery("written")
        messages += [reply, Message("tool", f"result {seq} " * 20)]
    return tree


def is_packed(node: Node) -> bool:
    return node._parts is None
