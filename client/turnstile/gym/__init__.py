"""Any agent as a Gymnasium environment: its model calls are the observations, their completions the actions.

    import gymnasium, turnstile.gym

    env = gymnasium.make("Turnstile/Agent-v0", url=URL, key=KEY, tasks=["fix-calculator"], agent="tool-loop")

The server runs with ``--engine trainer``: the training loop samples in place of an engine, and the agent sees no
difference. ``docs/gym.md`` describes it. Importing this package registers the environment.

Modules in reading order: ``environment`` (the environment), ``spaces`` (its observations and actions).
"""

from __future__ import annotations

import gymnasium

from turnstile.gym.environment import AgentEnv, EpisodeFailed, PromptTooLong
from turnstile.gym.spaces import Spaces, pack

__all__ = ["ENV_ID", "AgentEnv", "EpisodeFailed", "PromptTooLong", "Spaces", "pack"]

ENV_ID = "Turnstile/Agent-v0"

gymnasium.register(id=ENV_ID, entry_point="turnstile.gym.environment:AgentEnv")
