"""Rollouts on TensorBoard. Needs the extra ``tensorboard`` (tensorboardX: it writes without torch and TensorFlow).

    with TensorBoardLogger("runs/mine", viewer="http://127.0.0.1:8000") as logger:
        logger.log(rollouts, step=3)

In place of a folder it takes the writer that a trainer has already, PyTorch's too, which stays the trainer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Protocol, Self

from tensorboardX import SummaryWriter

from turnstile.loggers.base import EPISODES, PREFIX, EpisodeLine, RolloutLogger

TEXT = f"{PREFIX}episodes_shown"
_HEADS = ("episode", "task", "reward", "status", "turns", "sampled", "trained", "breaks", "why")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|~<>&:])")


class EventWriter(Protocol):
    """The methods that tensorboardX's and PyTorch's ``SummaryWriter`` share."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...

    def add_text(self, tag: str, text_string: str, global_step: int) -> Any: ...

    def flush(self) -> Any: ...

    def close(self) -> Any: ...


class TensorBoardLogger(RolloutLogger):
    """Logs into ``place``: a folder, or a writer. Other arguments as of ``RolloutLogger``. As a context manager it
    closes a writer that it made."""

    def __init__(
        self,
        place: str | Path | EventWriter,
        *,
        viewer: str | None = None,
        solved_at: float = 1.0,
        episodes: int = EPISODES,
    ) -> None:
        super().__init__(viewer=viewer, solved_at=solved_at, episodes=episodes)
        self._own = isinstance(place, str | Path)
        self._writer: EventWriter = SummaryWriter(str(place)) if isinstance(place, str | Path) else place

    def write(self, figures: Mapping[str, float], lines: list[EpisodeLine], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if lines:
            self._writer.add_text(TEXT, _table(lines), step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the writer, unless it was given."""
        if self._own:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _table(lines: list[EpisodeLine]) -> str:
    """In Markdown, as which TensorBoard shows texts."""
    rows = [_HEADS, ("---",) * len(_HEADS), *map(_cells, lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(line: EpisodeLine) -> tuple[str, ...]:
    name = _plain(line.episode_id)
    return (
        name if line.link is None else f"[{name}](<{escape(line.link)}>)",
        _plain(line.task),
        "–" if line.reward is None else f"{line.reward:.3g}",
        line.status,
        str(line.turns),
        str(line.sampled_tokens),
        str(line.trained_tokens),
        str(line.breaks),
        _plain(line.why),
    )


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", text).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")
