"""Judging stored work again: what the server keeps of an episode, the request, and the record of each regrade."""

from __future__ import annotations

from typing import Any

from pydantic import Field, FiniteFloat, field_validator

from turnstile.models.base import ClientId, Model, check_json
from turnstile.models.status import EpisodeStatus, ErrorInfo
from turnstile.models.tasks import TaskRef

MAX_REASON = 1000


class KeptWork(Model):
    """The work of an episode as the server keeps it: the work folder's tar, the answer, the world's scores."""

    digest: str
    """SHA-256 of the file, as hex."""
    bytes: int
    """Bytes that the file takes on disk."""
    grader: str | None = None
    """Digest of what gave the grade that the episode has; None: it has none."""
    status: EpisodeStatus
    """The status in which the agent's work ended. The episode gets this status where only its grading failed, and
    a regrade that is applied makes that good."""
    error: ErrorInfo | None = None
    """The error that belongs to ``status``, such as a spent budget."""


class GradeRecord(Model):
    """A grade as an episode's record has it."""

    reward: float | None
    components: dict[str, FiniteFloat] = Field(default_factory=dict)
    detail: dict[str, Any] = Field(default_factory=dict)
    """As ``Episode.grading``."""
    grader: str | None = None
    """Digest of what judged: the grading fields and files of the task, and the server's graders."""

    @property
    def failed_tests(self) -> dict[str, tuple[str, ...]]:
        """By grader: ids of the failed tests that the detail lists (at most 20)."""
        parts = {name: part for name, part in self.detail.items() if isinstance(part, dict)}
        return {
            name: tuple(str(one["id"]) for one in part.get("failed", ()) if isinstance(one, dict) and "id" in one)
            for name, part in parts.items()
        }


class RegradeRequest(Model):
    """Body of ``POST /episodes/{id}/regrade``."""

    regrade_id: ClientId
    """The same id at the same episode is judged once: the recorded regrade is the answer. With another ``task`` it
    is refused."""
    apply: bool = False
    """Make the new grade the episode's. With an id that was judged before without it: apply that grade."""
    task: TaskRef | None = None
    """Judge as this task says; None: as the episode's own says now."""
    reason: str | None = Field(default=None, max_length=MAX_REASON)
    """For the record."""

    @field_validator("task")
    @classmethod
    def _task_is_json(cls, task: TaskRef | None) -> TaskRef | None:
        if task is not None:
            check_json(task.model_extra or {})
        return task


class Regrade(Model):
    """One regrade: what the episode had, and what its work was given."""

    regrade_id: str
    episode_id: str
    at: float
    """Unix time."""
    reason: str | None = None
    task: TaskRef | None = None
    """The other task that it was judged by; None: its own."""
    before: GradeRecord
    before_status: EpisodeStatus
    after: GradeRecord
    applied: bool = False

    @property
    def differs(self) -> bool:
        """True if the reward, a component or the outcome of a test changed."""
        return self.before.reward != self.after.reward or any(
            (self.changed_components, self.newly_failed, self.newly_passed)
        )

    @property
    def changed_components(self) -> dict[str, tuple[float | None, float | None]]:
        """Before and after, by name; None where the grade has no such component."""
        before, after = self.before.components, self.after.components
        names = dict.fromkeys((*before, *after))
        found = {name: (before.get(name), after.get(name)) for name in names}
        return {name: pair for name, pair in found.items() if pair[0] != pair[1]}

    @property
    def newly_failed(self) -> tuple[str, ...]:
        """Ids of the tests that failed now and not before, by a grader that gave both grades."""
        return _only_in(self.after, self.before)

    @property
    def newly_passed(self) -> tuple[str, ...]:
        """Ids of the tests that failed before and not now, by a grader that gave both grades."""
        return _only_in(self.before, self.after)


def _only_in(one: GradeRecord, other: GradeRecord) -> tuple[str, ...]:
    """Failed tests that the other grade does not list, of the graders that gave both."""
    known = other.failed_tests
    return tuple(
        test
        for grader, tests in one.failed_tests.items()
        if grader in known
        for test in tests
        if test not in known[grader]
    )
