"""What really happened, read from the logs of the engine and of the agents. Knows nothing of the server.

A generation is one reply as the engine sampled it (``engine.py``); an acknowledgement is one reply as an agent
got it whole (``specs/agent/player.py``), from its own log or from the receipts that it wrote into later prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NO_MARK = "0" * 12


@dataclass
class Sampled:
    """One generation. ``versions``: (start, version) of the weights, by position."""

    mark: str
    episode: str
    fed: int
    fed_sha: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As float32, which is what is promised to be kept."""
    text: str | None
    finish: str
    versions: list[tuple[int, str]]

    def version_at(self, position: int) -> str:
        return [version for start, version in self.versions if start <= position][-1]


@dataclass(frozen=True)
class Acknowledged:
    """A whole reply that an agent got. ``port``: its own end of the connection, 0 where it had none."""

    mark: str
    sha: str
    port: int
    at: str
    """Where it is written: ``log``, ``output`` or ``receipt``."""


@dataclass
class AgentLog:
    """What one agent wrote down."""

    got: list[Acknowledged] = field(default_factory=list)
    misdeeds: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    twice: list[list[str]] = field(default_factory=list)
    bad_tools: list[str] = field(default_factory=list)
    tools: int = 0
    unmarked: int = 0
    """Whole replies whose text was cut off before its mark."""
    misses: list[str] = field(default_factory=list)


def digest(text: str) -> str:
    return hashlib.sha256(text.strip().encode("utf-8", "replace")).hexdigest()[:8]


def json_lines(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The objects of a log; a line that a kill cut off, or that is none, is left out."""
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def read_agent_log(lines: Iterable[str], where: str) -> AgentLog:
    log = AgentLog()
    for line in json_lines(lines):
        match line.get("ev"):
            case "got" if line.get("mark") is None:
                log.unmarked += 1
            case "got":
                log.got.append(Acknowledged(line["mark"], line["sha"], line["port"], where))
            case "misdeed":
                log.misdeeds.append(line["kind"])
            case "refused":
                log.refused.append((line["status"], line["why"]))
            case "miss":
                log.misses.append(line["why"])
            case "twice":
                log.twice.append(line["marks"])
            case "tool":
                log.tools += 1
                if not line["ok"] and not line["failed"]:
                    log.bad_tools.append(json.dumps(line))
    return log


class EngineLog:
    """The log of an engine, or of several, read as far as it is written; ``read_on`` reads what is new."""

    def __init__(self, *paths: Path) -> None:
        self._at = dict.fromkeys(paths, 0)
        self.by_mark: dict[str, Sampled] = {}
        self._by_first: dict[float, list[Sampled]] = {}
        self.receipts: dict[str, set[tuple[str, str]]] = {}
        """(mark, digest of the text) by episode."""

    def read_on(self) -> None:
        for path in self._at:
            if path.exists():
                self._read_on(path)

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._at[path])
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at[path] += len(whole)
        for line in json_lines(whole.decode().splitlines()):
            if "from" in line:
                self.by_mark[line["mark"]].versions.append((line["from"], line["version"]))
            else:
                self._add(line)

    def _add(self, line: dict[str, Any]) -> None:
        logprobs = tuple(np.array(line["logprobs"], np.float32).tolist())
        sampled = Sampled(
            mark=line["mark"],
            episode=line["episode"],
            fed=line["fed"],
            fed_sha=line["fed_sha"],
            ids=tuple(line["ids"]),
            logprobs=logprobs,
            text=line["text"],
            finish=line["finish"],
            versions=[(0, line["version"])],
        )
        self.by_mark[sampled.mark] = sampled
        self._by_first.setdefault(logprobs[0], []).append(sampled)
        for mark, sha in line["receipts"]:
            self.receipts.setdefault(sampled.episode, set()).add((mark, sha))

    def of(self, logprobs: list[float], episode: str) -> Sampled | None:
        """The generation with these logprobs. A few share their first one by chance; then the longest that agrees
        counts, and one of this episode before others."""
        wanted = tuple(np.array(logprobs, np.float32).tolist())
        if not wanted:
            return None

        def agreeing(sampled: Sampled) -> tuple[int, bool]:
            pairs = zip(sampled.logprobs, wanted, strict=False)
            return next((at for at, (a, b) in enumerate(pairs) if a != b), len(wanted)), sampled.episode == episode

        return max(self._by_first.get(wanted[0], []), key=agreeing, default=None)

    def acknowledged(self, episode: str) -> list[Acknowledged]:
        """What the receipts of an episode's prompts prove."""
        found = self.receipts.get(episode, set())
        return [Acknowledged(mark, sha, 0, "receipt") for mark, sha in sorted(found) if mark != NO_MARK]
