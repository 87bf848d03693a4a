"""Checks one agent: it is installed, plays one small task on a scripted server, and its records are judged.

``check_agent`` plays the episode; ``judge`` turns its records into a report and is pure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import anyio
from pydantic import BaseModel, ConfigDict

from turnstile.models import EpisodeStatus, Limits, TaskRef
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.errors import AgentNotInstalled, SandboxUnavailable, StartupError, TaskFailed
from turnstile_server.gate.dialects.registry import load_dialect
from turnstile_server.settings import Settings
from turnstile_server.tasks.registry import load_usable_tasks
from turnstile_server.testing.policy import WatchedPolicy
from turnstile_server.testing.server import PlayedEpisode, RequestRefused, ScriptedServer, scripted_server
from turnstile_server.testing.shell_policy import ShellPolicy, endpoint_texts, solution_commands

COMMAND = "printf works > doctor.txt"
INSTRUCTION = (
    "Write the word `works`, without a newline, into the file doctor.txt in this folder, by a shell "
    "command. Then say that you are done."
)
TASK: dict[str, Any] = {
    "instruction": INSTRUCTION,
    "base": {"inline": {"README.md": "A folder for the doctor's task.\n"}},
    "tests": {
        "files": {"inline": {"check.sh": 'test "$(cat doctor.txt)" = works\n'}},
        "runner": "command",
        "command": ["sh", "{tests}/check.sh"],
    },
}
MAX_TURNS = 40
"""Well above what a solution needs; it stops an agent that loops."""

RESULT_CHARS = 120
"""Characters that a finding quotes of a tool result."""

NO_SANDBOX = (SandboxUnavailable.type, TaskFailed.type)
"""Errors of an episode that mean, before the first model call, that its agent cannot be run anywhere."""


class Finding(BaseModel):
    """One line of a report. ``passed`` None: information that is not judged."""

    model_config = ConfigDict(frozen=True)

    name: str
    passed: bool | None
    text: str


class DoctorReport(BaseModel):
    """The findings of a check of one agent.

    ``install_s`` is None if the agent was installed before. ``refused`` counts refused requests, e.g.
    ``POST /v1/x 404``. Times are in seconds, ``peak_mb`` in MiB.
    """

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
    offered_tools: tuple[str, ...] = ()
    called_tools: dict[str, int] = {}
    """Calls that the policy sampled, by tool; ``tool_calls`` counts those whose results came back."""
    sampled: int = 0
    trained: int = 0
    untrained: dict[str, int] = {}
    breaks: dict[str, int] = {}
    cosmetic: dict[str, int] = {}
    refused: dict[str, int] = {}
    output: str = ""
    """The end of what the agent, or its installation, printed; empty if the agent passed."""


async def check_agent(
    settings: Settings,
    agent: str,
    *,
    task_id: str | None = None,
    wall_s: float,
    env: Mapping[str, str] | None = None,
) -> DoctorReport:
    """Installs ``agent``, plays one episode with it and judges the records.

    ``task_id`` names a task whose known solution is played; None takes the small built-in task. ``wall_s`` is the
    time limit of the episode, ``env`` is added to the agent's environment. Without ``settings.model`` the shipped
    tokenizer and chat template are used. Raises StartupError (settings or sandboxes cannot be used), Unprocessable
    (no such agent), NotFound (no such task) and TaskFailed (no solution that a shell could run).
    """
    commands: Sequence[str] = [COMMAND]
    task = TaskRef.model_validate(TASK)
    if task_id is not None:
        found = (await anyio.to_thread.run_sync(load_usable_tasks, settings.tasks.sources, settings.tasks)).get(
            task_id
        )
        commands, task = solution_commands(found, settings.tasks), TaskRef(id=task_id)
    policy = WatchedPolicy(ShellPolicy(commands, fallback=endpoint_texts(settings.tools)))
    async with scripted_server(settings, policy) as server:
        spec = server.backends.agents.get(agent)
        try:
            install_s = await _install(server, spec)
        except AgentNotInstalled as error:
            return _not_installed(spec, error.message)
        try:
            limits = Limits(wall_s=wall_s, max_turns=len(commands) + MAX_TURNS)
            played = await server.play(agent, task, limits=limits, env=dict(env or {}))
        except RequestRefused as error:
            raise StartupError(str(error)) from error
        failure = played.episode.error
        if not played.turns and failure is not None and failure.type in NO_SANDBOX:
            raise StartupError(failure.message)
        sandboxes = server.backends.sandboxes.name
        return judge(spec, played, install_s=install_s, sandboxes=sandboxes, offered=policy.offered)


async def _install(server: ScriptedServer, spec: AgentSpec) -> float | None:
    """Seconds it took; None if the agent was installed before. Raises AgentNotInstalled."""
    installer, carried = server.backends.installer, server.backends.sandboxes.carries_runtime
    if installer.installed(spec, carried=carried):
        return None
    began = time.monotonic()
    await installer.install(spec, carried=carried)
    return time.monotonic() - began


def _not_installed(spec: AgentSpec, why: str) -> DoctorReport:
    finding = Finding(name="installed", passed=False, text=why)
    return DoctorReport(agent=spec.name, version=spec.version, passed=False, findings=(finding,), output=why)


def judge(
    spec: AgentSpec,
    played: PlayedEpisode,
    *,
    install_s: float | None,
    sandboxes: str,
    offered: Collection[str],
) -> DoctorReport:
    """The report of the episode that ``spec``'s agent played, whose calls ``offered`` these tools. Pure."""
    episode, stats = played.episode, played.samples.stats
    calls: dict[str, int] = {}
    for turn in played.turns:
        calls[turn.dialect] = calls.get(turn.dialect, 0) + 1
    untrained = sum(stats.untrained.values())
    checks = [check.name for check in played.audit.invariants if not check.passed]
    over = episode.status is EpisodeStatus.COMPLETED and episode.error is None
    ended = [episode.status.value]
    if episode.agent_exit_code is not None:
        ended.append(f"exit code {episode.agent_exit_code}")
    if episode.error is not None:
        ended.append(f"{episode.error.type}: {episode.error.message}")
    counted = f"{stats.sampled_tokens} sampled = {stats.trained_tokens} trained + {untrained} untrained"
    cut = _cut(played)
    no_tools = "it offered the model no tools" if played.turns and not played.offered_tools else None
    if no_tools is not None and spec.offers_tools is not True:
        # The policy has nothing to call, so these two lines would say nothing about the agent.
        called = _finding("tool calls", None, f"not judged: {no_tools}")
        work = _finding("work", None, f"not judged: {no_tools}")
    else:
        called = _finding(
            "tool calls",
            played.tool_calls > 0,
            str(played.tool_calls) if played.tool_calls else _joined("0", no_tools or _unanswered(played), cut),
        )
        done = episode.reward == 1.0
        found = [f"reward {episode.reward}", _last_result(played), _read_only(spec), cut]
        work = _finding("work", done, "done" if done else _joined(*found))
    findings = (
        _finding("installed", True, "was installed before" if install_s is None else f"in {install_s:.1f} s"),
        _finding(
            "started", bool(played.turns), f"in {sandboxes}; {played.wall_s:.1f} s to its end{_memory(played)}"
        ),
        _finding("model calls", load_dialect(spec.dialect).name in calls, _counts(calls)),
        called,
        _finding("tools", None, f"called: {_counts(_called(played))}; offered: {_names(offered)}"),
        _finding("ended", over, ", ".join(ended)),
        work,
        _finding("tokens", played.accounted, f"{counted}{_reasons(stats.untrained)}"),
        _finding("audit", played.audit.passed, "every invariant holds" if not checks else ", ".join(checks)),
        _finding("breaks", None, _counts(stats.breaks)),
        _finding("cosmetic", None, _counts(stats.cosmetic)),
        _finding("refused", None, _counts(played.refused)),
    )
    passed = all(finding.passed is not False for finding in findings)
    return DoctorReport(
        agent=spec.name,
        version=spec.version,
        passed=passed,
        findings=findings,
        sandboxes=sandboxes,
        install_s=install_s,
        wall_s=played.wall_s,
        peak_mb=None if played.peak_bytes is None else played.peak_bytes / (1 << 20),
        status=episode.status,
        exit_code=episode.agent_exit_code,
        reward=episode.reward,
        calls=calls,
        tool_calls=played.tool_calls,
        offered_tools=tuple(sorted(offered)),
        called_tools=_called(played),
        sampled=stats.sampled_tokens,
        trained=stats.trained_tokens,
        untrained=stats.untrained,
        breaks=stats.breaks,
        cosmetic=stats.cosmetic,
        refused=played.refused,
        output="" if passed else episode.agent_output or "",
    )


