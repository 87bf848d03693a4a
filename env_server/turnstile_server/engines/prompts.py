"""The prompts of calls to one engine's server: checked, and written as JSON.

What must hold: an id outside the vocabulary is never sent (one of them ends an SGLang server). Ids that an earlier
prompt of the episode had were checked then.
"""

from __future__ import annotations

import asyncio
from typing import Final

import numpy as np

from turnstile.models import Int32Array
from turnstile_server.engines.bounds import EngineBounds
from turnstile_server.engines.call_checks import check_ids, check_input
from turnstile_server.engines.prompt_json import PromptJson, ids_json
from turnstile_server.errors import EngineRefused
from turnstile_server.settings import EngineSettings

LOOKS: Final = 4
"""In the time after which an episode rests: at most a quarter of it later its prompts are dropped."""


class EnginePrompts:
    """Keeps the JSON of the latest prompts (``EngineBounds.prompt_json_bytes``), until an episode rests."""

    def __init__(self, settings: EngineSettings) -> None:
        self._rest_s = settings.bounds_of(EngineBounds).prompt_json_rest_s
        self._json = PromptJson(settings.bounds_of(EngineBounds).prompt_json_bytes)
        self._resting: asyncio.TimerHandle | None = None

    @property
    def kept_bytes(self) -> int:
        return self._json.kept_bytes

    def written(self, episode_id: str, ids: Int32Array, vocab_size: int) -> list[bytes]:
        """The JSON of ``ids`` without brackets, in pieces to be joined with commas. Raises EngineRefused for what
        is no prompt."""
        if ids.dtype != np.int32 or ids.ndim != 1 or len(ids) == 0:
            check_input(ids, vocab_size)
            return [ids_json(ids)]
        loop = asyncio.get_running_loop()
        pieces, known = self._json.write(episode_id, ids, loop.time())
        try:
            check_ids(ids[known:], vocab_size)
        except EngineRefused:
            self._json.drop(episode_id)
            raise
        if self._resting is None:
            self._resting = loop.call_later(self._rest_s / LOOKS, self._rest)
        return pieces

    def drop(self, episode_id: str) -> None:
        """Keeps nothing of the episode."""
        self._json.drop(episode_id)

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None

    def _rest(self) -> None:
        loop = asyncio.get_running_loop()
        self._json.rest(loop.time() - self._rest_s)
        self._resting = loop.call_later(self._rest_s / LOOKS, self._rest) if self._json.kept_bytes else None
