"""The task family of the tiny policy: follow notes from file to file, find one code, write it to a file.

    Start at zabu.txt. Write the code of kora to lemi.txt.

    zabu.txt    see mopi.txt
    mopi.txt    tanu1130
                kora4827           ->  lemi.txt must hold 4827

Names and codes are drawn per task, so an errand cannot be solved from memory, only by reading, copying and
writing. A higher level has more notes on the way and more lines to choose from. Held-out errands are made of
words and codes that no other errand has. Pure data; ``Errand.task`` is what ``POST /episodes`` takes inline.

    python -m turnstile_server.demo.errands 100 [--held-out] > errands.jsonl     # a task file for `--tasks`
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LEVELS = (1, 2, 3, 4)

_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
_HELD_OUT = 10
"""One word in ten is held out, and one code in ten."""

CHECK = """\
import pathlib, sys
wanted = pathlib.Path({path!r})
sys.exit(0 if wanted.is_file() and wanted.read_text().strip() == {code!r} else 1)
"""


@dataclass(frozen=True, slots=True)
class Errand:
    """One task. ``notes``: names of the files, first to last; ``lines``: words and codes in the last file."""

    level: int
    notes: tuple[str, ...]
    lines: tuple[tuple[str, str], ...]
    key: str
    target: str

    @property
    def code(self) -> str:
        return dict(self.lines)[self.key]

    @property
    def instruction(self) -> str:
        return f"Start at {self.notes[0]}.txt. Write the code of {self.key} to {self.target}.txt."

    @property
    def files(self) -> dict[str, str]:
        """The agent's work folder at the start: text by path."""
        pointers = zip(self.notes, self.notes[1:], strict=False)
        files = {f"{here}.txt": f"see {there}.txt\n" for here, there in pointers}
        files[f"{self.notes[-1]}.txt"] = "".join(f"{word}{code}\n" for word, code in self.lines)
        return files

    def done(self, files: dict[str, str]) -> bool:
        """True if ``files`` solve the errand: the hidden test's verdict, for episodes played in memory."""
        return files.get(f"{self.target}.txt", "").strip() == self.code

    def task(self) -> dict[str, Any]:
        """The errand as an inline task. Its hidden test reads one file and runs no code of the agent."""
        path = f"{self.target}.txt"
        check = CHECK.format(path=path, code=self.code)
        return {
            "instruction": self.instruction,
            "base": {"inline": self.files},
            "tests": {
                "files": {"inline": {"check.py": check}},
                "runner": "command",
                "command": ["python3", "-IS", "{tests}/check.py"],
            },
            "gold": {"files": {"inline": {path: f"{self.code}\n"}}},
            "metadata": {"family": "errands", "level": self.level},
        }


def errand(draw: random.Random, level: int, *, held_out: bool = False) -> Errand:
    """Draw an errand of ``level`` 1 to 4: ``level`` − 1 notes point on, the last lists ``level`` words."""
    words = _distinct(draw, 2 * level + 1, held_out)
    notes, listed, target = words[:level], words[level : 2 * level], words[2 * level]
    lines = tuple((word, _code(draw, held_out)) for word in listed)
    return Errand(level, tuple(notes), lines, draw.choice(listed), target)


def errands(seed: int, levels: tuple[int, ...] = LEVELS, *, held_out: bool = False) -> Iterator[Errand]:
    """An endless stream of errands, the levels in turn. Equal seeds give equal errands."""
    draw = random.Random(seed)
    while True:
        for level in levels:
            yield errand(draw, level, held_out=held_out)


def _distinct(draw: random.Random, count: int, held_out: bool) -> list[str]:
    words: list[str] = []
    while len(words) < count:
        word = "".join(draw.choices(_SYLLABLES, k=2))
        if word not in words and _is_held_out(word) == held_out:
            words.append(word)
    return words


def _code(draw: random.Random, held_out: bool) -> str:
    while True:
        code = str(draw.randrange(1000, 10_000))
        if _is_held_out(code) == held_out:
            return code


def _is_held_out(text: str) -> bool:
    return zlib.crc32(text.encode()) % _HELD_OUT == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Errands as a task file, one per line.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="use words and codes that no other errand has")
    arguments = parser.parse_args()
    drawn = errands(arguments.seed, held_out=arguments.held_out)
    for number, one in enumerate(itertools.islice(drawn, arguments.count), 1):
        sys.stdout.write(json.dumps({"id": f"errand-{number}-level-{one.level}", **one.task()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
