"""Plays one row of the matrix: one agent, one fault, one episode."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from agents_matrix.faults import ENOUGH_TOKENS, MAX_COMPLETION_TOKENS, TASK
from agents_matrix.recording import Call, Header, RecordedEpisode, Threads, redact
from agents_matrix.server import MatrixServer
from agents_matrix.traffic import EpisodeTraffic, TracedRequest
from turnstile.models import EpisodeStatus

MAX_TURNS = 40
WALL_S = 420.0
POLL_S = 20
README = "A folder with nothing in it yet.\n"


class Row(BaseModel):
    """What happened in one episode of ``agent`` with ``fault``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str
    version: str
    fault: str
    fired: bool
    """Whether the fault happened; an agent without sub-agents, for example, cannot have that fault."""
    finished: bool
    """Whether the agent came to the end of the task."""
    status: str
    exit_code: int | None
    error: str | None
    output: str
    """The end of what the agent wrote."""
    calls: int
    refused: dict[str, int]
    """Calls that were answered with an error, by status."""
    kinds: dict[str, int]
    """Samples by kind."""
    stats: dict[str, Any]
    wall_s: float
    memory_mb: int | None
    recorded: str


async def play(server: MatrixServer, agent: str, fault: str) -> tuple[Row, RecordedEpisode]:
    """Plays the row. Raises httpx.HTTPStatusError when the episode cannot be made."""
    episode_id = f"{agent}-{fault}-{uuid.uuid4().hex[:8]}"
    progress = server.policy.assign(episode_id, fault)
    traffic = server.traffic.record(episode_id)
    episode = await _episode(server, agent, fault, episode_id)
    samples = await _get(server, f"/episodes/{episode_id}/samples")
    turns = (await _get(server, f"/episodes/{episode_id}/turns"))["turns"]
    spec = server.agents.get(agent)
    timings = episode["timings"]
    peak = server.recording.peak_bytes.get(episode_id)
    today = datetime.now(UTC).date().isoformat()
    row = Row(
        agent=agent,
        version=spec.version,
        fault=fault,
        fired=_happened(fault, progress.fired, progress.calls),
        finished=progress.finished,
        status=episode["status"],
        exit_code=episode["agent_exit_code"],
        error=None if episode["error"] is None else episode["error"]["type"],
        output=(episode["agent_output"] or "")[-2000:],
        calls=len(traffic.calls),
        refused=dict(Counter(str(heard.status) for heard in traffic.calls if heard.status >= 400)),
        kinds=dict(Counter(sample["kind"] for sample in samples["samples"])),
        stats=samples["stats"],
        wall_s=timings["ended_s"] - (timings["running_s"] or timings["preparing_s"] or 0.0),
        memory_mb=None if peak is None else peak >> 20,
        recorded=today,
    )
    header = Header(
        agent=agent,
        version=spec.version,
        fault=fault,
        recorded=today,
        threads=Threads(name=spec.threads.name, parent=spec.threads.parent),
        max_turns=MAX_TURNS,
        ended=f"{row.status}, exit code {row.exit_code}",
        events=tuple(traffic.events),
    )
    return row, RecordedEpisode(header=header, calls=_calls(traffic, turns, _names(episode_id, traffic)))


async def _episode(server: MatrixServer, agent: str, fault: str, episode_id: str) -> dict[str, Any]:
    """Plays the episode to its end."""
    limits = {
        "max_turns": MAX_TURNS,
        "max_completion_tokens": MAX_COMPLETION_TOKENS.get(fault, ENOUGH_TOKENS),
        "wall_s": WALL_S,
    }
    task = {"instruction": TASK, "base": {"inline": {"README.md": README}}}
    request = {"task": task, "agent": agent, "episode_id": episode_id, "limits": limits}
    response = await server.control.post("/episodes", json=request)
    response.raise_for_status()
    try:
        while True:
            episode = await _get(server, f"/episodes/{episode_id}?wait={POLL_S}")
            if EpisodeStatus(episode["status"]).ended:
                return episode
    except BaseException:
        await server.control.post(f"/episodes/{episode_id}/cancel")
        raise


async def _get(server: MatrixServer, path: str) -> dict[str, Any]:
    response = await server.control.get(path, headers={"accept": "application/json"})
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


def _happened(fault: str, fired: int, calls: int) -> bool:
    if fault in ("ok", "rate_limit", "server_error", "internal_error"):
        return calls > 0
    return fired > 0


def _names(episode_id: str, traffic: EpisodeTraffic) -> dict[str, str]:
    """What names this run or this machine, and what a recording says instead."""
    kernel = os.uname()
    names = {episode_id: "ep_recorded", kernel.release: "6.1.0", kernel.nodename: "sandbox"}
    return names | dict.fromkeys(traffic.keys, "the-key")


def _calls(traffic: EpisodeTraffic, turns: list[dict[str, Any]], names: dict[str, str]) -> tuple[Call, ...]:
    """Every turn's id stands in the answer that it was."""
    marks = {turn["turn_id"].removeprefix("turn_"): turn for turn in turns}

    def call(heard: TracedRequest) -> Call:
        answer = heard.answer.decode("utf-8", "replace")
        mark = next((mark for mark in marks if mark in answer), None)
        made = marks[mark]["reply"]["tool_calls"] if mark is not None else ()
        return Call(
            method=heard.method,
            path=heard.path,
            query=heard.query,
            headers=tuple((name, redact(value, names)) for name, value in heard.headers),
            body=redact(heard.body.decode(), names),
            said=heard.said,
            status=heard.status,
            turn=mark,
            call_ids=tuple(one["id"] for one in made),
        )

    return tuple(call(heard) for heard in traffic.calls)
