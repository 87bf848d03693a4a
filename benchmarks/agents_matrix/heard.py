"""Watched sandboxes with a door through which all their agents are heard."""

from __future__ import annotations

from starlette.types import ASGIApp

from agents_matrix.tape import Microphone
from turnstile_server.testing.recording import RecordingProvider


class HeardProvider(RecordingProvider):
    """``microphone``: at the door, once it is started."""

    microphone: Microphone

    async def start(self, agent_door: ASGIApp) -> None:
        self.microphone = Microphone(agent_door)
        await super().start(self.microphone)
