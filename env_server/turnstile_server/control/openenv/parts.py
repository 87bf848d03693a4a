"""What the OpenEnv routes are built from."""

from __future__ import annotations

from dataclasses import dataclass

import anyio
from starlette.types import ASGIApp

from turnstile_server.control.protocol import EpisodeService
from turnstile_server.control.trainer_sampling import TrainerSampling
from turnstile_server.settings import ControlSettings, OpenEnvSettings
from turnstile_server.tasks.protocol import TaskCatalog
from turnstile_server.tools.protocol import ToolDirectory
from turnstile_server.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class OpenEnvParts:
    """``gate``: the model door, called in process by ``generate`` as an agent would call it, so that there is one
    way to record a turn. ``training``: where the training loop samples, the calls that wait for it. ``tasks``: to
    tell an external agent the instruction of a task named by id. ``closing``: set when the server stops; sockets
    then close at once, and cancel nothing."""

    episodes: EpisodeService
    directory: ToolDirectory
    toolbox: Toolbox
    gate: ASGIApp
    training: TrainerSampling
    tasks: TaskCatalog | None
    control: ControlSettings
    settings: OpenEnvSettings
    closing: anyio.Event
