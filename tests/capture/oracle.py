"""A second opinion on capture, for the tests only: the rules of matching and accounting, by brute force.

Keeps a plain list of turns, each with the whole list of messages that it stands for. No hash, no tree, no index:
a call is compared with every turn, message by message. Imports the shared records and nothing of the server.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isfinite
from typing import Any

from turnstile.models import Message, Tool, ToolCall, Turn


@dataclass(frozen=True)
class Said:
    """One message of a turn's whole path; ``own``: the model's reply is (the end of) it."""

    message: Message
    own: bool


@dataclass
class Kept:
    """One turn with everything that it stands for written out."""

    turn: Turn
    parent: Kept | None
    said: list[tuple[Message, bool]]
    """Every message, ungrouped, and whether it is the model's own."""
    path: list[Said]
    tokens: list[int]
    delivery: str = "pending"
    repeated: bool = False
    """A later call that is no child renders it again; the machine copies this from the tree."""

    def line(self) -> list[Kept]:
        return [*(self.parent.line() if self.parent else []), self]


@dataclass(frozen=True)
class Expected:
    parents: list[Kept]
    """The best parents, one unless nothing tells them apart; empty: a new root."""
    covered: int
    """Messages of the call that the parent's path covers."""
    breaks: set[tuple[str, int, str] | None]
    """Admissible (reason, message index, path); more than one when two paths are equally near."""


