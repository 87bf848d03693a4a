"""A check-up of one agent: one shell call, one closing text, and whether all about them is as it must be.

What was seen becomes a report by a pure function; only ``check_up`` does anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict

from turnstile.models import EpisodeStatus, Limits, TaskRef
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import AgentNotInstalled, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.settings import Settings
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.testing.policy import Policy
from turnstile_server.testing.server import Rehearsal, RehearsalRefused, Rehearsed, rehearsing
from turnstile_server.testing.shell_policy import ShellPolicy, door_texts
from turnstile_server.testing.solution import solution_commands

COMMAND = "printf rehearsed > rehearsal.txt"
INSTRUCTION = (
    "Write the word `rehearsed`, without a newline, into the file rehearsal.txt in this folder, by a shell "
    "command. Then say that you are done."
)
TASK: dict[str, Any] = {
    "instruction": INSTRUCTION,
    "base": {"inline": {"README.md": "A folder to rehearse in.\n"}},
    "tests": {
        "files": {"inline": {"check.sh": 'test "$(cat rehearsal.txt)" = rehearsed\n'}},
        "runner": "command",
        "command": ["sh", "{tests}/check.sh"],
    },
}
MAX_TURNS = 40
"""Well above what a solution needs: an agent that goes round in circles is stopped."""

NO_PLACE = (SandboxUnavailable.type, TaskFailed.type)
"""Errors of an episode that say, before the first model call, that there is nowhere to run its agent."""


class Finding(BaseModel):
    """One line of a report. ``passed`` None: told, not judged."""

    model_config = ConfigDict(frozen=True)

    name: str
    passed: bool | None
    text: str


class Report(BaseModel):
    """``install_s`` None: it was installed before. ``refused``: requests by status, e.g. ``POST /v1/x 404``."""

    model_config = ConfigDict(frozen=True)

    agent: str
    version: str
    passed: bool
    findings: tuple[Finding, ...]
    sandboxes: str | None = None
    install_s: float | None = None
    wall_s: float | None = None
    peak_mb: float | None = None
    status: EpisodeStatus | None = None
    exit_code: int | None = None
    reward: float | None = None
    calls: dict[str, int] = {}
    """Model calls by dialect."""
    tool_calls: int = 0
    sampled: int = 0
    trained: int = 0
    untrained: dict[str, int] = {}
    breaks: dict[str, int] = {}
    cosmetic: dict[str, int] = {}
    refused: dict[str, int] = {}
    output: str = ""
    """The last of what the agent, or its installation, printed, where it did not pass."""


async def check_up(
    settings: Settings,
    agent: str,
    *,
    task_id: str | None = None,
    wall_s: float,
    env: Mapping[str, str] | None = None,
) -> Report:
    """``task_id`` None: the small built-in task. ``env``: the episode's.

    Raises StartupError (settings or sandboxes cannot be used), Unprocessable (no such agent), NotFound (no such
    task), TaskFailed (no solution that a shell could run)."""
    commands: Sequence[str] = [COMMAND]
    task = TaskRef.model_validate(TASK)
    if task_id is not None:
        found = (await anyio.to_thread.run_sync(load_tasks, settings.tasks.sources, settings.tasks)).get(task_id)
        commands, task = solution_commands(found, settings.tasks), TaskRef(id=task_id)
    policy: Policy = ShellPolicy(commands, door=door_texts(settings.tools))
    async with rehearsing(settings, policy) as rehearsal:
        spec = rehearsal.work.agents.get(agent)
        try:
            install_s = await _install(rehearsal, spec)
        except AgentNotInstalled as error:
            return _not_installed(spec, error.message)
        try:
            limits = Limits(wall_s=wall_s, max_turns=len(commands) + MAX_TURNS)
            seen = await rehearsal.play(agent, task, limits=limits, env=dict(env or {}))
        except RehearsalRefused as error:
            raise StartupError(str(error)) from error
        unusable = seen.episode.error
        if not seen.turns and unusable is not None and unusable.type in NO_PLACE:
            raise StartupError(unusable.message)
        return report(spec, seen, install_s=install_s, sandboxes=rehearsal.work.sandboxes.name)


async def _install(rehearsal: Rehearsal, spec: AgentSpec) -> float | None:
    """Seconds; None where it was installed before. Raises AgentNotInstalled."""
    installer = rehearsal.work.installer
    if installer.installed(spec):
        return None
    began = time.monotonic()
    await installer.install(spec)
    return time.monotonic() - began


def _not_installed(spec: AgentSpec, why: str) -> Report:
    finding = Finding(name="installed", passed=False, text=why)
    return Report(agent=spec.name, version=spec.version, passed=False, findings=(finding,), output=why)


def report(spec: AgentSpec, seen: Rehearsed, *, install_s: float | None, sandboxes: str) -> Report:
    """What an episode of ``spec`` says about it. Pure."""
    episode, stats = seen.episode, seen.samples.stats
    calls: dict[str, int] = {}
    for turn in seen.turns:
        calls[turn.dialect] = calls.get(turn.dialect, 0) + 1
    refused = {
        f"{one.method} {one.path} {one.status}": count
        for one, count in sorted(seen.requests.items(), key=lambda item: str(item[0]))
        if one.status >= 400
    }
    untrained = sum(stats.untrained.values())
    checks = [check.name for check in seen.audit.invariants if not check.passed]
    over = episode.status is EpisodeStatus.COMPLETED and episode.error is None
    ended = [episode.status.value]
    if episode.agent_exit_code is not None:
        ended.append(f"exit code {episode.agent_exit_code}")
    if episode.error is not None:
        ended.append(f"{episode.error.type}: {episode.error.message}")
    counted = f"{stats.sampled_tokens} sampled = {stats.trained_tokens} trained + {untrained} untrained"
    cut = _cut(seen)
    silent = "it offered the model no tools" if seen.turns and not seen.offered_tools else None
    if silent is not None and spec.offers_tools is not True:
        # Nothing that it could be asked to do would show more.
        called = _finding("tool calls", None, f"not judged: {silent}")
        work = _finding("work", None, f"not judged: {silent}")
    else:
        called = _finding(
            "tool calls",
            seen.tool_calls > 0,
            _told(str(seen.tool_calls), silent, None if seen.tool_calls else cut),
        )
        done = episode.reward == 1.0
        work = _finding("work", done, "done" if done else _told(f"reward {episode.reward}", cut))
    findings = (
        _finding("installed", True, "was installed before" if install_s is None else f"in {install_s:.1f} s"),
        _finding("started", bool(seen.turns), f"in {sandboxes}; {seen.wall_s:.1f} s to its end{_memory(seen)}"),
        _finding("model calls", spec.dialect in calls, _counts(calls)),
        called,
        _finding("ended", over, ", ".join(ended)),
        work,
        _finding("tokens", seen.accounted, f"{counted}{_reasons(stats.untrained)}"),
        _finding("audit", seen.audit.passed, "every invariant holds" if not checks else ", ".join(checks)),
        _finding("breaks", None, _counts(stats.breaks)),
        _finding("cosmetic", None, _counts(stats.cosmetic)),
        _finding("refused", None, _counts(refused)),
    )
    passed = all(finding.passed is not False for finding in findings)
    return Report(
        agent=spec.name,
        version=spec.version,
        passed=passed,
        findings=findings,
        sandboxes=sandboxes,
        install_s=install_s,
        wall_s=seen.wall_s,
        peak_mb=None if seen.peak_bytes is None else seen.peak_bytes / (1 << 20),
        status=episode.status,
        exit_code=episode.agent_exit_code,
        reward=episode.reward,
        calls=calls,
        tool_calls=seen.tool_calls,
        sampled=stats.sampled_tokens,
        trained=stats.trained_tokens,
        untrained=stats.untrained,
        breaks=stats.breaks,
        cosmetic=stats.cosmetic,
        refused=refused,
        output="" if passed else episode.agent_output or "",
    )


def _cut(seen: Rehearsed) -> str | None:
    """The scripted replies are short: where one was cut, the agent asked for less, or its prompt left no room."""
    cut = [turn.sampling.max_new_tokens for turn in seen.turns if turn.finish_reason == "length"]
    if not cut:
        return None
    return (
        f"{len(cut)} of {len(seen.turns)} replies were cut at their length, at {min(cut)} tokens the shortest: "
        "the max_tokens that the agent asks for, or the end of the context"
    )


def _finding(name: str, passed: bool | None, text: str) -> Finding:
    return Finding(name=name, passed=passed, text=text)


def _told(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part is not None)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _reasons(untrained: dict[str, int]) -> str:
    return f" ({_counts(untrained)})" if untrained else ""


def _memory(seen: Rehearsed) -> str:
    return "" if seen.peak_bytes is None else f", {seen.peak_bytes / (1 << 20):.0f} MB at most"
