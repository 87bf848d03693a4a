"""Worlds that do something wrong, or something that must be seen from outside: the source of the tests here."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Mapping
from typing import ClassVar

from turnstile_server.worlds import Start, ToolError, World, WorldTask, tool

CLOSED: list[str] = []
"""Episode ids of worlds that were closed."""
RELEASE = threading.Event()
"""Lets blocked threads go, at the end of the tests."""


class Counter(World):
    """Count up: the state is the instance's own, and everything about it can be seen."""

    episodes: ClassVar[list[str]] = []

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [WorldTask("counter", seed=5)]

    def reset(self, seed: int) -> str:
        self.seed, self.count, self.thread = seed, 0, threading.get_ident()
        self.episodes.append(self.episode_id)
        return f"Count to ten from seed {seed}."

    @tool
    def add(self, number: int = 1) -> int:
        """Add to the count.

        Args:
            number: How much.
        """
        assert threading.get_ident() == self.thread
        self.count += number
        return self.count

    @tool
    async def add_slowly(self, number: int) -> int:
        """Add to the count, with others at work meanwhile."""
        assert threading.get_ident() == self.thread
        before = self.count
        for _ in range(5):
            await asyncio.sleep(0)
        self.count = before + number
        return self.count

    @tool
    async def waits_and_adds(self) -> int:
        """Add to the count in an hour."""
        await asyncio.sleep(3600)
        self.count += 1
        return self.count

    def grade(self) -> float:
        return min(self.count, 10) / 10

    def close(self) -> None:
        CLOSED.append(self.episode_id)


class AsyncAll(World):
    """Every method is a coroutine."""

    async def reset(self, seed: int) -> Start:
        await asyncio.sleep(0)
        return Start("Go.")

    @tool
    async def act(self) -> str:
        """Act."""
        return "acted"

    async def respond(self, answer: str) -> str | None:
        return "And?" if answer == "first" else None

    async def grade(self) -> Mapping[str, float]:
        return {"answered": float(self.answer == "second"), "half": 0.5}

    async def close(self) -> None:
        CLOSED.append(self.episode_id)


class ResetRaises(World):
    """x"""

    def reset(self, seed: int) -> str:
        raise KeyError("no such level")

    def close(self) -> None:
        CLOSED.append(self.episode_id)


class ResetExits(World):
    """x"""

    def reset(self, seed: int) -> str:
        sys.exit(3)


class ResetBlocks(World):
    """x"""

    def reset(self, seed: int) -> str:
        RELEASE.wait()
        return "late"

    def grade(self) -> float:
        return 1.0

    def close(self) -> None:
        CLOSED.append("reset-blocks")


class ResetAsyncBlocks(World):
    """A coroutine that never gives the loop back."""

    async def reset(self, seed: int) -> str:
        RELEASE.wait()
        return "late"


class ResetGivesNumber(World):
    """x"""

    def reset(self, seed: int) -> str:
        return 3  # type: ignore[return-value]


class ResetGivesFiles(World):
    """Files without a sandbox."""

    def reset(self, seed: int) -> Start:
        return Start("x", {"a": ""})


class Graded(World):
    """Grades as its task says."""

    VALUES: ClassVar[dict[str, object]] = {
        "nan": float("nan"),
        "inf": float("inf"),
        "two": 2,
        "minus": -0.5,
        "none": None,
        "text": "1",
        "empty": {},
        "badname": {"a b": 1},
        "badpart": {"ok": 1, "bad": float("nan")},
        "true": True,
        "int": 1,
        "parts": {"paid": 1, "sent": 0.25},
    }

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [WorldTask(f"graded-{name}", {"name": name}) for name in cls.VALUES]

    def reset(self, seed: int, name: str) -> str:
        self.name = name
        return "x"

    def grade(self) -> float:
        return self.VALUES[self.name]  # type: ignore[return-value]


class GradeRaises(World):
    """x"""

    def reset(self, seed: int) -> str:
        return "x"

    def grade(self) -> float:
        raise ZeroDivisionError

    def close(self) -> None:
        CLOSED.append(self.episode_id)


class GradeBlocks(World):
    """x"""

    def reset(self, seed: int) -> str:
        return "x"

    def grade(self) -> float:
        RELEASE.wait()
        return 1.0


class BadTools(World):
    """x"""

    def reset(self, seed: int) -> None:
        return None

    @tool
    def breaks(self) -> str:
        """Raises by a mistake."""
        raise KeyError("secret of the world")

    @tool
    def refuses(self) -> str:
        """Raises for the agent."""
        raise ToolError("not today")

    @tool
    def wrong_result(self) -> int:
        """Gives what its annotation does not allow."""
        return "text"  # type: ignore[return-value]

    @tool(timeout_s=0.3)
    def blocks(self) -> str:
        """Never returns."""
        RELEASE.wait()
        return "late"

    @tool(timeout_s=0.3)
    async def sleeps(self) -> str:
        """Never returns, but can be cancelled."""
        await asyncio.sleep(3600)
        return "late"

    def grade(self) -> float:
        return 0.75


class OnlyNumbers(World):
    """Its grade takes no other answer, not even none; its solution shows that it can be graded."""

    def reset(self, seed: int) -> str:
        return "Say 42."

    def grade(self) -> float:
        return float(int(self.answer or "") == 42)

    def solve(self) -> str:
        return "42"


class Shared(World):
    """Its task's parameters hold a list, which the world changes."""

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [WorldTask("shared", {"items": []})]

    def reset(self, seed: int, items: list[int]) -> str:
        self.items = items
        items.append(seed)
        return "x"

    def grade(self) -> float:
        return float(self.items == [0])


class Mute(World):
    """A user who cannot be played, whatever is said."""

    def reset(self, seed: int) -> str:
        return "Talk."

    def respond(self, answer: str) -> str | None:
        raise ValueError("no voice")

    def grade(self) -> float:
        return 1.0


class Talker(World):
    """A user who goes on for ever."""

    def reset(self, seed: int) -> str:
        self.heard: list[str] = []
        return "Talk."

    def respond(self, answer: str) -> str | None:
        self.heard.append(answer)
        if answer == "raise":
            raise ValueError("the user broke")
        if answer == "block":
            RELEASE.wait()
        if answer == "number":
            return 3  # type: ignore[return-value]
        if answer == "long":
            return 5001 * "x"
        return f"I heard {answer}."

    def grade(self) -> float:
        return len(self.heard) / 10


class CloseRaises(World):
    """x"""

    def reset(self, seed: int) -> str:
        return "x"

    def grade(self) -> float:
        return 1.0

    def close(self) -> None:
        raise OSError("cannot close")


class CloseBlocks(CloseRaises):
    """x"""

    def close(self) -> None:
        RELEASE.wait()


class NotGraded(World):
    """It only gives tools."""

    def reset(self, seed: int) -> str:
        time.sleep(0)
        return "x"
