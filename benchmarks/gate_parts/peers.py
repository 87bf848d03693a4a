"""The peers: other projects' gateways, each installed from PyPI into an environment of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from gate_parts.conversation import Reply
from gate_parts.process import Process
from gate_parts.server import Server, fetch

RLLM: Final = "rllm-model-gateway"
AGENTCORE: Final = "agentcore-rl-toolkit"
AGENTCORE_VERSION: Final = "0.2.0"
REQUIREMENTS: Final = {RLLM: RLLM, AGENTCORE: f"{AGENTCORE}[gateway]=={AGENTCORE_VERSION}"}
LAUNCHER: Final = Path(__file__).resolve().with_name("agentcore_server.py")


@dataclass(frozen=True, slots=True)
class Site:
    """Where a peer is to run. ``folder``: for what it writes."""

    engine_url: str
    port: int
    folder: Path
    model: Path
    episodes: int


class Peer(Protocol):
    """How a peer is started and called."""

    @property
    def name(self) -> str: ...

    @property
    def ready_path(self) -> str: ...

    def command(self, site: Site) -> list[str]: ...

    def server(self, site: Site, process: Process) -> Server:
        """For a ``process`` of ``command(site)`` that answers."""


@dataclass
class RllmServer(Server):
    async def check_captured(self, reply: Reply) -> None:
        await asyncio.to_thread(fetch, self.base_url + "/admin/flush", {})
        traces = json.loads(await asyncio.to_thread(fetch, self.base_url + "/sessions/s0/traces?limit=1"))
        if not holds_reply(traces, reply):
            raise SystemExit(f"{self.name} did not record the tokens of its first call")


@dataclass(frozen=True, slots=True)
class Rllm:
    """``rllm-model-gateway`` with one of its stores, ``memory`` or ``sqlite``: it forwards chat messages to a
    vLLM, and keeps the token ids that come back."""

    store: str
    venv: Path
    ready_path: str = "/health"

    @property
    def name(self) -> str:
        return f"rllm-{self.store}"

    def command(self, site: Site) -> list[str]:
        options = {
            "--host": "127.0.0.1",
            "--port": str(site.port),
            "--worker": f"{site.engine_url}/v1",
            "--store": self.store,
            "--db-path": str(site.folder / "rllm.sqlite3"),
            "--log-level": "WARNING",
        }
        return [str(self.venv / "bin" / RLLM), *(word for pair in options.items() for word in pair)]

    def server(self, site: Site, process: Process) -> Server:
        paths: list[tuple[str, dict[str, str]]] = [
            (f"/sessions/s{index}/v1/chat/completions", {}) for index in range(site.episodes)
        ]
        return RllmServer(self.name, site.port, process, paths)


@dataclass
class AgentcoreServer(Server):
    """Each slice has sessions of its own: what it holds would otherwise grow with the benchmark, not with an
    episode. The first slice's are kept for ``check_captured``."""

    linear: bool = False
    slice: int = 0
    kept: list[str] = field(default_factory=list)

    async def begin_slice(self) -> None:
        if self.slice > 1:
            for session in self._sessions():
                await asyncio.to_thread(fetch, f"{self.base_url}/bench/sessions/{session}", None, "DELETE")
        self.slice += 1
        headers = [{"authorization": f"Bearer {session}"} for session in self._sessions()]
        self.paths = [("/v1/chat/completions", header) for header in headers]
        self.kept = self.kept or self._sessions()[:1]

    async def check_captured(self, reply: Reply) -> None:
        content = await asyncio.to_thread(fetch, f"{self.base_url}/bench/sessions/{self.kept[0]}")
        records = json.loads(content)
        if not trains_reply(records, reply):
            raise SystemExit(f"{self.name} did not record the tokens of its first calls")
        if self.linear and not continued(records):
            raise SystemExit(
                f"{self.name} tokenized each prompt whole, which is what its other mode is measured for"
            )

    def _sessions(self) -> list[str]:
        return [f"s{index}-{self.slice}" for index in range(len(self.paths))]


@dataclass(frozen=True, slots=True)
class Agentcore:
    """The rollout gateway of ``agentcore-rl-toolkit`` in one of its modes: ``tree`` (its default) renders and
    tokenizes each prompt whole, ``linear`` renders it whole and tokenizes what is new."""

    history_mode: str
    venv: Path
    ready_path: str = "/healthz"

    @property
    def name(self) -> str:
        return f"agentcore-{self.history_mode}"

    def command(self, site: Site) -> list[str]:
        python = str(self.venv / "bin" / "python")
        return [python, "-I", str(LAUNCHER), site.engine_url, str(site.model), str(site.port), self.history_mode]

    def server(self, site: Site, process: Process) -> Server:
        linear = self.history_mode == "linear"
        return AgentcoreServer(self.name, site.port, process, [("", {})] * site.episodes, linear=linear)


def holds_reply(traces: Sequence[dict[str, Any]], reply: Reply) -> bool:
    """Whether the first of rLLM's traces has the ids of the ``reply`` and some of the prompt's."""
    return (
        bool(traces)
        and traces[0]["completion_token_ids"] == list(reply.ids)
        and bool(traces[0]["prompt_token_ids"])
    )


def trains_reply(records: Sequence[dict[str, Any]], reply: Reply) -> bool:
    """Whether each of agentcore's records trains the ids of the ``reply``, as often as its mask has room for them,
    and nothing else. A mask covers the end of a record's tokens."""

    def trained(record: dict[str, Any]) -> list[int]:
        mask = record["loss_mask"]
        tail = record["token_ids"][len(record["token_ids"]) - len(mask) :]
        return [token for token, on in zip(tail, mask, strict=True) if on]

    found = [trained(record) for record in records]
    return bool(found) and all(ids and ids == list(reply.ids) * (len(ids) // len(reply.ids)) for ids in found)


def continued(records: Sequence[dict[str, Any]]) -> bool:
    """Whether agentcore went on from the ids of an earlier call at least once, as records of linear mode say."""
    return any(record["metadata"].get("linear_healer", {}).get("healed_turns", 0) > 0 for record in records)


def install(package: str, venv: Path) -> str:
    """Installs a peer into a virtual environment of its own, unless that has it; returns its version."""
    python = venv / "bin" / "python"
    found = _version(package, python) if python.exists() else None
    if found is None or (package == AGENTCORE and found != AGENTCORE_VERSION):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--quiet", REQUIREMENTS[package]], check=True)
        found = _version(package, python)
    if found is None:
        raise SystemExit(f"{REQUIREMENTS[package]} was installed into {venv} and is not there")
    return found


def _version(package: str, python: Path) -> str | None:
    """None where that Python lacks it."""
    script = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", script], check=False, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
