"""Plays a run of real agents, which the viewer's tests and pictures show: ``make recorded-run``.

Nine agents play small tasks in groups, with a scripted model, in Docker: right works and wrong ones, faults,
sub-agents and compactions. Each episode is exported in its journal's own bytes, all into one archive
(tests/ui/recorded/README.md). What agents say of this machine's kernel is replaced before the server hears it, so
that the tokens say the same.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples")]

from agents_matrix.__main__ import agents_image  # noqa: E402
from agents_matrix.faults import ENOUGH_TOKENS, MAX_COMPLETION_TOKENS  # noqa: E402
from agents_matrix.run_jobs import job, tasks  # noqa: E402
from agents_matrix.server import MatrixServer, matrix_server  # noqa: E402
from agents_matrix.variants import VARIANTS, write_specs  # noqa: E402
from turnstile.models import EpisodeStatus  # noqa: E402
from turnstile_server.testing.server import TOKENIZER_FOLDER  # noqa: E402

OUT = ROOT / "tests" / "ui" / "recorded" / "agents-run.tar.xz"
RUN = "real-agents"
WALL_S, POLL_S = 420.0, 20
AT_ONCE = 2


@dataclass(frozen=True)
class Play:
    """One episode. ``fault``: of the matrix; ``wrong``: its work fails hidden tests."""

    agent: str
    task: str
    step: int
    fault: str = "ok"
    wrong: bool = False
    max_turns: int = 40

    @property
    def group(self) -> str:
        return f"{self.agent}-{self.step}"


def _group(agent: str, task: str, step: int, *others: dict[str, Any]) -> list[Play]:
    """A right rollout, a wrong one, and others."""
    plays = [Play(agent, task, step), Play(agent, task, step, wrong=True)]
    return [*plays, *(Play(agent, task, step, **other) for other in others)]


PLAYS: Sequence[Play] = [
    *_group("claude-code", "parcel-price", 0, {"fault": "cut"}, {"fault": "internal_error"}),
    *_group("codex", "parcel-price", 0, {"fault": "too_long"}, {"wrong": True, "fault": "bad_arguments"}),
    *_group("opencode", "log-errors", 1, {"fault": "malformed"}),
    *_group("pi", "parcel-price", 1, {"max_turns": 2}),
    *_group("qwen-code", "log-errors", 1),
    *_group("mini-swe-agent", "parcel-price", 1),
    Play("gemini-cli", "log-errors", 2),
    Play("gemini-cli", "log-errors", 2),
    *_group("goose", "parcel-price", 2, {"fault": "context_full"}, {"fault": "cut"}),
    *_group("plain-loop", "log-errors", 2, {"fault": "server_error"}),
    Play("claude-code", "parcel-price", 2, fault="subagent"),
    Play("claude-code", "parcel-price", 2, fault="subagent"),
    Play("claude-code", "parcel-price", 2, fault="compaction"),
    Play("codex", "parcel-price", 2, fault="subagent"),
    Play("codex", "parcel-price", 2, fault="compaction"),
]


async def record(image: str, out: Path) -> None:
    """Plays all, and writes the archive. Raises StartupError, httpx.HTTPStatusError."""
    files: dict[str, bytes] = {}
    by_specs: defaultdict[tuple[int, str], list[tuple[int, Play]]] = defaultdict(list)
    for number, play in enumerate(PLAYS):
        by_specs[play.step, play.fault if play.fault in VARIANTS else ""].append((number, play))
    with tempfile.TemporaryDirectory(prefix="recorded-run") as work:
        source = Path(work) / "tasks.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in tasks()), "utf-8")
        for at, ((step, fault), plays) in enumerate(sorted(by_specs.items())):
            specs = Path(work) / f"specs-{at}"
            write_specs(fault, specs)
            data = Path(work) / f"data-{at}"
            serving = matrix_server(TOKENIZER_FOLDER, data, specs, image, tasks=(source,), heard=Unnamed)
            async with serving as server:
                weights = {"path": str(TOKENIZER_FOLDER), "version": str(step)}
                (await server.control.post("/engine/weights", json=weights)).raise_for_status()
                slots = anyio.Semaphore(AT_ONCE)
                async with anyio.create_task_group() as playing:
                    for number, play in plays:
                        playing.start_soon(_played, server, play, f"{play.agent}-{number:02}", slots, files)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    print(f"{len(files)} episodes, {sum(map(len, files.values()))} bytes, in {out}")


async def _played(
    server: MatrixServer, play: Play, episode_id: str, slots: anyio.Semaphore, files: dict[str, bytes]
) -> None:
    server.policy.assign(episode_id, play.fault, job(play.task, wrong=play.wrong))
    request = {
        "task": {"id": play.task},
        "agent": play.agent,
        "episode_id": episode_id,
        "group_id": play.group,
        "run_id": RUN,
        "train_step": play.step,
        "limits": {
            "max_turns": play.max_turns,
            "max_completion_tokens": MAX_COMPLETION_TOKENS.get(play.fault, ENOUGH_TOKENS),
            "wall_s": WALL_S,
        },
    }
    async with slots:
        (await server.control.post("/episodes", json=request)).raise_for_status()
        while True:
            response = await server.control.get(f"/episodes/{episode_id}", params={"wait": POLL_S})
            response.raise_for_status()
            episode = response.json()
            if EpisodeStatus(episode["status"]).ended:
                break
    exported = await server.control.get(f"/episodes/{episode_id}/journal")
    exported.raise_for_status()
    files[f"{episode_id}.tsj"] = exported.content
    print(
        f"{episode_id:20} {play.fault:14} {episode['status']:10} {episode['reward']}  {episode['why']}", flush=True
    )


class Unnamed:
    """An application that hears of a kernel of no machine in place of this one's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        kernel = os.uname()
        self._names = ((kernel.release.encode(), b"6.1.0"), (kernel.version.encode(), b"#1 SMP"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the caller has left
            body += message.get("body", b"")
            more = message.get("more_body", False)
        said = bytes(body)
        for name, other in self._names:
            said = said.replace(name, other)
        whole: list[Message] = [{"type": "http.request", "body": said, "more_body": False}]
        length = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers = [*length, (b"content-length", str(len(said)).encode())] if body else scope["headers"]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self._app({**scope, "headers": headers}, again, send)


def main() -> None:
    parser = argparse.ArgumentParser(description="Records a run of real agents.")
    parser.add_argument("--image", help="Docker image; without it one is made with what the agents need")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    anyio.run(record, asked.image or agents_image(), asked.out)


if __name__ == "__main__":
    main()
