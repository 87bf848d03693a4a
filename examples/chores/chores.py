"""Tasks that a small language model can begin to solve: find, read, edit and compute with tools, in a few turns.

    find      Which file is about the lamp? Write its name to answer.txt.
    read      shop.txt lists prices. Write the price of the lamp to answer.txt.
    edit      In shop.txt, change the price of the lamp to 52.
    compute   shop.txt lists prices. Write the sum of all prices to answer.txt.

``demonstration`` plays one as somebody does who knows the tools and has bad habits: each is drawn anew at its
decision, so a policy that imitates it solves some, and is unsure where reinforcement learning finds what pays.
Held-out chores are about things that no other chore names.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

KINDS: Final = ("find", "read", "edit", "compute")

_THINGS: Final = """
lamp chair rug table mirror clock shelf bench stool vase basket candle blanket pillow curtain drawer kettle
teapot spoon plate bowl bottle jar pan knife ladle whisk tray napkin apron bucket broom brush mop sponge ladder
hammer saw drill wrench rope chain lock key bell whistle drum flute violin guitar piano trumpet kite ball puzzle
doll train wagon boat canoe paddle anchor sail tent lantern compass map globe telescope camera radio pencil
eraser ruler notebook envelope stamp ribbon button zipper scarf glove hat boot sandal belt wallet umbrella
suitcase
"""
_FILES: Final = "shop store market stock cellar attic garage kitchen hall garden office studio barn cabin harbor"
TARGETS: Final = ("answer", "result", "reply", "output", "note")
REMARKS: Final = (
    "The {thing} is old but works.",
    "We bought a new {thing} in May.",
    "Somebody should repair the {thing}.",
    "The {thing} stands near the door.",
)
_HELD_OUT: Final = 5
"""One thing in five is held out."""

FILE_IS: Final = """\
import pathlib, sys
found = pathlib.Path({path!r})
sys.exit(0 if found.is_file() and found.read_text().strip() == {text!r} else 1)
"""


@dataclass(frozen=True, slots=True)
class Chore:
    """``files``: the work folder at the start, text by name. ``path`` must hold ``text`` at the end. ``about``:
    the thing that is asked for, and ``prices`` of the listed file in its order."""

    kind: str
    instruction: str
    files: dict[str, str]
    path: str
    text: str
    about: str
    prices: dict[str, int] = field(default_factory=dict)

    def done(self, files: dict[str, str]) -> bool:
        """The hidden test's verdict, for episodes played in memory."""
        return files.get(self.path, "").strip() == self.text.strip()

    @property
    def level(self) -> int:
        """Its kind as a number from 1."""
        return KINDS.index(self.kind) + 1

    def task(self) -> dict[str, Any]:
        """As an inline task. Its hidden test reads one file and runs no code of the agent."""
        check = FILE_IS.format(path=self.path, text=self.text.strip())
        return {
            "instruction": self.instruction,
            "base": {"inline": self.files},
            "tests": {
                "files": {"inline": {"check.py": check}},
                "runner": "command",
                "command": ["python3", "-IS", "{tests}/check.py"],
            },
            "gold": {"files": {"inline": {self.path: self.text}}},
            "metadata": {"family": "chores", "kind": self.kind},
        }


def chore(draw: random.Random, kind: str, *, held_out: bool = False) -> Chore:
    if kind == "find":
        return _find(draw, held_out)
    things = _things(draw, 3, held_out)
    prices = {thing: draw.randrange(11, 60) for thing in things}
    name = f"{draw.choice(_FILES.split())}.txt"
    target = f"{draw.choice(TARGETS)}.txt"
    files = {name: _listed(prices)}
    about = draw.choice(things)
    if kind == "read":
        asked = f"{name} lists prices. Write the price of the {about} to {target}."
        return Chore(kind, asked, files, target, f"{prices[about]}\n", about, prices)
    if kind == "edit":
        wanted = draw.choice([price for price in range(11, 60) if price not in prices.values()])
        asked = f"In {name}, change the price of the {about} to {wanted}."
        return Chore(kind, asked, files, name, _listed({**prices, about: wanted}), about, prices)
    asked = f"{name} lists prices. Write the sum of all prices to {target}."
    return Chore(kind, asked, files, target, f"{sum(prices.values())}\n", about, prices)


