"""What each conversation of an episode is, and which turn caused it, by structure alone.

An episode's roots are its conversations: the main one, its re-renderings, sub-agents, what a compaction left, and
auxiliary calls (titles, routers, quota probes) that the agent makes for itself. No agent's name and no wording of
any agent occurs here: what is compared is who offers tools, whose text stands in whose messages, and what the
agent's own headers say.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.models import BreakReason, Cause, Role, SampleKind, Turn
from turnstile_server.capture.keys import tools_key
from turnstile_server.capture.tree import Node, TokenTree

QUOTED_CHARS = 24
"""A text inside another message must be this long to have caused it; a shorter one may stand there by chance.
A text that is the whole message may be shorter."""

SUMMARY_SHARE = 0.25
"""Part of a summary that must be quoted, line by line: agents leave out what the model thought aloud before it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Of one root: what its conversation is, and the turn that caused it, where that can be told."""

    kind: SampleKind
    cause: Cause | None = None


def origins(tree: TokenTree) -> dict[str, Origin]:
    """Root turn id to its origin; ``docs/matching.md`` prints the rules.

    Auxiliary is a conversation of its own that could not do the task: one call, without tools where another
    conversation has them, or for a single token. An agent that never offers tools has no such calls.
    """
    roots = sorted(tree.roots, key=lambda root: _start(root.turn))
    with_tools = sum(_offers_tools(root.turn) for root in roots)
    probes = sum(_one_token(root.turn) for root in roots)
    auxiliary = {
        root.turn.turn_id
        for root in roots
        if not root.children
        and _of_its_own(root.turn)
        and (probes < len(roots) if _one_token(root.turn) else with_tools and not _offers_tools(root.turn))
    }
    # By start, not by commit: a short side call may overtake the first call of the episode.
    main = next((root for root in roots if root.turn.turn_id not in auxiliary), None)
    # A call leaves before its turn is there, so what it causes may be committed first: by start here too.
    turns = sorted((node.turn for node in tree), key=_start) if len(roots) > 1 else []
    found: dict[str, Origin] = {}
    for index, root in enumerate(roots):
        turn = root.turn
        if main is None or root is main or turn.request_key == main.turn.request_key:
            found[turn.turn_id] = Origin("main")
        elif _of_its_own(turn):
            found[turn.turn_id] = _origin(root, main, _cause(turn, turns, auxiliary), turn.turn_id in auxiliary)
        else:
            cause = _summary_of_other_tools(turn, turns)
            known = found[_continued(root, roots[:index], main).turn.turn_id]
            found[turn.turn_id] = known if cause is None else Origin("compaction", cause)
    summaries = {origin.cause.turn_id for origin in found.values() if origin.cause and origin.kind == "compaction"}
    for root in roots:
        if root is not main and root.turn.turn_id in summaries:
            # Asked for only to be built on: of the compaction, and no auxiliary call.
            found[root.turn.turn_id] = Origin("compaction", found[root.turn.turn_id].cause)
    return found


def _origin(root: Node, main: Node, cause: Cause | None, auxiliary: bool) -> Origin:
    """Of a conversation of its own that is not the main one."""
    turn = root.turn
    if auxiliary:
        return Origin("auxiliary", cause)
    if cause is not None:
        return Origin("compaction" if cause.by == "summary" else "subagent", cause)
    same = (turn.tools_key, _system(root)) == (main.turn.tools_key, _system(main))
    return Origin("compaction" if same and not _other_thread(turn, main.turn) else "subagent")


def _of_its_own(turn: Turn) -> bool:
    """The root begins a conversation; any other renders a known one again."""
    return turn.break_ is None or turn.break_.reason == BreakReason.NEW_CONVERSATION


def _start(turn: Turn) -> tuple[float, int]:
    return (turn.timings.started_at, turn.seq)


def _one_token(turn: Turn) -> bool:
    return turn.sampling.max_new_tokens == 1


def _offers_tools(turn: Turn) -> bool:
    return turn.tools_key != tools_key((), turn.template_hash)


def _continued(root: Node, earlier: Sequence[Node], main: Node) -> Node:
    """The conversation that a re-rendered root goes on with: the one that shares most of its beginning."""

    def shared(other: Node) -> int:
        count = 0
        for ours, theirs in zip(root.turn.new_messages, other.turn.new_messages, strict=False):
            if (ours.role, ours.content) != (theirs.role, theirs.content):
                break
            count += 1
        return count

    known = [other for other in earlier if other is not root]
    return max(known, key=lambda other: (shared(other), other is main), default=main)


def _other_thread(turn: Turn, main: Turn) -> bool:
    """The agent's headers say that it is another conversation."""
    return (
        turn.thread is not None
        and turn.thread.name is not None
        and (main.thread is None or main.thread.name != turn.thread.name)
    )


