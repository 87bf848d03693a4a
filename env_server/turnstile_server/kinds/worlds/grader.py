"""What a task's text may say of a world: nothing. The component ``world`` comes from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from turnstile_server.grading.environment_scores import EnvironmentScores
from turnstile_server.tasks.part import GraderOptions


class WorldOptions(GraderOptions):
    """No options: the class of a world is a task source."""

    in_field = True

    @classmethod
    def of_entry(cls, entry: Mapping[str, object]) -> Self:
        """Raises ValueError: text from outside names no code of this machine."""
        raise ValueError("a class is a task source of its own, `file.py:Class`; it is not named in a task")


class WorldGrader(EnvironmentScores):
    """Holds the name, so that a task that writes it is told what to do."""

    Options = WorldOptions
