"""A task source: ``--tasks sums:N`` is N additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.protocol import FoundTask, Recognition, TaskProblem


class Sums:
    recognition = Recognition.SCHEME

    def recognises(self, source: str) -> bool:
        return source.startswith("sums:")

    def load(self, source: str, settings: TaskSettings) -> Iterator[FoundTask | TaskProblem]:
        count = source.removeprefix("sums:")
        if not (count.isascii() and count.isdigit() and len(count) < 7):
            yield TaskProblem(source, None, None, "write sums:N with N below a million")
            return
        for n in range(int(count)):
            answer = Answer(kind="numeric", value=float(2 * n))
            yield FoundTask(
                Task(id=f"sum-{n}", instruction=f"Submit {n} + {n}.", grading={"answer": answer}), source
            )

    def host_paths(self, source: str) -> Sequence[Path]:
        return ()
