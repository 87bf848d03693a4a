"""The parts that the OpenEnv server is built from, and the environment's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import anyio
from starlette.types import ASGIApp

from turnstile_server.control.agent_address import AgentAddress
from turnstile_server.control.protocol import EpisodeService
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.settings import Bounds, ControlSettings, OpenEnvSettings
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tools.protocol import ToolDirectory
from turnstile_server.tools.toolbox import Toolbox

NAME = "turnstile"
DESCRIPTION = "Token-exact episodes from real language-model agents, for training them by reinforcement learning."

PRODUCTION = "this server is in production mode (openenv.mode), which has tools only (/mcp)"


def metadata() -> dict[str, str]:
    """Answer to ``GET /metadata``: name, description and version of the environment."""
    return {"name": NAME, "description": DESCRIPTION, "version": version("turnstile-rl")}


@dataclass(frozen=True)
class OpenEnvBounds(Bounds):
    """Bounds of OpenEnv's routes that are constants."""

    max_ahead: int = 16
    """Unanswered frames of one WebSocket; it is closed when a client sends more."""
    kept: int = 1024
    """Ended detached episodes whose key and step count are kept."""


@dataclass(frozen=True, slots=True)
class OpenEnvParts:
    """The parts that the OpenEnv server is built from.

    ``gate``: the model API, called in process by ``generate`` as an agent calls it, so that turns are recorded in
    one way only. ``training``: the calls that wait for the training loop, where it samples. ``tasks``: to look up
    the instruction of a task named by id. ``closing``: set when the server stops; sockets then close at once and
    cancel nothing. ``address``: of the agent listener.
    """

    episodes: EpisodeService
    directory: ToolDirectory
    toolbox: Toolbox
    gate: ASGIApp
    training: TrainerSampling
    tasks: TaskCatalog | None
    control: ControlSettings
    settings: OpenEnvSettings
    closing: anyio.Event
    address: AgentAddress