def _system(root: Node) -> tuple[str, ...]:
    texts = []
    for message in root.turn.new_messages:
        if message.role not in ("system", "developer"):
            break
        texts.append(message.content)
    return tuple(texts)


def _cause(turn: Turn, turns: Sequence[Turn], auxiliary: Collection[str]) -> Cause | None:
    """The earlier turn whose words the conversation begins with: a reply that it quotes (``summary``), or an
    argument of a call (``call``); the longest quotation counts, then the latest turn. Else the latest turn of the
    thread that the agent's headers name as its parent (``thread``)."""
    asked = _contents(turn, "user")
    told = _contents(turn, "user", "system", "developer")
    # Replies that come back as such are history, unless they were given to another question.
    told_or_said = [*told, *_contents(turn, "assistant")]
    best: tuple[int, Cause] | None = None
    for earlier in turns:
        if _start(earlier) >= _start(turn):
            break
        summary = _quoted(earlier.reply.content, told_or_said if earlier.turn_id in auxiliary else told)
        called = [text for call in earlier.reply.tool_calls for text in _texts(call.arguments)]
        argument = max((len(text) for text in called if _holds(asked, text)), default=0)
        length, by = max((summary, "summary"), (argument, "call"))
        if length and (best is None or length >= best[0]):
            best = (length, Cause.model_validate({"turn_id": earlier.turn_id, "by": by}))
    if best is not None:
        return best[1]
    parent = turn.thread.parent if turn.thread is not None else None
    if parent is None:
        return None
    above = [
        earlier
        for earlier in turns
        if earlier.thread is not None and earlier.thread.name == parent and _start(earlier) < _start(turn)
    ]
    return Cause(turn_id=above[-1].turn_id, by="thread") if above else None


def _summary_of_other_tools(turn: Turn, turns: Sequence[Turn]) -> Cause | None:
    """For a root that renders known inputs again: the latest reply that it quotes to the model, if that was asked
    for with other tools. (With the same tools it may be a complaint about the reply.)"""
    told = _contents(turn, "user", "system", "developer")
    for earlier in reversed(turns):
        before = _start(earlier) < _start(turn)
        if before and earlier.tools_key != turn.tools_key and _quoted(earlier.reply.content, told):
            return Cause(turn_id=earlier.turn_id, by="summary")
    return None


def _contents(turn: Turn, *roles: Role) -> list[str]:
    return [message.content for message in turn.new_messages if message.role in roles]


def _holds(contents: Sequence[str], text: str) -> bool:
    if len(text) < QUOTED_CHARS:
        return bool(text) and any(content.strip() == text for content in contents)
    return any(text in content for content in contents)


def _quoted(text: str, contents: Sequence[str]) -> int:
    """How many characters of a summary the contents hold, whole or by lines; 0 where that is too little of it."""
    text = text.strip()
    if len(text) >= QUOTED_CHARS and _holds(contents, text):
        return len(text)
    lines = [line.strip() for line in text.splitlines()]
    length = sum(len(line) for line in lines if len(line) >= QUOTED_CHARS and _holds(contents, line))
    return length if length >= SUMMARY_SHARE * len(text) else 0


def _texts(arguments: str) -> Iterator[str]:
    """Every string value in a call's arguments."""
    try:
        pending: list[Any] = [json.loads(arguments)]
    except (ValueError, RecursionError):
        return
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value.strip()
        elif isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