def chores(seed: int | str, *, held_out: bool = False) -> Iterator[Chore]:
    """An endless stream, the kinds in turn. Equal seeds give equal chores."""
    draw = random.Random(seed)
    while True:
        for kind in KINDS:
            yield chore(draw, kind, held_out=held_out)


HABITS: Final = {"find": 0.5, "read": 0.5, "edit": 0.5, "compute": 0.6}
"""How often a demonstrator takes the wrong way: writes the first name without a look, takes the first price,
writes the file anew with one line, adds up in the head."""


def demonstration(task: Chore, draw: random.Random, habits: dict[str, float] = HABITS) -> Iterator[str]:
    """The replies, turn by turn, without the token that ends a turn."""
    careless = draw.random() < habits[task.kind]
    first = next(iter(task.files))
    if task.kind == "find":
        if careless:
            yield _call(f"It is {first}, I guess.", "write_file", path=task.path, content=first)
        else:
            yield _call(f"Search for {task.about}.", "bash", command=f"grep -l {task.about} *.txt")
            found = task.text.strip()
            yield _call(f"It is {found}.", "write_file", path=task.path, content=found)
        yield _said()
        return
    yield _call(f"Look at {first}.", "read_file", path=first)
    if task.kind == "read":
        thing = next(iter(task.prices)) if careless else task.about
        price = str(task.prices[thing])
        yield _call(f"The {thing} costs {price}.", "write_file", path=task.path, content=price)
    elif task.kind == "edit":
        old = f"{task.about} {task.prices[task.about]}"
        new = next(line for line in task.text.splitlines() if line.startswith(f"{task.about} "))
        if careless:
            yield _call("Write the line.", "write_file", path=first, content=new)
        else:
            yield _call(f"Replace {old}.", "edit_file", path=first, old=old, new=new)
    elif careless:
        guess = str(max(33, sum(task.prices.values()) + draw.choice((-10, -2, -1, 1, 2, 10))))
        yield _call(f"That is {guess} in all.", "write_file", path=task.path, content=guess)
    else:
        terms = "+".join(map(str, task.prices.values()))
        yield _call(f"Add {terms}.", "bash", command=f"echo $(({terms}))")
        total = task.text.strip()
        yield _call(f"The sum is {total}.", "write_file", path=task.path, content=total)
    yield _said()


def _find(draw: random.Random, held_out: bool) -> Chore:
    things = _things(draw, 3, held_out)
    names = [f"{name}.txt" for name in draw.sample(_FILES.split(), 3)]
    files = {
        name: f"{draw.choice(REMARKS).format(thing=thing)}\n" for name, thing in zip(names, things, strict=True)
    }
    at = draw.randrange(3)
    target = f"{draw.choice(TARGETS)}.txt"
    listed = f"{names[0]}, {names[1]} and {names[2]}"
    asked = f"Which of {listed} is about the {things[at]}? Write its name to {target}."
    return Chore("find", asked, files, target, f"{names[at]}\n", things[at])


def _things(draw: random.Random, count: int, held_out: bool) -> list[str]:
    return draw.sample([thing for thing in _THINGS.split() if _is_held_out(thing) == held_out], count)


def _is_held_out(thing: str) -> bool:
    return zlib.crc32(thing.encode()) % _HELD_OUT == 0


def _listed(prices: dict[str, int]) -> str:
    return "".join(f"{thing} {price}\n" for thing, price in prices.items())


def _call(thought: str, tool: str, **arguments: Any) -> str:
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<think>\n{thought}\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def _said() -> str:
    return "<think>\nIt is done.\n</think>\n\nDone."
