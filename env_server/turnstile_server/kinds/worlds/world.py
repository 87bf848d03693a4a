"""``World``, the base class of tasks that are Python classes, and what its methods take and give.

Authors of tasks import this. It imports nothing heavy, starts nothing and knows no server: a world can be made
and played in a plain unit test.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias

from turnstile_server.own_tools import CommandOutput

DEFAULT_SEED = 0
"""The seed of a task that names none, for episodes that name none."""


@dataclass(frozen=True)
class WorldTask:
    """One task of a world.

    ``id``: unique over all tasks of a server; letters, digits, ``_`` and ``-``, up to 64. ``parameters`` are
    passed to ``reset`` by name. ``seed``: for episodes that name none. ``instruction``: what lists of tasks show,
    and what the agent is asked if ``reset`` says nothing else; empty: the class's docstring. ``fields``: further
    fields as in a task file (``docs/tasks.md``): ``limits``, ``difficulty``, ``tags``, ``base``, ``tests``, …
    """

    id: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    seed: int = DEFAULT_SEED
    instruction: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """The start of an episode: the instruction, and text files for the work folder by relative path.

    The files come over those of the task's ``base``. They need a sandbox (``World.needs_sandbox``).
    """

    instruction: str
    files: Mapping[str, str] = field(default_factory=dict)


class WorldSandbox(Protocol):
    """The episode's sandbox as its world may use it. The calls block; they are bounded like the agent's own.

    What is in the sandbox is the agent's: its files and programs may be made to mislead. Nothing of it runs or is
    unpacked on the host.
    """

    @property
    def workdir(self) -> str:
        """The work folder."""
        ...

    def read(self, path: str) -> bytes:
        """A file; a relative path starts in the work folder. Raises OSError where it cannot be read."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Makes or replaces a file, with its folders. Raises OSError."""
        ...

    def run(self, command: str, *, timeout_s: float = 60.0) -> CommandOutput:
        """Runs a command with bash in the work folder, as the agent's user."""
        ...


Begun: TypeAlias = "str | Start | None"
"""Result of ``reset``; None: the task's own instruction."""
Scores: TypeAlias = "float | Mapping[str, float]"
"""Result of ``grade``: a reward from 0 to 1, or its components by name, each from 0 to 1; their product is the
reward."""


class ToolError(Exception):
    """A tool could not do what was asked: the agent gets the text as the tool's result, marked as an error.

    Any other exception of a tool is a result too, but counts as a mistake in the world's code, and is logged.
    """


class World(ABC):
    """A task as a class. One instance is one episode: made for it, never shared, closed at its end.

    Methods marked with ``@tool`` are the agent's tools. All methods may be plain functions or coroutines. They run
    one at a time, all in one thread of the instance's own, so a world needs no locks and may keep what belongs to
    a thread (a SQLite connection). They never run on the server's event loop, so a method that blocks delays its
    own episode only.

    ``reset`` must be there; ``grade``, ``respond``, ``solve`` and ``close`` count where a class defines them.
    """

    needs_sandbox: ClassVar[bool] = False
    """The agent gets a sandbox with the tools ``bash``, ``read_file``, …, beside the world's own."""

    episode_id: str = ""
    """Set before ``reset``."""
    answer: str | None = None
    """The last answer that the agent submitted; set before ``respond`` and ``grade``."""
    step_reward: object = None
    """A tool may set it, to a number: a reward for the agent's turn that called the tool. It is taken, and None
    again, when the tool has returned."""
    sandbox: WorldSandbox | None = None
    """The episode's sandbox, from the first tool call to ``grade``; None: it has none, or not yet."""

    @classmethod
    def tasks(cls) -> Iterable[WorldTask]:
        """The tasks of this class: one, named after it, unless a world says otherwise."""
        return (WorldTask(task_id(cls)),)

    @abstractmethod
    def reset(self, seed: int, *args: Any, **kwargs: Any) -> Begun | Awaitable[Begun]:
        """Makes the state of one episode: called once, first. The same seed and parameters make the same world.

        A world declares ``reset(self, seed: int)``, and a parameter for each that its tasks name. Raising fails
        the episode, with the task at fault.
        """

    def grade(self) -> Scores | Awaitable[Scores]:
        """The reward, by the state that the agent left behind. Called once, after its last tool call has ended. A
        world without it has no reward of its own. Where it raises, or does not return in time, a new instance that
        no agent touched is graded (after ``solve``, where there is one): if that has a score, the agent caused the
        failure, and the reward is 0; if not, the task is at fault, and there is no reward.
        """
        raise NotImplementedError

    def respond(self, answer: str) -> str | Awaitable[str | None] | None:
        """Plays the user: what the user says to a message of the agent, None where the conversation is over.

        Called when the agent calls ``submit``. Without it, the first ``submit`` is the answer.
        """
        raise NotImplementedError

    def solve(self) -> str | Awaitable[str | None] | None:
        """Plays a known solution on this world's own methods, and returns the answer to submit, or None.

        For ``turnstile tasks validate``, which proves with it that the task can be solved.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:  # noqa: B027 - optional
        """Releases what the world holds. Called once, last, whatever happened; also where ``reset`` failed."""


def defines(cls: type[World], method: str) -> bool:
    """True if the class has its own version of ``method``, one of ``World``'s optional methods."""
    return vars(World)[method] is not next(vars(base)[method] for base in cls.__mro__ if method in vars(base))


def task_id(cls: type[World]) -> str:
    """The id of a class's only task: its name in lower case, ``CoffeeShop`` is ``coffee-shop``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()


def about(cls: type[World]) -> str:
    """The first paragraph of the class's own docstring, as one line; empty without one."""
    text = (cls.__doc__ or "").strip()
    return " ".join(text.split("\n\n")[0].split())
