"""Worlds whose agents work in a sandbox: the source of the tests here."""

from __future__ import annotations

import json

from turnstile_server.worlds import Start, World, WorldTask, tool


class Notes(World):
    """Write the word into word.txt."""

    needs_sandbox = True

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [
            WorldTask("notes"),
            WorldTask(
                "notes-tested",
                fields={
                    "base": {"inline": {"keep.txt": "kept"}},
                    "tests": {
                        "files": {"inline": {"check.sh": ""}},
                        "runner": "command",
                        "command": ["grep", "-q", "word", "word.txt"],
                    },
                },
            ),
        ]

    def reset(self, seed: int) -> Start:
        self.word = f"word-{seed}"
        return Start(f"Write {self.word} into word.txt.", {"given/notes.txt": "read me"})

    @tool
    def peek(self) -> str:
        """Say what the file has."""
        assert self.sandbox is not None
        return self.sandbox.read("word.txt").decode()

    @tool
    async def stamp(self) -> str:
        """Put a stamp into the work folder."""
        assert self.sandbox is not None
        self.sandbox.write("stamps/one", b"stamped")
        return self.sandbox.run("cat stamps/one given/notes.txt").stdout

    def grade(self) -> float:
        assert self.sandbox is not None
        try:
            written = self.sandbox.read("word.txt").decode()
        except OSError:
            return 0.0
        left = self.sandbox.run("pgrep -x sleep || echo none")
        assert left.stdout.strip() == "none", "the agent's processes are stopped before the world looks"
        return float(written.strip() == self.word)

    def solve(self) -> None:
        assert self.sandbox is not None
        self.sandbox.write("word.txt", self.word.encode())


class Trusting(World):
    """Write yes into yes.txt. Its `grade` expects that the file is there and can be read."""

    needs_sandbox = True

    def reset(self, seed: int) -> None:
        return None

    def grade(self) -> float:
        assert self.sandbox is not None
        return float(self.sandbox.read("yes.txt") == b"yes")

    def solve(self) -> None:
        assert self.sandbox is not None
        self.sandbox.write("yes.txt", b"yes")


class Parsing(World):
    """Write {"total": 42} into out.json. Its `grade` expects that the file is what it should be."""

    needs_sandbox = True

    def reset(self, seed: int) -> None:
        return None

    def grade(self) -> float:
        assert self.sandbox is not None
        return float(json.loads(self.sandbox.read("out.json"))["total"]) / 42

    def solve(self) -> None:
        assert self.sandbox is not None
        self.sandbox.write("out.json", b'{"total": 42}')
