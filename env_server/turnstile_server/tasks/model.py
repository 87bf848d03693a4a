"""A task, checked field by field. The file format is this model as YAML (one task) or JSONL (one per line).

Nothing of ``tests``, ``answer`` and ``gold`` ever enters a sandbox in which an agent runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    InstanceOf,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from turnstile.models import Limits
from turnstile.models.base import ClientId
from turnstile_server.sandboxes.protocol import IMAGE_WORKDIR, WORKDIR
from turnstile_server.settings.own_tools import OwnToolSpecs
from turnstile_server.tasks.answer import Answer
from turnstile_server.tasks.environment import TaskEnvironment
from turnstile_server.tasks.files import Files, FilesOptions
from turnstile_server.tasks.grader_options import (
    GradingEntry,
    gather_graders,
    gives_parts,
    name_kinds,
    reads_work,
    unit_kind,
)
from turnstile_server.tasks.hidden_tests import HiddenTests
from turnstile_server.tasks.image_build import FolderBuild
from turnstile_server.tasks.inner_path import InnerPath
from turnstile_server.tasks.network import NetworkWish
from turnstile_server.tasks.part import GraderOptions, ImageTests, TaskPart
from turnstile_server.tasks.reward import RewardRules
from turnstile_server.tasks.root_setup import DEFAULT_S, SetupSeconds, build_root_setup
from turnstile_server.tasks.script import EnvName, GoldScript, ScriptTests
from turnstile_server.tasks.steps import StepReward, TaskStep


class Gold(TaskPart):
    """A known solution, for `turnstile tasks validate` and scripted policies."""

    files: Files | None = Field(None, description="Files that replace those of the work folder.")
    delete: tuple[InnerPath, ...] = Field((), description="Paths to delete.")
    patch: str | None = Field(None, description="Unified diff, applied to the work folder after files and delete.")
    reverse: bool = Field(False, description="`patch` makes the bug: its reverse is applied.")
    answer: str | None = Field(None, description="What to submit.")
    script: GoldScript | None = Field(None, description="A program that solves the task, run after these.")
    reward: FiniteFloat = Field(1.0, description="What it must score; doing nothing must score less.")


class WrongWork(Gold):
    """A work that is known to be wrong, or right in part: `turnstile tasks validate` proves what it scores."""

    name: str = Field(min_length=1, max_length=64, description="For reports.")
    reward: FiniteFloat = Field(0.0, description="What it must score.")


class SandboxWish(TaskPart):
    """Resources that a task asks for. None takes the server's default; more than its ceiling is refused."""

    memory_mb: int | None = Field(None, ge=16)
    cpus: float | None = Field(None, gt=0)
    pids: int | None = Field(None, ge=8)


def _only_from_a_source(value: object) -> object:
    """Text from outside names no code of this machine."""
    if value is not None and not isinstance(value, TaskEnvironment):
        raise ValueError("code is a task source of its own, such as `file.py:Class`; it is not named in a task")
    return value


def _no_text(steps: object) -> object:
    """Text from outside has no steps."""
    if steps and not isinstance(steps, tuple):
        raise ValueError("only Harbor's task folders have steps")
    return steps or ()


