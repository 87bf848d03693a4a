"""The environment of a task: code of its kind that takes part in each of its episodes.

An environment may write the instruction, serves tools beside the sandbox's, answers what the agent submits, and
scores the state that the agent left. A kind of task that has one derives its ``TaskEnvironment`` from the class
here, and its source gives it to its tasks; nothing else of the server knows the kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnstile_server.sandboxes.protocol import Sandbox
from turnstile_server.settings import Settings
from turnstile_server.tasks.shared import Shared
from turnstile_server.tools.protocol import OwnTools


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """The instruction of one episode, and text files for its work folder by relative path, over the task's."""

    instruction: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnvironmentHost:
    """The parts of a server, and of one episode, that an environment is opened with."""

    episode_id: str
    instruction: str
    """The task's."""
    turn_bounds: tuple[float, float] | None
    """Lowest and highest reward of one turn; None: any finite number."""
    settings: Settings
    shared: Shared
    """For what all environments of one server share."""
    sandbox: Callable[[], Sandbox | None]
    """Gives the episode's sandbox, from the end of its preparation to the end of ``grade``; None: it has none."""
    turn_id: Callable[[], str | None]
    """Gives the id of the agent's latest turn; None: it has none yet."""
    proof: bool = False
    """The task is being proved, and no agent acts: what fails is the task's own fault."""


class EpisodeEnvironment(OwnTools, Protocol):
    """The environment of one episode. Its tools (``OwnTools``) are opened after ``reset``.

    Owned by the episode's owner task, which calls ``close`` on every path.
    """

    @property
    def talks(self) -> bool:
        """True if it plays a user who answers what the agent submits."""
        ...

    @property
    def turn_rewards(self) -> Mapping[str, float]:
        """Rewards that it gave to turns of the agent, by turn id, so far."""
        ...

    async def reset(self, seed: int | None) -> EpisodeStart:
        """Makes its state; called first, once. ``seed`` None: the task's.

        Raises TaskFailed; WorldUnavailable where there is no room for another one.
        """
        ...

    async def respond(self, answer: str) -> str | None:
        """The simulated user's reply to a submitted answer; None: there is no user, or no more to say.

        Raises TaskFailed; AgentFailed where it was the agent who made it fail.
        """
        ...

    async def grade(self, answer: str | None) -> Mapping[str, float] | None:
        """Scores by component, each from 0 to 1; None where it gives none. ``answer``: the last one submitted.

        Called once, after the last tool call has ended. Raises TaskFailed, SandboxFailed, FileProblem (a file of
        the agent's is missing or unreadable), AgentFailed (the agent made it fail), and FinishedEarly where the
        episode ended before it was there.
        """
        ...

    async def solve(self) -> str | None:
        """Plays the known solution, and gives the answer to submit; None: it has neither. Raises TaskFailed."""
        ...

    async def close(self) -> None:
        """Releases what it holds. Never raises; may be repeated."""
        ...


class TaskEnvironment(ABC):
    """The environment of a task, which each of its episodes opens anew. Only a task source gives one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The environment for messages, with the word for its kind: ``world shop.py:Shop``."""

    @property
    @abstractmethod
    def component(self) -> str | None:
        """Name of the component of the reward that its scores make; None: it gives no scores."""

    @property
    @abstractmethod
    def unsolvable(self) -> str | None:
        """Reason why it can play no known solution: ``its world has no `solve```; None: it can."""

    @property
    @abstractmethod
    def offers_sandbox(self) -> bool:
        """The tools of a sandbox are the agent's, too. An agent that the server launches lives in a sandbox also
        where the environment is all that it should act on."""

    @property
    @abstractmethod
    def tool_names(self) -> Sequence[str]:
        """Names of the tools, as far as they are known before an episode."""

    @abstractmethod
    def shown(self) -> Mapping[str, Any]:
        """The environment as JSON values, for records and digests."""

    @abstractmethod
    def open(self, host: EnvironmentHost) -> EpisodeEnvironment:
        """The environment of one episode. Nothing of it has run yet."""
