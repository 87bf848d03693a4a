"""Settings of the record of episodes' work folders, turn by turn (``docs/replay.md``)."""

from __future__ import annotations

from pydantic import Field

from turnstile_server.settings.section import BoundedSection


class ReplaySettings(BoundedSection):
    """Bounds of the states that an episode's work folder was in."""

    replay: bool = Field(
        False,
        description="Default of an episode's `replay`: what each turn changed in the work folder is recorded "
        "([replay](replay.md)).",
    )
    replay_file_bytes: int = Field(
        1 << 20, ge=0, le=64 << 20, description="Replay: the content of a larger file is not recorded."
    )
    replay_bytes: int = Field(
        64 << 20,
        ge=0,
        le=1 << 30,
        description="Replay: what is recorded of one episode, contents and lists; half of it before its "
        "first turn.",
    )
    replay_paths: int = Field(20_000, ge=1, description="Replay: files of a work folder that are looked at.")
    replay_skip: tuple[str, ...] = Field(
        (".git", "__pycache__", "node_modules", ".venv"),
        description="Replay: folders of these names are not looked into.",
    )
    keep_replay_bytes: int = Field(
        2 << 30,
        ge=0,
        description="Replay: what the recorded states of all episodes may take on disk; above it those of the "
        "episode that ended longest ago go first.",
    )
