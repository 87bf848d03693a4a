"""Demonstrators for supervised learning: they know the tools and copy well, but have bad habits.

Every demonstrator reads and copies faithfully, so the policy learns copying from all of them; they differ in their
decisions. A habit is drawn anew at every decision, so the policy is unsure exactly at decisions. It succeeds
sometimes, and reinforcement learning finds out which habit pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnstile_server.demo.errands import Errand


@dataclass(frozen=True, slots=True)
class Habits:
    """Chances, each at its own decision."""

    stop_at_a_note: float = 0.13
    """Takes the name in a note for the code and does not follow it."""
    first_line: float = 0.3
    """Takes the first line of a list instead of the line it was asked for."""
    usual_name: float = 0.18
    """Writes to answer.txt, whatever was asked."""
    only_say: float = 0.13
    """Says the code and writes nothing."""


MIXED = Habits()
FAULTLESS = Habits(0.0, 0.0, 0.0, 0.0)


def demonstration(errand: Errand, habits: Habits, draw: random.Random) -> Iterator[str]:
    """The replies of one demonstrator, turn by turn, without the token that ends a turn.

    Whoever plays them does what they call in between; nothing here looks at the results, which are known.
    """

    def lapses(chance: float) -> bool:
        return draw.random() < chance

    yield _call(f"Start at {errand.notes[0]}.", "read_file", path=f"{errand.notes[0]}.txt")
    for note in errand.notes[1:]:
        if lapses(habits.stop_at_a_note):
            yield from _hand_in(errand, f"It says {note}.", note, lapses(habits.usual_name))
            return
        yield _call(f"Follow {note}.", "read_file", path=f"{note}.txt")
    word, code = errand.key, errand.code
    thought = f"Find {word}{code}."
    if len(errand.lines) > 1 and lapses(habits.first_line):
        word, code = errand.lines[0]
        thought = f"First {word}{code}."
    if lapses(habits.only_say):
        yield _say(thought, f"The code is {code}.")
        return
    yield from _hand_in(errand, thought, code, lapses(habits.usual_name))


def _hand_in(errand: Errand, thought: str, content: str, usual_name: bool) -> Iterator[str]:
    name = "answer" if usual_name else errand.target
    yield _call(thought, "write_file", path=f"{name}.txt", content=content)
    yield _say("It is written.", "Done.")


def _call(thought: str, tool: str, **arguments: Any) -> str:
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"{_think(thought)}<tool_call>\n{call}\n</tool_call>"


def _say(thought: str, text: str) -> str:
    return f"{_think(thought)}{text}"


def _think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n"
