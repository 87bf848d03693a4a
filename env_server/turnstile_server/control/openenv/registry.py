"""Detached episodes by id, so that any later request can go on with one.

Holds: an environment whose episode runs is never forgotten (the server bounds how many run); of ended ones at most
``kept`` are, the newest.
"""

from __future__ import annotations

from turnstile_server.control.openenv.environment import TurnstileEnvironment


class Registry:
    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._environments: dict[str, TurnstileEnvironment] = {}

    def add(self, environment: TurnstileEnvironment) -> None:
        assert environment.episode_id is not None
        self._environments[environment.episode_id] = environment

    def get(self, episode_id: str) -> TurnstileEnvironment | None:
        return self._environments.get(episode_id)

    async def tidy(self) -> None:
        """Forgets the oldest of the ended episodes beyond ``kept``."""
        if len(self._environments) <= self._kept:
            return
        ended = [
            episode_id
            for episode_id, environment in list(self._environments.items())
            if await environment.has_ended()
        ]
        for episode_id in ended[: max(0, len(ended) - self._kept)]:
            self._environments.pop(episode_id, None)

    def __len__(self) -> int:
        return len(self._environments)
