"""Rewards that a trainer gives: of an episode after its end, and of its turns."""

from __future__ import annotations

from typing import Self

from pydantic import Field, FiniteFloat, model_validator

from turnstile.models.base import Model

MAX_TURNS = 10_000


class RewardUpdate(Model):
    """Body of ``POST /episodes/{id}/reward``: the episode's reward, rewards of turns, or both."""

    key: str = Field(min_length=1, max_length=256)
    """The same key with the same values changes nothing; with others it is refused."""
    reward: FiniteFloat | None = None
    """The reward of the whole episode, once it has ended."""
    turn_rewards: dict[str, FiniteFloat] = Field(default_factory=dict, max_length=MAX_TURNS)
    """By turn id, or by the turn's number in commit order, from ``"0"``."""
    replace: bool = False
    """A reward that is there already may be replaced."""
    by: str | None = Field(default=None, max_length=256)
    """Who gives it, for the record."""
    why: str | None = Field(default=None, max_length=4000)
    """The reason, for the record."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.reward is None and not self.turn_rewards:
            raise ValueError("there is neither `reward` nor `turn_rewards`")
        return self


class RewardChange(Model):
    """One entry of an episode's history of rewards."""

    key: str
    at: float
    """Unix time."""
    by: str | None = None
    why: str | None = None
    reward: FiniteFloat | None = None
    """The new reward of the episode; None: it was not changed."""
    previous: FiniteFloat | None = None
    """The episode's reward before; None: there was none."""
    turn_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)
    """The new ones, by turn id."""
    previous_turns: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Those of the same turns before, where they had one."""


class LateRewards(Model):
    """The bounds on the rewards that an episode takes from its trainer, and the rewards that it got."""

    bounds: tuple[FiniteFloat, FiniteFloat]
    """Least and greatest reward of the episode."""
    turn_bounds: tuple[FiniteFloat, FiniteFloat]
    """Least and greatest reward of a turn."""
    pending: bool = False
    """The episode has ended, and waits for its reward."""
    changes: tuple[RewardChange, ...] = ()
    """Every reward that was given, in order."""
