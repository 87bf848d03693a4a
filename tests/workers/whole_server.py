"""``turnstile serve --workers N`` as a child process, and the part that agents and trainers play with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

KEY = "control-key-of-the-workers"
START_S = 200


@dataclass(frozen=True)
class Played:
    """An episode of an external agent, which goes on with one conversation. ``acknowledged``: ids of the turns
    whose reply the agent got."""

    episode_id: str
    model_url: str
    key: str
    acknowledged: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    def call(self, text: str) -> str:
        """One model call; returns its turn. Raises httpx.HTTPError where it was not answered with 200."""
        answer = httpx.post(
            f"{self.model_url}/v1/chat/completions",
            headers={"authorization": f"Bearer {self.key}"},
            json={"model": "m", "max_tokens": 4, "messages": [*self.history, {"role": "user", "content": text}]},
            timeout=100,
        )
        answer.raise_for_status()
        self.history.append({"role": "user", "content": text})
        self.history.append(answer.json()["choices"][0]["message"])
        turn_id = str(answer.json()["id"]).replace("chatcmpl-", "turn_")
        self.acknowledged.append(turn_id)
        return turn_id


class WholeServer:
    """``http`` has the key."""

    def __init__(self, process: subprocess.Popen[bytes], ready: dict[str, Any]) -> None:
        self.process = process
        self.ready = ready
        self.url: str = ready["control_url"]
        self.http = httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=100)

    def worker_pid(self, number: int) -> int:
        return int(self.ready["workers"][number]["pid"])

    def owner(self, episode: Played) -> int:
        """The number of the worker whose own address the agent was given."""
        urls = [worker["agent_url"] for worker in self.ready["workers"]]
        return urls.index(episode.model_url.partition("/e/")[0])

    def create(self, **fields: Any) -> Played:
        body = {"task": {"instruction": "Talk."}, "agent": "external", **fields}
        answer = self.http.post("/episodes", json=body)
        assert answer.status_code in (200, 201), answer.text
        made = answer.json()
        return Played(made["episode_id"], made["model_url"], made["episode_key"])

    def get(self, target: str, **query: Any) -> Any:
        answer = self.http.get(target, params=query)
        assert answer.status_code == 200, f"{target}: {answer.status_code} {answer.text[:500]}"
        return answer.json()

    def listed(self, limit: int = 3, **query: Any) -> list[str]:
        """The ids of all episodes, page by page."""
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = self.get("/episodes", limit=limit, **({"cursor": cursor} if cursor else {}), **query)
            found += [episode["episode_id"] for episode in page["episodes"]]
            cursor = page["cursor"]
            if cursor is None:
                return found

    def turns(self, episode: Played) -> list[str]:
        return [turn["turn_id"] for turn in self.get(f"/episodes/{episode.episode_id}/turns")["turns"]]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def whole_server(model: Path, data_dir: Path, *arguments: str, **variables: str) -> Iterator[WholeServer]:
    """The server for the length of the block; what is left of it then is killed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNSTILE_")}
    command = [sys.executable, "-m", "turnstile", "serve", "--model", str(model), "--data-dir", str(data_dir)]
    command += ["--control-port", "0", "--agent-port", "0", "--sandbox", "none", *arguments]
    with (data_dir.parent / "server.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**inherited, "TURNSTILE_SHUTDOWN_GRACE_S": "1", **variables, "TURNSTILE_CONTROL_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (data_dir.parent / "server.log").read_text()[-4000:]
        server = WholeServer(process, json.loads(line))
        with server.http:
            yield server
    finally:
        process.kill()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
