"""What many episodes at once need: servers, engines, hosts for sandboxes, cores for grading, traffic of images.

Little's law: what is open at once is what begins in a second times how long it takes. So ``open`` episodes of
``T`` seconds are ``open / T`` a second, and of each part of one so many at once as its share of ``T``. Times
are means over episodes, without what they waited for a place, as a fleet with enough of everything has them. What
several share is not foreseen: on a full host or engine the same parts take longer. ``benchmarks/plan.py`` holds it
against what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from turnstile.models import EpisodeSummary

MIB_PER_GIB = 1024
GRADING_SANDBOXES = 2
"""Of one work that is judged: the check's, and that of the work's programs."""


@dataclass(frozen=True)
class EpisodeKind:
    """One episode of a kind, on average. Seconds without those in which it waited for a place."""

    setup_s: float
    model_s: float
    agent_s: float
    """The agent worked itself, or a tool did."""
    grading_s: float
    turns: float
    sampled_tokens: float

    @property
    def work_s(self) -> float:
        """With a sandbox and a place of ``episodes.max_running``."""
        return self.setup_s + self.model_s + self.agent_s

    @property
    def total_s(self) -> float:
        return self.work_s + self.grading_s


def kind_of(rows: Iterable[EpisodeSummary]) -> EpisodeKind:
    """The mean of those that have ended. Raises ValueError if none has."""
    ended = [row for row in rows if row.ended_s is not None]
    if not ended:
        raise ValueError("none of these episodes has ended: play some of the kind first, or give every number")

    def mean(values: Iterable[float]) -> float:
        return math.fsum(values) / len(ended)

    return EpisodeKind(
        setup_s=mean(row.seconds.setup for row in ended),
        model_s=mean(row.seconds.model for row in ended),
        agent_s=mean(row.seconds.agent + row.seconds.tools for row in ended),
        grading_s=mean(row.seconds.grading for row in ended),
        turns=mean(row.turns for row in ended),
        sampled_tokens=mean(row.sampled_tokens for row in ended),
    )


@dataclass(frozen=True)
class Capacities:
    """What one of each part does or takes. The server's own are measured (``docs/performance.md``); the others are
    the user's, and differ a lot."""

    engine_tokens_s: float = 5000.0
    """Tokens that one engine samples in a second, with as many calls at once as the plan has for it."""
    host_cores: int = 64
    host_gib: float = 256.0
    sandbox_gib: float = 0.4
    """Memory of one sandbox at its peak (npm agents: 0.14 to 0.39 without what they run)."""
    sandbox_cores: float = 0.1
    """Of one agent with its tools, on average over its episode."""
    grading_cores: float = 1.0
    """Cores that one grading keeps busy."""
    image_gib: float = 2.0
    """Of a task's image, as it comes from the registry; 0: hosts have the images."""
    group: int = 8
    """Episodes of one task that are played together, on one server."""
    server_episodes: int = 256
    """Open episodes of one server process (proved for ten minutes)."""
    server_mib: float = 210.0
    episode_mib: float = 3.7
    """Of a server's memory, for an open episode of 131,000 tokens; 0.6 for one of 32,000."""
    turn_cpu_s: float = 0.0033
    """Of the gate, for a streamed turn; 0.0016 for a plain one."""
    episode_cpu_s: float = 0.105
    """Of the server, for an episode beside its turns."""


@dataclass(frozen=True)
class FleetPlan:
    """Counts are whole and rounded up; rates and concurrencies are means of the steady state."""

    episodes_s: float
    turns_s: float
    tokens_s: float
    working: float
    """Episodes with a place."""
    calls: float
    """Model calls at once."""
    gradings: float
    """Works judged at once."""
    sandboxes: float
    engines: int
    servers: int
    """Server processes."""
    server_cores: float
    gate_cores: float
    """Of these, for model calls."""
    server_gib: float
    sandbox_gib: float
    sandbox_cores: float
    """Of agents and tools."""
    grading_cores: float
    hosts: int
    """Machines for sandboxes, gradings included; the larger of what memory and cores ask for."""
    images_s: float
    image_gib_s: float
    """From the registry, where a group's episodes share a host; ``group`` times as much where not."""

    @property
    def gate_share(self) -> float:
        """The gate's share of all cores here."""
        return self.gate_cores / (self.server_cores + self.sandbox_cores + self.grading_cores)


def plan(open_episodes: int, kind: EpisodeKind, each: Capacities) -> FleetPlan:
    """What ``open_episodes`` of the kind at once need. Raises ValueError if they take no time."""
    if kind.total_s <= 0:
        raise ValueError("these episodes take no time: give --model-s, --agent-s, --setup-s or --grading-s")
    rate = open_episodes / kind.total_s
    working, gradings = rate * kind.work_s, rate * kind.grading_s
    sandboxes = working + GRADING_SANDBOXES * gradings
    sandbox_gib, sandbox_cores = sandboxes * each.sandbox_gib, working * each.sandbox_cores
    grading_cores = gradings * each.grading_cores
    servers = math.ceil(open_episodes / each.server_episodes)
    gate_cores = rate * kind.turns * each.turn_cpu_s
    images_s = rate / each.group if each.image_gib else 0.0
    hosts = max(sandbox_gib / each.host_gib, (sandbox_cores + grading_cores) / each.host_cores)
    return FleetPlan(
        episodes_s=rate,
        turns_s=rate * kind.turns,
        tokens_s=rate * kind.sampled_tokens,
        working=working,
        calls=rate * kind.model_s,
        gradings=gradings,
        sandboxes=sandboxes,
        engines=math.ceil(rate * kind.sampled_tokens / each.engine_tokens_s),
        servers=servers,
        server_cores=gate_cores + rate * each.episode_cpu_s,
        gate_cores=gate_cores,
        server_gib=(servers * each.server_mib + open_episodes * each.episode_mib) / MIB_PER_GIB,
        sandbox_gib=sandbox_gib,
        sandbox_cores=sandbox_cores,
        grading_cores=grading_cores,
        hosts=math.ceil(hosts),
        images_s=images_s,
        image_gib_s=images_s * each.image_gib,
    )