class Task(TaskPart):
    """A task: the agent's instruction, the files and image it is given, and how its work is graded."""

    id: ClientId
    instruction: str = Field(min_length=1, description="The instruction to the agent.")
    image: str | None = Field(None, description="Docker image; None takes the server's (sandboxes.docker_image).")
    build: FolderBuild = Field(None, description="How the image is made. Not in files and requests.")
    workdir: str = Field(
        WORKDIR,
        pattern=rf"^(/|{IMAGE_WORKDIR}$)",
        description="Work folder inside the sandbox; `image`: the image's own (its WORKDIR).",
    )
    env: dict[EnvName, str] = Field(
        default_factory=dict, description="Variables of every command of agent and tests."
    )
    image_files: bool = Field(False, description="The work folder's files are the image's own.")
    base: Files | None = Field(None, description="Files the agent finds in the work folder.")
    git_history: Literal["keep", "one_commit"] = Field(
        "keep", description="`one_commit`: the agent's repositories have one commit, of the files as they stand."
    )
    setup: tuple[str, ...] = Field(
        (),
        description="Shell commands run in the work folder, for agent and grader. With `user: root`: a build.",
    )
    setup_timeout_s: SetupSeconds = Field(DEFAULT_S, description="Time for each of the set-up commands.")
    steps: Annotated[tuple[InstanceOf[TaskStep], ...], BeforeValidator(_no_text)] = Field(
        (), description="Played one after another; instruction, script and gold are the first one's. Not in files."
    )
    step_reward: StepReward = Field("mean", description="How the steps' rewards make the task's.")
    grading: Annotated[dict[str, GradingEntry], BeforeValidator(name_kinds)] = Field(
        default_factory=dict, description="Further graders by name, each with its options."
    )
    tools: OwnToolSpecs = Field(
        OwnToolSpecs(), description="Tools of its own, beside the server's. Not in inline tasks."
    )
    gold: Gold | None = None
    wrong: tuple[WrongWork, ...] = Field((), description="Works known to be wrong, with what each must score.")
    environment: Annotated[InstanceOf[TaskEnvironment] | None, BeforeValidator(_only_from_a_source)] = Field(
        None, description="Code that prepares, serves and scores its episodes. Not in files and requests."
    )
    reward: RewardRules = Field(
        RewardRules(), description="How the components make the reward; their product where it is not given."
    )
    limits: Limits = Limits()
    sandbox: SandboxWish = SandboxWish()
    network: NetworkWish = NetworkWish()
    difficulty: Literal["easy", "medium", "hard"] | None = None
    tags: tuple[str, ...] = ()
    metadata: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, fields: object) -> object:
        """The options of a grader that are written as a field of its name are an entry of ``grading``; set-up as
        root is a ``build``."""
        if not isinstance(fields, dict):
            return fields
        return gather_graders(build_root_setup(fields), cls.model_fields.keys())

    @field_validator("wrong")
    @classmethod
    def _named_once(cls, wrong: tuple[WrongWork, ...]) -> tuple[WrongWork, ...]:
        names = ["gold", "nothing", *(work.name for work in wrong)]
        if len(set(names)) != len(names):
            raise ValueError("each wrong work has a name of its own, and none is `gold` or `nothing`")
        return wrong

    @field_validator("grading")
    @classmethod
    def _asked_once(cls, grading: dict[str, GradingEntry]) -> dict[str, GradingEntry]:
        for name, entry in grading.items():
            if isinstance(entry, GraderOptions) and entry.once and name != entry.grader:
                raise ValueError(
                    f"a task has one grader `{entry.grader}`: name its entry so, in the place of {name!r}"
                )
        return grading

    @field_validator("reward")
    @classmethod
    def _fits_its_graders(cls, reward: RewardRules, info: ValidationInfo) -> RewardRules:
        grading = info.data.get("grading")
        if grading is None:
            return reward  # a field that is wrong itself
        unit = [name for name, entry in grading.items() if unit_kind(entry)]
        reward.check(tuple(grading), unit=unit, closed=not any(map(gives_parts, grading.values())))
        return reward

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of the graders that the task asks for. Each gives one component."""
        of_environment = None if self.environment is None else self.environment.component
        return (*(() if of_environment is None else (of_environment,)), *self.grading)

    @property
    def tests(self) -> HiddenTests | None:
        """The entry ``tests`` of ``grading``."""
        entry = self.grading.get("tests")
        return entry if isinstance(entry, HiddenTests) else None

    @property
    def script(self) -> ScriptTests | None:
        """The entry ``script`` of ``grading``."""
        entry = self.grading.get("script")
        return entry if isinstance(entry, ScriptTests) else None

    @property
    def answer(self) -> Answer | None:
        """The entry ``answer`` of ``grading``."""
        entry = self.grading.get("answer")
        return entry if isinstance(entry, Answer) else None

    @property
    def options(self) -> tuple[GraderOptions, ...]:
        """The entries of ``grading`` whose grader is known."""
        return tuple(entry for entry in self.grading.values() if isinstance(entry, GraderOptions))

    @property
    def tools_grader(self) -> GraderOptions | None:
        """The grader that has tools for the agent; None: none has."""
        return next((each for each in self.options if each.tools_of is not None), None)

    def at_step(self, index: int) -> Task:
        """The task that its step ``index`` is by itself: to be asked and graded."""
        step = self.steps[index]
        gold = None if step.gold is None else Gold(script=step.gold)
        grading = {**self.grading, "script": step.script}
        own = {"instruction": step.instruction, "grading": grading, "gold": gold, "base": step.start}
        return self.model_copy(update={**own, "steps": ()})

    @property
    def trust(self) -> Literal["boundary", "in_process"] | None:
        """The graders' trust in the work; None where none of it is run."""
        if any(each.in_process for each in self.options):
            return "in_process"
        return "boundary" if any(each.runs_tests for each in self.options) else None

    def trusts(self, grader: str) -> bool:
        """True where the work runs with the rights of the task's grader of this name."""
        entry = self.grading.get(grader)
        return isinstance(entry, GraderOptions) and entry.in_process

    @property
    def in_process(self) -> bool:
        """True if the work runs with the rights of what judges it (``trust: in_process``)."""
        return self.trust == "in_process"

    @property
    def graded(self) -> bool:
        """True if an episode of the task has a reward, at once or later."""
        return bool(self.graders) or self.reward.pending

    @field_serializer("environment")
    def _shown_environment(self, environment: TaskEnvironment | None) -> dict[str, Any] | None:
        return None if environment is None else dict(environment.shown())

    @property
    def all_files(self) -> tuple[Files | None, ...]:
        """The files of base, tests, gold solution and wrong works."""
        judges = (each.files for each in self.options if isinstance(each, FilesOptions))
        golds = (*(() if self.gold is None else (self.gold,)), *self.wrong)
        programs = (gold.script.files for gold in golds if gold.script is not None)
        steps = (files for index in range(len(self.steps)) for files in self.at_step(index).all_files)
        return (self.base, *judges, *(gold.files for gold in golds), *programs, *steps)

    @property
    def grades_tests(self) -> bool:
        """True if tests of any kind run on the work."""
        return any(each.runs_tests for each in self.options)

    @property
    def grades_files(self) -> bool:
        """True if the work folder is fetched for the graders; an answer alone needs none."""
        return self.grades_tests or any(map(reads_work, self.grading.values()))

    @property
    def image_tests(self) -> tuple[ImageTests, ...]:
        """The hidden tests in its image, one item for each grader that has some there."""
        return tuple(each.image_tests for each in self.options if each.image_tests is not None)

    @property
    def offers_sandbox(self) -> bool:
        """True if the tools of a sandbox are the agent's, where its episode has one."""
        return self.environment is None or self.environment.offers_sandbox

    @property
    def needs_sandbox(self) -> bool:
        """True if the agent gets a place to work in. Without one an agent can only submit an answer."""
        return self.grades_tests or self.base is not None or self.image is not None or bool(self.setup)
