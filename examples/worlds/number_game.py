"""A number game in the manner of OpenEnv's small environments: a state, a step, a reward.

turnstile tasks validate examples/worlds/number_game.py
turnstile serve --tasks examples/worlds/number_game.py
"""

from __future__ import annotations

import random

from turnstile_server.worlds import World, WorldTask, tool


class NumberGame(World):
    """Find a hidden number with the tool guess."""

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [
            WorldTask(f"number-{highest}", parameters={"highest": highest, "guesses": guesses})
            for highest, guesses in ((10, 4), (100, 7), (1000, 10))
        ]

    def reset(self, seed: int, highest: int, guesses: int) -> str:
        self.highest, self.left = highest, guesses
        self.hidden = random.Random(seed).randint(1, highest)
        self.found = False
        return f"Find the hidden number from 1 to {highest}. You have {guesses} guesses; call the tool guess."

    @tool
    def guess(self, number: int) -> str:
        """Guess the number. Says whether the hidden one is higher or lower."""
        if self.found or not self.left:
            return "The game is over."
        self.left -= 1
        self.found = number == self.hidden
        if self.found:
            return "Right!"
        hint = "higher" if number < self.hidden else "lower"
        return f"The hidden number is {hint}. Guesses left: {self.left}."

    def grade(self) -> float:
        return float(self.found)

    def solve(self) -> None:
        low, high = 1, self.highest
        while not self.found:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "higher" in self.guess(middle) else (low, middle - 1)