class Oracle:
    def __init__(self) -> None:
        self.turns: list[Kept] = []

    def record(self, turn: Turn) -> Kept:
        parent = next((kept for kept in self.turns if kept.turn.turn_id == turn.parent_id), None)
        above = parent.said if parent else []
        said = [*above, *((m, False) for m in turn.new_messages), (turn.reply, True)]
        kept = Kept(
            turn=turn,
            parent=parent,
            said=said,
            path=collapse(masked(said)),
            tokens=(parent.tokens if parent else []) + turn.context_ids.tolist() + turn.completion_ids.tolist(),
        )
        self.turns.append(kept)
        return kept

    # Matching ------------------------------------------------------------------------------------------------

    def expect(self, messages: list[Message], tools: list[Tool], tools_key: str) -> Expected:
        call = collapse(masked([(m, False) for m in messages]))
        schemas = {tool.name: tool.parameters for tool in tools}
        fits = [
            kept
            for kept in self.turns
            if kept.turn.tools_key == tools_key
            and len(kept.path) <= len(call)
            and all(
                difference(said, heard.message, schemas) is None
                for said, heard in zip(kept.path, call, strict=False)
            )
        ]
        deepest = max((len(kept.path) for kept in fits), default=0)
        fits = [kept for kept in fits if len(kept.path) == deepest]
        if fits:
            best = max(self._closeness(kept, call) for kept in fits)
            fits = [kept for kept in fits if self._closeness(kept, call) == best]
        covered = len(messages) if deepest == len(call) else self._first_message_of(deepest, messages)
        return Expected(fits, covered, self._breaks(call, schemas, tools_key, fits, deepest, messages))

    def _closeness(self, kept: Kept, call: list[Said]) -> tuple[object, ...]:
        """Call ids of the echoed reply, its reasoning, then both along the whole path, then the latest written."""
        pairs = [(said.message, heard.message) for said, heard in zip(kept.path, call, strict=False) if said.own]
        ids = [bool(s.tool_calls) and call_ids(s) == call_ids(h) for s, h in pairs]
        thoughts = [(s.reasoning or "").strip() == (h.reasoning or "").strip() for s, h in pairs]
        written = kept.delivery == "written"
        return (ids[-1], thoughts[-1], sum(ids), sum(thoughts), written, self.turns.index(kept))

    @staticmethod
    def _first_message_of(group: int, messages: list[Message]) -> int:
        """Index of the first message of the ``group``-th run."""
        starts = [
            i
            for i, message in enumerate(messages)
            if i == 0 or message.role != "assistant" or messages[i - 1].role != "assistant"
        ]
        return starts[min(group, len(starts) - 1)]

    def _breaks(
        self,
        call: list[Said],
        schemas: dict[str, Any],
        tools_key: str,
        parents: list[Kept],
        covered: int,
        messages: list[Message],
    ) -> set[tuple[str, int, str] | None]:
        foreign = any(heard.message.role == "assistant" for heard in call[covered:])
        if not self.turns or (parents and not foreign):
            return {None}
        partings = [part(kept, call, schemas, tools_key) for kept in self.turns if self._may_be_nearest(kept)]
        nearest = max(p.rank for p in partings)
        found: set[tuple[str, int, str] | None] = set()
        for parting in (p for p in partings if p.rank == nearest):
            reason = parting.reason(len(call), covered, bool(parents))
            where = self._first_message_of(min(parting.at, len(call) - 1), messages)
            if reason == "new_conversation" and (repeated := self._repeated(call, schemas, tools_key)):
                for kept in repeated:
                    at, path = first_difference(kept, call, schemas)
                    place = self._first_message_of(min(at, len(call) - 1), messages)
                    found.add(("system_changed", place, path))
                continue
            found.add(None if reason is None else (reason, where, parting.path))
        return found

    def _repeated(self, call: list[Said], schemas: dict[str, Any], tools_key: str) -> list[Kept]:
        """The turns that the call repeats deepest, system text aside: with the same tools, or with system text
        that is half the same."""
        heard = [said.message for said in call if said.message.role not in SYSTEM]
        fits = []
        for kept in self.turns:
            path = [said for said in kept.path if said.message.role not in SYSTEM]
            same = len(path) <= len(heard) and all(
                difference(said, message, schemas) is None for said, message in zip(path, heard, strict=False)
            )
            texts = [
                "\n".join(said.message.content for said in side if said.message.role in SYSTEM)
                for side in (kept.path, call)
            ]
            if same and (kept.turn.tools_key == tools_key or half_the_same(*texts)):
                fits.append((len(path), kept.turn.tools_key == tools_key, kept))
        best = max(((depth, tools) for depth, tools, _ in fits), default=None)
        return [kept for depth, tools, kept in fits if (depth, tools) == best]

    def _may_be_nearest(self, kept: Kept) -> bool:
        """No turn goes on from it, or one goes on within its reply and so says something else there."""
        children = [other for other in self.turns if other.parent is kept]
        return not children or any(len(child.path) == len(kept.path) for child in children)

    # Accounting ----------------------------------------------------------------------------------------------

    def _childless(self, kept: Kept) -> bool:
        return not any(other.parent is kept for other in self.turns)

    def untrained(self) -> dict[str, str]:
        """Turn id to reason."""
        found: dict[str, str] = {}
        for index, kept in enumerate(self.turns):
            turn = kept.turn
            later_twins = [k for k in self.turns[index + 1 :] if k.turn.request_key == turn.request_key]
            if self._childless(kept) and any(not self._childless(twin) for twin in later_twins):
                found[turn.turn_id] = "superseded"
            elif turn.finish_reason == "abort":
                found[turn.turn_id] = "interrupted"
            elif turn.sampling.constrained:
                found[turn.turn_id] = "constrained"
            elif turn.sampling.temperature == 0:
                found[turn.turn_id] = "greedy"
            elif self._childless(kept) and kept.delivery != "written" and not kept.repeated:
                found[turn.turn_id] = "undelivered" if kept.delivery == "lost" else "delivery_unknown"
        return found

    def trainers(self) -> dict[str, str]:
        """Turn id to the leaf whose row trains it: the earliest trained leaf below it, else the earliest leaf
        that at least is on the conversation's way, else the earliest."""
        reasons = self.untrained()
        owners: dict[str, str] = {}
        for kept in self.turns:
            if kept.turn.turn_id in reasons:
                continue
            leaves = [leaf for leaf in self.turns if self._childless(leaf) and kept in leaf.line()]
            leaves.sort(key=lambda leaf: ["", "other", "superseded"].index(_grade(reasons, leaf)))
            owners[kept.turn.turn_id] = leaves[0].turn.turn_id
        return owners

    def versions(self) -> dict[str, int]:
        """Sampled tokens by the weights that sampled them, token by token."""
        spans = [span for kept in self.turns for span in kept.turn.weight_spans]
        return dict(Counter(span.version for span in spans for _ in range(span.start, span.end)))

    def statistics(self) -> dict[str, Any]:
        reasons = self.untrained()
        untrained: Counter[str] = Counter()
        for kept in self.turns:
            if kept.turn.turn_id in reasons:
                untrained[reasons[kept.turn.turn_id]] += len(kept.turn.completion_ids)
        sampled = sum(len(kept.turn.completion_ids) for kept in self.turns)
        parents = [id(kept.parent) for kept in self.turns if kept.parent]
        return {
            "sampled_tokens": sampled,
            "trained_tokens": sum(len(k.turn.completion_ids) for k in self.turns if k.turn.turn_id not in reasons),
            "untrained": dict(untrained),
            "rerendered_tokens": sum(kept.turn.rerendered_tokens for kept in self.turns),
            "turns": len(self.turns),
            "roots": sum(kept.parent is None for kept in self.turns),
            "branches": len(parents) - len(set(parents)),
            "breaks": dict(Counter(k.turn.break_.reason.value for k in self.turns if k.turn.break_)),
            "cosmetic": dict(Counter(name for kept in self.turns for name in kept.turn.echo)),
            "parse": dict(
                Counter(
                    finding
                    for kept in self.turns
                    for finding in (
                        *(s.value for s in kept.turn.parse_status if s != "ok"),
                        *kept.turn.parse_notes,
                    )
                )
            ),
            "weight_versions": self.versions(),
            "upstream": {},
        }


