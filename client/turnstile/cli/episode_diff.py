"""``turnstile episodes diff``: two episodes beside each other, and the first turn at which they part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import zip_longest
from typing import Annotated, Any

import typer

from turnstile.cli.connection import DataDirOption, JsonOption, KeyOption, UrlOption, connect
from turnstile.cli.output import Column, echo, echo_json, reported, show_table
from turnstile.cli.transcript import why_shown
from turnstile.models import Episode, Message, TurnFacts
from turnstile.visible import visible, visible_line

MOST_LINES = 200
"""Most lines of a diff, unless all is asked for."""
_MOST_OF_A_LINE = 300
_MOST_COMPARED = 5000
"""Lines of a turn that are compared: what it takes grows with their square."""


def diff_episodes(
    first_id: Annotated[str, typer.Argument(metavar="A")],
    second_id: Annotated[str, typer.Argument(metavar="B")],
    full: Annotated[bool, typer.Option("--full", help="All of the diff, not its beginning.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Compare two episodes: their ends, rewards and counts, and where their messages part."""
    with reported(), connect(url, key, data_dir) as client:
        handles = client.episode(first_id), client.episode(second_id)
        first, second = (handle.status() for handle in handles)
        parting = Parting.of(*(handle.turn_outlines() for handle in handles))
        if as_json:
            facts = parting.facts()
            echo_json(json.dumps({"a": _facts(first), "b": _facts(second), **facts}))
            return
        rows = [list(row) for row in _compared(first, second)]
        show_table([Column(""), Column("A", "text"), Column("B", "text")], rows)
        echo(f"\n{parting.words()}")
        lines = parting.diff(first.episode_id, second.episode_id)
        for line in lines if full else lines[:MOST_LINES]:
            echo(visible(line) if full else visible_line_of_diff(line))
        if not full and len(lines) > MOST_LINES:
            echo(f"… {len(lines) - MOST_LINES} more lines (--full shows all)")


def visible_line_of_diff(line: str) -> str:
    """A line of a diff, cut, with the blanks that it begins with."""
    shown = visible(line[:_MOST_OF_A_LINE])
    return shown if len(line) <= _MOST_OF_A_LINE else f"{shown}…"


@dataclass(frozen=True, slots=True)
class Parting:
    """The first of the turns, in commit order, whose messages differ. ``first``, ``second``: None where an episode
    has no such turn. Ids of tool calls count as little as tokens: they are new in every episode."""

    same: int
    """Turns before it."""
    first: TurnFacts | None
    second: TurnFacts | None

    @classmethod
    def of(cls, first: Sequence[TurnFacts], second: Sequence[TurnFacts]) -> Parting:
        for number, (one, other) in enumerate(zip_longest(first, second)):
            if one is None or other is None or _lines_of(one) != _lines_of(other):
                return cls(number, one, other)
        return cls(len(first), None, None)

    def words(self) -> str:
        if self.first is None and self.second is None:
            return f"The messages of all {self.same} turns are the same."
        if self.first is not None and self.second is not None:
            return f"{self.same} turns are the same. The messages part at turn {self.first.seq}:"
        longer, ended = ("A", "B") if self.first is not None else ("B", "A")
        return f"{self.same} turns are the same. {ended} has no further one; {longer} goes on with:"

    def diff(self, first: str, second: str) -> list[str]:
        """As a unified diff, of which ``first`` and ``second`` are the names."""
        before, after = (() if turn is None else _lines_of(turn) for turn in (self.first, self.second))
        found = unified_diff(before[:_MOST_COMPARED], after[:_MOST_COMPARED], first, second, lineterm="")
        left = max(len(before), len(after)) - _MOST_COMPARED
        return [*found, *([f"({left} lines more were not compared)"] if left > 0 else [])]

    def facts(self) -> dict[str, Any]:
        """As JSON. ``turns``: ids of the turn of A and of B, null where there is none."""
        turns = [None if turn is None else turn.turn_id for turn in (self.first, self.second)]
        return {
            "same_turns": self.same,
            "parts": turns != [None, None],
            "turns": turns,
            "diff": self.diff("A", "B"),
        }


def _lines_of(turn: TurnFacts) -> tuple[str, ...]:
    """The turn's messages: what was new in its prompt, and the reply."""
    return tuple(line for message in (*turn.new_messages, turn.reply) for line in _lines(message))


def _lines(message: Message) -> Iterator[str]:
    for head, text in (
        (f"{message.role} (thinking):", message.reasoning or ""),
        (f"{message.role}:", message.content),
        *((f"{message.role} calls {call.name}:", call.arguments) for call in message.tool_calls),
    ):
        if text:
            yield head
            yield from (f"  {line}" for line in text.split("\n"))


def _facts(episode: Episode) -> dict[str, Any]:
    fields = {"episode_id", "status", "reward", "reward_components", "why", "stats", "timings", "error"}
    return episode.model_dump(mode="json", include=fields)


def _compared(first: Episode, second: Episode) -> Iterator[tuple[str, ...]]:
    pair = first, second
    yield "episode", first.episode_id, second.episode_id
    yield "why", *(why_shown(each) for each in pair)
    yield "status", *(each.status.value for each in pair)
    yield "task", *(visible_line(each.task.id or "inline", 60) for each in pair)
    yield "agent", *(each.agent for each in pair)
    yield "reward", *(_number(each.reward) for each in pair)
    for name in dict.fromkeys((*first.reward_components, *second.reward_components)):
        yield f"  {visible_line(name, 40)}", *(_number(each.reward_components.get(name)) for each in pair)
    yield "turns", *(str(each.stats.turns) for each in pair)
    yield "roots", *(str(each.stats.roots) for each in pair)
    yield "branches", *(str(each.stats.branches) for each in pair)
    yield "sampled tokens", *(str(each.stats.sampled_tokens) for each in pair)
    yield "trained", *(f"{each.stats.trained_share:.0%}" if each.stats.sampled_tokens else "-" for each in pair)
    yield "breaks", *(_counts(each.stats.breaks) for each in pair)
    yield "seconds", *("-" if each.timings.ended_s is None else f"{each.timings.ended_s:.1f}" for each in pair)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "-"
