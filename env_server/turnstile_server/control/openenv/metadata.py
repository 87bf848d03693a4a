"""What the environment says of itself; needs nothing of the framework, so it answers while that is imported."""

from __future__ import annotations

from importlib.metadata import version

NAME = "turnstile"
DESCRIPTION = "Token-exact episodes from real language-model agents, for training them by reinforcement learning."


def metadata() -> dict[str, str]:
    return {"name": NAME, "description": DESCRIPTION, "version": version("turnstile-rl")}
