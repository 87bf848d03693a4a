"""Random forests of turns, for tests and benchmarks of what is made of them."""

from __future__ import annotations

from hypothesis import strategies as st

from capture.turns import make_turn
from turnstile.models import Message
from turnstile_server.capture import CallMatch, TokenTree
from turnstile_server.capture.keys import tools_key

NO_TOOLS = tools_key((), "template")


@st.composite
def forests(draw: st.DrawFn, max_turns: int = 12) -> TokenTree:
    """Any shape: several roots, branches, equal requests (retries), untrained and interrupted turns."""
    tree = TokenTree()
    nodes = []
    for seq in range(draw(st.integers(0, max_turns))):
        parent = draw(st.none() | st.sampled_from(nodes)) if nodes else None
        asked = Message("user", draw(st.sampled_from(["u", "v"])))
        count = draw(st.integers(1, 4))
        turn = make_turn(
            CallMatch(parent=parent, new_messages=(asked,), echo=(), broken=None, request_messages=(asked,)),
            Message("assistant", f"a{seq}"),
            seq=seq,
            tools_key=draw(st.sampled_from(["t", "other", NO_TOOLS])),
            context_ids=draw(st.lists(st.integers(0, 9), min_size=parent is None, max_size=4)),
            completion_ids=draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)),
            logprobs=draw(st.lists(st.floats(-9, 0, width=32), min_size=count, max_size=count)),
            versions=draw(st.sampled_from([("v0",), ("v1",), ("v0", "v1"), ("v2", "v0")])),
            finish_reason=draw(st.sampled_from(["stop", "stop", "stop", "length", "abort"])),
            temperature=draw(st.sampled_from([1.0, 1.0, 1.0, 0.0])),
            constrained=draw(st.sampled_from([False, False, False, True])),
            given=draw(st.sampled_from([False, False, False, True])),
            started_at=float(seq),
        )
        nodes.append(tree.add(turn))
        nodes[-1].delivery = draw(st.sampled_from(["written", "written", "written", "lost", "pending"]))
    return tree