def _grade(reasons: dict[str, str], leaf: Kept) -> str:
    reason = reasons.get(leaf.turn.turn_id, "")
    return reason if reason in ("", "superseded") else "other"


@dataclass(frozen=True)
class Parting:
    """Where a call leaves one stored path."""

    at: int
    path: str
    own: bool
    """It differs in a reply of the model (False when one of both simply ends)."""
    replies: int
    asked: bool
    """The call ends right before a reply of the model."""
    same_tools: bool

    @property
    def rank(self) -> tuple[int, bool, bool]:
        return (self.at, self.own, self.same_tools)

    def reason(self, call_length: int, covered: int, has_parent: bool) -> str | None:
        differs = self.path != ""
        if not differs and has_parent and self.at == covered:
            return None
        if not differs and not self.same_tools:
            return "tools_changed"
        if not differs and self.at == call_length:
            return None if self.asked or has_parent else "history_truncated"
        if self.own:
            return "reply_edited"
        return "history_edited" if self.replies else "new_conversation"


def part(kept: Kept, call: list[Said], schemas: dict[str, Any], tools_key: str) -> Parting:
    same_tools = kept.turn.tools_key == tools_key
    for index, said in enumerate(kept.path):
        replies = sum(earlier.own for earlier in kept.path[:index])
        if index >= len(call):
            return Parting(index, "", False, replies, said.own, same_tools)
        path = difference(said, call[index].message, schemas)
        if path is not None:
            return Parting(index, path, said.own, replies, False, same_tools)
    return Parting(len(kept.path), "", False, sum(said.own for said in kept.path), False, same_tools)


SYSTEM = ("system", "developer")
VOLATILE = r"v\d"
"""The pattern of the agent's spec."""


def masked(said: list[tuple[Message, bool]]) -> list[tuple[Message, bool]]:
    return [
        (replace(m, content=re.sub(VOLATILE, "*", m.content)) if m.role in SYSTEM else m, own) for m, own in said
    ]


def system_text(messages: list[Message]) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in messages if m.role in SYSTEM]


def first_difference(kept: Kept, call: list[Said], schemas: dict[str, Any]) -> tuple[int, str]:
    for index, (said, heard) in enumerate(zip(kept.path, call, strict=False)):
        path = difference(said, heard.message, schemas)
        if path is not None:
            return index, path
    return min(len(kept.path), len(call) - 1), ""


def half_the_same(left: str, right: str) -> bool:
    """Beginning and end, or the words, are shared to a half of the longer text."""
    if not left or not right:
        return left == right
    longest = max(len(left), len(right))
    shortest = min(len(left), len(right))
    start = max(n for n in range(shortest + 1) if left[:n] == right[:n])
    end = max(n for n in range(shortest - start + 1) if left[len(left) - n :] == right[len(right) - n :])
    if 2 * (start + end) >= longest:
        return True
    mine, others = left.split(), right.split()
    longer, shorter = (mine, others) if len(left) >= len(right) else (others, mine)
    rest, shared = list(shorter), 0
    for word in longer:
        if word in rest:
            rest.remove(word)
            shared += len(word)
    total = sum(map(len, longer))
    return total > 0 and 2 * shared >= total


