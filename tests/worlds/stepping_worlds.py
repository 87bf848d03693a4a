"""Worlds whose tools give rewards to the turns that call them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from turnstile_server.worlds import World, tool


class Stepping(World):
    """Go on, step by step."""

    def reset(self, seed: int) -> None:
        self.steps = 0

    @tool
    def go(self, reward: float) -> str:
        """One step."""
        self.steps += 1
        self.step_reward = reward
        return "stepped"

    @tool
    async def later(self) -> str:
        """A step that is a coroutine."""
        self.step_reward = -0.5
        return "later"

    @tool
    def look(self) -> str:
        """No step."""
        return "looked"

    @tool
    def fails(self) -> str:
        """A step that fails."""
        self.step_reward = 9.0
        raise ValueError("no")

    @tool
    def odd(self) -> str:
        """Gives what is no number."""
        odd: Any = math.nan
        self.step_reward = odd
        return "odd"

    def grade(self) -> float:
        return 1.0


class Slow(Stepping):
    """Go on, and be graded later."""

    @tool
    def wait_for(self, path: str) -> str:
        """Says when it is graded: when there is such a file."""
        self.path = Path(path)
        return "waits"

    def grade(self) -> float:
        while not self.path.exists():
            time.sleep(0.02)
        return 1.0
