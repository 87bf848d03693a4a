"""Settings of tasks that are Python classes (worlds)."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.settings.section import Section


class WorldSettings(Section):
    """Bounds on what the code of a world may cost. Its tools have the bounds of own tools (``tools.own_…``)."""

    reset_timeout_s: float = Field(
        60.0, gt=0, description="Time for a world's `reset`; then the episode fails, with the task at fault."
    )
    respond_timeout_s: float = Field(
        60.0, gt=0, description="Time for a world's `respond`; then the episode fails, with the task at fault."
    )
    grade_timeout_s: float = Field(
        120.0, gt=0, description="Time for a world's `grade`; then the episode has no reward."
    )
    close_timeout_s: float = Field(
        10.0, gt=0, description="How long the end of an episode waits for a world's `close`; it goes on unheard."
    )
    max_user_turns: int = Field(
        50, ge=1, description="Messages of a simulated user in one episode; then the conversation is over."
    )
    max_message_chars: int = Field(
        64_000, ge=256, description="Longest instruction, and longest message of a user, that a world gives."
    )
    max_open: int = Field(
        256,
        ge=1,
        description="Worlds open at once, with those whose code never returned; with more, episodes fail (503).",
    )