def _called(played: PlayedEpisode) -> dict[str, int]:
    return dict(Counter(call.name for turn in played.turns for call in turn.reply.tool_calls))


def _unanswered(played: PlayedEpisode) -> str | None:
    """Reason why no tool call was run, where the agent offered tools."""
    if not played.turns:
        return None
    if not _called(played):
        return (
            "of the tools that it offered the policy knows none as a shell, and called none: one that takes a "
            "`command` and is named `bash`, `shell`, `sh` or the like, or whose description speaks of a shell"
        )
    return "the policy called one, and no result came back to the model"


def _last_result(played: PlayedEpisode) -> str | None:
    results = list(played.tool_results.values())
    if not results:
        return None
    text = " ".join(results[-1].split())
    return f"the last tool result was {text[:RESULT_CHARS]!r}{' …' if len(text) > RESULT_CHARS else ''}"


def _read_only(spec: AgentSpec) -> str | None:
    if spec.user == "agent" or spec.launches is not None:
        return None
    return "its spec has `user: harness`, so only the MCP endpoint's tools can write the work folder"


def _cut(played: PlayedEpisode) -> str | None:
    """Reason why replies were cut, if any were. Scripted replies are short, so the agent asked for fewer tokens or
    its prompt left no room."""
    cut = [turn.sampling.max_new_tokens for turn in played.turns if turn.finish_reason == "length"]
    if not cut:
        return None
    return (
        f"{len(cut)} of {len(played.turns)} replies were cut at their length, at {min(cut)} tokens the shortest: "
        "the max_tokens that the agent asks for, or the end of the context"
    )


def _finding(name: str, passed: bool | None, text: str) -> Finding:
    return Finding(name=name, passed=passed, text=text)


def _joined(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part is not None)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "none"


def _names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _reasons(untrained: dict[str, int]) -> str:
    return f" ({_counts(untrained)})" if untrained else ""


def _memory(played: PlayedEpisode) -> str:
    return "" if played.peak_bytes is None else f", {played.peak_bytes / (1 << 20):.0f} MB at most"
