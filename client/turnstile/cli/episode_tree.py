"""``turnstile episodes tree``: the turns of an episode as a tree, with what each of them trains.

A conversation goes straight down; only where it is continued in several ways does it move to the right.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import echo, echo_json, reported, show_text
from turnstile.cli.transcript import why_shown
from turnstile.models import ForestRow, TokenForest, TurnOutline

_NAME = 40
_KINDS = {
    "main": "main conversation",
    "subagent": "sub-agent",
    "compaction": "compaction",
    "retry": "retry",
    "auxiliary": "side conversation",
}


def show_tree(
    episode_id: str,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """The turns as a tree: branches, sub-agents, compactions, breaks, tokens and what of them is trained."""
    with reported(), connect(url, key, data_dir) as client:
        handle = client.episode(episode_id)
        episode = handle.status()
        turns = handle.turn_outlines()
        tree = TurnTree(turns, handle.tree(include_untrained=True))
        if as_json:
            for turn in turns:
                echo_json(json.dumps(tree.facts(turn)))
            return
        stats = episode.stats
        trained = f"{stats.trained_share:.0%}" if stats.sampled_tokens else "none"
        show_text(why_shown(episode))
        echo(
            f"{len(turns)} turns, {stats.roots} roots, {stats.branches} branches; {stats.sampled_tokens} tokens "
            f"sampled, {trained} of them trained\n"
        )
        for first, rest, words in tree.lines():
            show_text(words, first=first, rest=rest)


@dataclass(frozen=True, slots=True)
class TurnTree:
    """``turns``: in commit order. ``forest``: with untrained rows, fetched after them; of a running episode it may
    have turns that ``turns`` lacks."""

    turns: Sequence[TurnOutline]
    forest: TokenForest

    def facts(self, turn: TurnOutline) -> dict[str, Any]:
        """One turn as JSON. ``trained_tokens``: null where the forest does not have it."""
        return {
            "turn_id": turn.turn_id,
            "seq": turn.seq,
            "parent_id": turn.parent_id,
            "context_tokens": turn.context_tokens,
            "completion_tokens": turn.completion_tokens,
            "trained_tokens": self._trained().get(turn.turn_id),
            "untrained_reason": self._reasons().get(turn.turn_id),
            "finish_reason": turn.finish_reason,
            "weight_versions": list(dict.fromkeys(span.version for span in turn.weight_spans)),
            "break": None if turn.break_ is None else turn.break_.model_dump(mode="json"),
            "thread": None if turn.thread is None else turn.thread.model_dump(mode="json"),
            "rows": [row.model_dump(mode="json", exclude={"node"}) for row in self._rows().get(turn.turn_id, ())],
        }

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """For each turn: what stands before its first line and before further ones, and its words."""
        known = {turn.turn_id for turn in self.turns}
        children: defaultdict[str | None, list[TurnOutline]] = defaultdict(list)
        for turn in self.turns:
            children[turn.parent_id if turn.parent_id in known else None].append(turn)
        numbers = {turn.turn_id: turn.seq for turn in self.turns}
        trained, reasons, rows = self._trained(), self._reasons(), self._rows()
        # No recursion: a conversation may have thousands of turns.
        pending = [(turn, "", "", "") for turn in reversed(children[None])]
        while pending:
            turn, first, rest, below = pending.pop()
            following = children[turn.turn_id]
            mark = "│ " if following else "  "
            words = [f"{turn.seq}  {_words(turn, trained.get(turn.turn_id), reasons.get(turn.turn_id))}"]
            if turn.parent_id not in known:
                words[0] += f"; {_origin(turn, numbers)}"
            words += [f"= {_row_words(row, numbers)}" for row in rows.get(turn.turn_id, ())]
            yield f"{first}● ", f"{rest}{mark}", "\n".join(words)
            if len(following) == 1:
                pending.append((following[0], below, below, below))
                continue
            for place, child in enumerate(reversed(following)):
                inner = below + ("  " if place == 0 else "│ ")
                pending.append((child, f"{below}{'└─' if place == 0 else '├─'}", inner, inner))

    def _trained(self) -> Mapping[str, int]:
        forest = self.forest
        return {
            turn_id: int(forest.loss_mask[start:end].sum())
            for turn_id, start, end in zip(
                forest.turn_ids, forest.completion_starts.tolist(), forest.offsets[1:].tolist(), strict=True
            )
        }

    def _reasons(self) -> Mapping[str, str]:
        rows = zip(self.forest.turn_ids, self.forest.trained_in.tolist(), strict=True)
        trained = {turn_id for turn_id, row in rows if row >= 0}
        return {each.turn_id: each.reason for each in self.forest.untrained if each.turn_id not in trained}

    def _rows(self) -> Mapping[str, Sequence[ForestRow]]:
        """By the turn at which they end."""
        found: defaultdict[str, list[ForestRow]] = defaultdict(list)
        for row in self.forest.rows:
            found[self.forest.turn_ids[row.node]].append(row)
        return found


def _words(turn: TurnOutline, trained: int | None, reason: str | None) -> str:
    sampled = turn.completion_tokens
    parts = [f"{turn.context_tokens} + {sampled} tokens"]
    if trained is not None:
        parts.append("trained" if trained == sampled else "untrained" if trained == 0 else f"{trained} trained")
    if reason is not None:
        parts[-1] += f" ({reason})"
    if turn.finish_reason != "stop":
        parts.append(f"finish {turn.finish_reason}")
    parts += [f"calls {call.name[:_NAME]}" for call in turn.reply.tool_calls[:1]]
    if len(turn.reply.tool_calls) > 1:
        parts[-1] += f" and {len(turn.reply.tool_calls) - 1} more"
    parts.append("weights " + ", ".join(dict.fromkeys(span.version for span in turn.weight_spans)))
    return ", ".join(parts)


def _origin(turn: TurnOutline, numbers: Mapping[str, int]) -> str:
    """The reason that a turn is a root, in words."""
    thread = f"; thread {turn.thread.name[:_NAME]}" if turn.thread is not None and turn.thread.name else ""
    if turn.parent_id is not None:
        return f"continues {turn.parent_id} of another episode{thread}"
    if turn.break_ is None:
        return f"root{thread}"
    at = turn.break_.at
    place = "" if at is None else f" at message {at.message}{f', {at.path[:_NAME]}' if at.path else ''}"
    repeats = numbers.get(turn.break_.continues or "")
    again = "" if repeats is None else f", repeats turn {repeats}"
    again += f", {turn.rerendered_tokens} tokens rendered again" if turn.rerendered_tokens else ""
    return f"break {turn.break_.reason.value}{place}{again}{thread}"


def _row_words(row: ForestRow, numbers: Mapping[str, int]) -> str:
    cause = row.caused_by
    by = "" if cause is None else f", begun by turn {numbers.get(cause.turn_id, cause.turn_id)} ({cause.by})"
    status = "" if row.status == "completed" else f", {row.status}"
    return f"{_KINDS[row.kind]}{by}{status}"
