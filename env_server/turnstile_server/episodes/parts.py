"""The parts that the register of episodes is made with."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile_server.backends import Backends
from turnstile_server.engines.protocol import Engine
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.episodes.auditor import Auditor
from turnstile_server.episodes.keys import EpisodeKeys
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.journal.protocol import Journal
from turnstile_server.observability.metrics import Metrics
from turnstile_server.settings import Settings
from turnstile_server.tools.toolbox import Toolbox


@dataclass(frozen=True, slots=True)
class EpisodeParts:
    """The parts of episodes. ``agent_url``: the agent listener's address, where a caller knows no better."""

    journal: Journal
    pipeline: CallPipeline
    auditor: Auditor
    keys: EpisodeKeys
    backends: Backends
    agent_url: str
    settings: Settings
    metrics: Metrics
    engine: Engine
    versions: WeightVersions
    toolbox: Toolbox
    template_hash: str
    """The renderer's."""
