"""The clock of episodes' limits and leases in tests: it goes on as ever, and a test moves it forward."""

from __future__ import annotations

import time
from typing import Any

import pytest

from turnstile_server.episodes import run, run_records, service, steps
from turnstile_server.episodes.service import Episodes
from turnstile_server.gate import session
from waiting import wait_until


class EpisodeClock:
    """Stands in for the module ``time`` where the times of an episode are measured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._passed_s = 0.0
        self._looks = 0
        for module in (run, run_records, service, session, steps):
            monkeypatch.setattr(module, "time", self)
        look = Episodes._end_disowned

        def looked(episodes: Episodes) -> None:
            look(episodes)
            self._looks += 1

        monkeypatch.setattr(Episodes, "_end_disowned", looked)

    def monotonic(self) -> float:
        return time.monotonic() + self._passed_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    async def pass_time(self, seconds: float) -> None:
        """Returns when the server's watch, which ends what is overdue, has looked at the clock since."""
        self._passed_s += seconds
        looks = self._looks
        await wait_until(lambda: self._looks >= looks + 2)