def collapse(said: list[tuple[Message, bool]]) -> list[Said]:
    """Runs of assistant messages as one message."""
    out: list[Said] = []
    run: list[tuple[Message, bool]] = []
    for message, own in [*said, (Message(role="user"), False)]:
        if message.role == "assistant":
            run.append((message, own))
            continue
        if run:
            whole = Message(
                role="assistant",
                content="".join(m.content for m, _ in run),
                reasoning="".join(m.reasoning or "" for m, _ in run),
                tool_calls=tuple(call for m, _ in run for call in m.tool_calls),
                name=run[0][0].name,
            )
            out.append(Said(whole, any(flag for _, flag in run)))
            run = []
        out.append(Said(message, own))
    return out[:-1]


def call_ids(message: Message) -> list[str | None]:
    return [call.id for call in message.tool_calls]


# The tolerance table ----------------------------------------------------


def difference(said: Said, heard: Message, schemas: dict[str, Any]) -> str | None:
    """Path of the first real difference, None when the message is the one that was said."""
    stored = said.message
    if stored.role != heard.role:
        return "role"
    if said.own:
        if stored.content.strip() != heard.content.strip():
            return "content"
        if len(stored.tool_calls) != len(heard.tool_calls):
            return "tool_calls"
        for i, (ours, theirs) in enumerate(zip(stored.tool_calls, heard.tool_calls, strict=True)):
            if ours.name != theirs.name:
                return f"tool_calls[{i}].name"
            if ours.arguments == theirs.arguments:
                continue
            if form(ours, schemas, True, True) != form(theirs, schemas, True, True):
                return f"tool_calls[{i}].arguments"
        return None
    if stored.content != heard.content:
        return "content"
    if (stored.name or "") != (heard.name or ""):
        return "name"
    if (stored.reasoning or "") != (heard.reasoning or ""):
        return "reasoning"
    if len(stored.tool_calls) != len(heard.tool_calls):
        return "tool_calls"
    for i, (ours, theirs) in enumerate(zip(stored.tool_calls, heard.tool_calls, strict=True)):
        if ours.name != theirs.name or ours.arguments != theirs.arguments:
            return f"tool_calls[{i}]"
    return None


def cosmetics(stored: Message, heard: Message, schemas: dict[str, Any]) -> set[str]:
    """Names of the tolerances that an echo with no real difference needs."""
    names: set[str] = set()
    if stored.content != heard.content:
        names.add("text_trimmed")
    if (stored.reasoning or "").strip() != (heard.reasoning or "").strip():
        names.add("reasoning_changed" if heard.reasoning else "reasoning_dropped")
    for ours, theirs in zip(stored.tool_calls, heard.tool_calls, strict=True):
        if ours.arguments == theirs.arguments:
            continue
        names.add("arguments_reserialised")
        if form(ours, schemas, False, False) == form(theirs, schemas, False, False):
            continue
        if form(ours, schemas, False, True) != form(theirs, schemas, False, True):
            names.add("arguments_defaults_filled")
        if form(ours, schemas, True, False) != form(theirs, schemas, True, False):
            names.add("arguments_whitespace_stripped")
    return names


def form(call: ToolCall, schemas: dict[str, Any], fill: bool, strip: bool) -> object:
    """A value that is equal for two calls exactly when their arguments are the same under the tolerances."""
    try:
        value = json.loads(call.arguments)
    except ValueError:
        return object()
    return _form(value, schemas.get(call.name) if fill else None, strip)


def _form(value: Any, schema: Any, strip: bool) -> object:
    schema = schema if isinstance(schema, dict) else {}
    match value:
        case None | bool():
            return ("constant", str(value))
        case int() | float():
            try:
                double = float(value)
            except OverflowError:
                return ("constant", "None")
            return ("number", Fraction(double)) if isfinite(double) else ("constant", "None")
        case str():
            lines = [line.rstrip() for line in value.split("\n")]
            return ("text", "\n".join(lines).rstrip() if strip else value)
        case list():
            return ("list", tuple(_form(item, schema.get("items"), strip) for item in value))
        case dict():
            properties = schema.get("properties")
            properties = properties if isinstance(properties, dict) else {}
            absent = {
                key: sub["default"]
                for key, sub in properties.items()
                if key not in value and isinstance(sub, dict) and "default" in sub
            }
            whole = {**value, **absent}
            return ("dict", frozenset((key, _form(whole[key], properties.get(key), strip)) for key in whole))
    raise AssertionError(f"not JSON: {value!r}")
