"""`kill -9` of a server whose replies are on their way: what is trained then, held against the agents' own logs.

The agents are a process of their own; some calls are streamed, some replies are read byte by byte.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import environment, serve_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "k" * 24
AGENTS = 12
AT_WORK_S = 4.0
MOST_KILLS = 6

AGENTS_PROGRAM = r"""
import http.client, json, random, sys, threading, time
from urllib.parse import urlsplit

log = open(sys.argv[1], "a", buffering=1)  # one line per reply that came whole

def play(number, url, key):
    dice = random.Random(number)
    at, said = urlsplit(url), []
    while True:
        try:
            stream, pace = dice.random() < 0.5, dice.choice(["at once", "at once", "slowly"])
            asked = {"model": "m", "stream": stream, "max_completion_tokens": 6,
                     "messages": [{"role": "user", "content": f"go {number}"}, *said]}
            connection = http.client.HTTPConnection(at.hostname, at.port, timeout=60)
            connection.request("POST", at.path + "/v1/chat/completions", json.dumps(asked),
                               {"authorization": "Bearer " + key})
            reply = connection.getresponse()
            whole = b""
            while part := reply.read(65536 if pace == "at once" else 1):
                whole += part
                if pace == "slowly" and len(whole) % 100 == 0:
                    time.sleep(0.002)
            if reply.status != 200:
                time.sleep(0.2)
                continue
            if stream:
                assert b"data: [DONE]" in whole, whole[-100:]
                events = [json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")]
                name = events[0]["id"]
                text = "".join(each["delta"].get("content") or "" for one in events for each in one["choices"])
            else:
                answer = json.loads(whole)
                name, text = answer["id"], answer["choices"][0]["message"]["content"] or ""
            log.write(name.replace("chatcmpl-", "turn_") + "\n")
            said = [] if dice.random() < 0.3 else [*said[-6:], {"role": "assistant", "content": text},
                                                   {"role": "user", "content": "on"}]
        except (OSError, http.client.HTTPException, AssertionError):
            return

threads = [threading.Thread(target=play, args=(n, *agent)) for n, agent in enumerate(json.loads(sys.argv[2]))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def control(self, method: str, path: str, **arguments: Any) -> Any:
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as http:
            answer = http.request(method, path, **arguments)
        assert answer.status_code < 300, answer.text
        return answer.json()


@contextmanager
def serving(folder: Path, model: Path) -> Iterator[Server]:
    with (folder / "log").open("a") as log:
        process = subprocess.Popen(
            [*serve_command("--model", model, "--data-dir", folder / "data", "--engine", "embedded")],
            env=environment(
                TURNSTILE_CONTROL_KEY=KEY,
                TURNSTILE_SANDBOXES__KIND="none",
                TURNSTILE_CONTROL__PORT="0",
                TURNSTILE_GATE__PORT="0",
            ),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        yield Server(process, json.loads(line)["control_url"])
    finally:
        process.kill()
        process.wait()


@pytest.mark.thorough
def test_what_is_trained_after_a_kill_is_what_the_agents_got(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "got"
    program = tmp_path / "agents.py"
    program.write_text(AGENTS_PROGRAM)
    episodes: list[str] = []
    reasons: Counter[str] = Counter()
    for _ in range(MOST_KILLS):
        with serving(tmp_path, tiny_model) as server:
            made = [
                server.control("POST", "/episodes", json={"task": {"instruction": "t"}, "agent": "external"})
                for _ in range(AGENTS)
            ]
            episodes += [each["episode_id"] for each in made]
            agents = json.dumps([(each["model_url"], each["episode_key"]) for each in made])
            with subprocess.Popen([sys.executable, str(program), str(log), agents]) as playing:
                time.sleep(AT_WORK_S)
                server.process.kill()
                assert playing.wait(60) == 0
        got = set(log.read_text().split())
        assert len(got) > AGENTS
        with serving(tmp_path, tiny_model) as server:
            reasons, stored = checked(server, episodes, got)
        assert got <= stored, "an acknowledged turn was lost"
        if reasons["delivery_unknown"]:
            break
    assert reasons["delivery_unknown"], "no kill came while a reply was on its way"


def checked(server: Server, episodes: list[str], got: set[str]) -> tuple[Counter[str], set[str]]:
    """Why turns are untrained, and the turns that are stored. Ids without a token are listed by themselves, of
    trained turns too."""
    reasons: Counter[str] = Counter()
    stored: set[str] = set()
    for episode_id in episodes:
        assert server.control("GET", f"/episodes/{episode_id}")["error"]["type"] == "server_restarted"
        turns = {each["turn_id"] for each in server.control("GET", f"/episodes/{episode_id}/turns")["turns"]}
        with httpx.Client(timeout=60) as http:
            headers = {"authorization": f"Bearer {KEY}", "accept": "application/json"}
            path = f"{server.url}/episodes/{episode_id}/samples?include_untrained=true"
            found = http.get(path, headers=headers).json()
        trained = {span["turn_id"] for row in found["samples"] for span in row["turn_spans"] if span["trained"]}
        untrained = {
            row["turn_id"]: row["reason"] for row in found["untrained"] if row["reason"] != "id_without_token"
        }
        assert trained <= got, "a turn is trained whose reply no agent has got"
        assert trained | set(untrained) == turns
        assert not trained & set(untrained)
        reasons.update(untrained.values())
        stored |= turns
    return reasons, stored
