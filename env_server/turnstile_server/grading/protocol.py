"""Input and output of grading, and the protocols of graders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from turnstile.models import LeftOut, WorkDiff
from turnstile_server.egress.log import NetworkLog
from turnstile_server.grading.package_processes import PackageProcesses
from turnstile_server.grading.places import GradingPlaces
from turnstile_server.sandboxes.protocol import SandboxProvider, SandboxSpec
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.spans import OpenSpan
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions
from turnstile_server.tasks.shared import Shared


@dataclass(frozen=True, slots=True)
class Work:
    """The work that an agent left behind."""

    archive: bytes | None = None
    """Tar of the work folder, as ``Sandbox.download`` gave it; never opened on the host. None: no sandbox, or no
    grader of the task reads the work (``GraderOptions.reads_work``)."""
    answer: str | None = None
    """The last answer that was submitted; None: none was."""
    environment_scores: Mapping[str, float] | None = None
    """Scores that the episode's environment gave, by component; None: its task has none that grades."""
    network: NetworkLog | None = field(default=None, compare=False)
    """Log of what its judging reaches by the network; None: nothing is recorded."""
    span: OpenSpan | None = field(default=None, compare=False)
    """Span of its grading, in which graders record their own; None: nothing is recorded."""
    session: object | None = field(default=None, compare=False)
    """Session in which the agent used the tools of a grader (``GraderOptions.open_tools``); None: it had none, or
    the work was kept, which a session cannot be."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the episode, for graders that are code: JSON values."""


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a reward."""

    value: float
    """Finite; in [0, 1], but of graders whose options have ``parts``."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Joins the grade's detail: JSON values."""
    summary: tuple[str, ...] = ()
    """Reasons why the value is not 1, for a person: each item is one line."""
    parts: Mapping[str, float] | None = None
    """Components by name that stand in the grade in the place of this one; ``value`` is their product, or what
    its grader says."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further components that stand beside it in the grade; they have weight 0 where the task gives them none."""
    spoiled: bool = False
    """The work itself kept it from being measured: the whole reward is the lowest of the task."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The judgement of one work."""

    reward: float | None
    """In the task's bounds; None: the task has nothing to grade by, or its reward is ``pending``."""
    components: Mapping[str, float] = field(default_factory=dict)
    detail: Mapping[str, Any] = field(default_factory=dict)
    """For the trainer only: which tests failed, what the diff changed, …; ``summary`` has it as lines to show."""
    pending: bool = False
    """The reward comes later, from the trainer."""

    def awaited(self) -> Grade:
        """The grade where the graders' reward is not the episode's: that comes later."""
        found = {} if self.reward is None else {"graders_reward": self.reward}
        return replace(self, reward=None, detail={**self.detail, **found}, pending=True)


class Grader(Protocol):
    """Gives a work its reward."""

    async def grade(self, task: Task, work: Work) -> Grade:
        """Raises SandboxUnavailable, SandboxFailed and GraderUnavailable (infrastructure: worth another try),
        TaskFailed, GraderFailed and RewardInvalid (the task cannot be graded at all). Work that breaks the
        tests, or ends the sandbox in which it is graded, is reward 0, not an error. An error's ``detail`` has
        the name of the ``grader`` and what was graded before it: ``components`` and ``grading``."""
        ...

    async def diff(self, episode_id: str, task: Task, archive: bytes, left_out: Iterable[LeftOut]) -> WorkDiff:
        """The changes of the work with this archive, as ``WorkDiffer.diff`` gives them. Raises the same."""
        ...

    async def close(self) -> None:
        """Ends the processes that graders have started."""
        ...


@dataclass(frozen=True, slots=True)
class GradingTools:
    """The parts that graders are built from."""

    sandboxes: SandboxProvider | None
    """None: this server has no sandboxes."""
    spec_of: Callable[[Task], SandboxSpec]
    """The sandbox that a task is graded in."""
    settings: GradingSettings
    tasks: TaskSettings
    places: GradingPlaces
    """``grading.parallel``: for sandboxes and programs that judge."""
    packages: PackageProcesses
    data_dir: Path | None = None
    """Folder in which graders keep files; None: they keep none."""
    of_server: Shared = field(default_factory=Shared)
    of_grading: Shared = field(default_factory=Shared)


class ComponentGrader(Protocol):
    """Grades one component. Made for one grading: ``Grader(tools, name, options)``.

    ``name``: of the component. ``options``: an ``Options`` of the class.
    Which tasks ask for it: see ``Task.graders``.
    """

    Options: ClassVar[type[GraderOptions] | None] = None
    """The model of an entry of ``grading``, checked when a task is read. None: no task can ask
    for it."""

    async def grade(self, task: Task, work: Work) -> Component:
        """Raises as ``Grader.grade`` does."""
        ...
