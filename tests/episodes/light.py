"""A real agent that costs little: a page of Python in a real sandbox, which calls the model API and edits files.

For many episodes at once, and for what no fake sandbox could prove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bounded import bounded_settings
from turnstile_server.agents.registry import AgentRegistry
from turnstile_server.agents.spec import AgentSpec
from turnstile_server.backends import Backends, build_backends

SCRIPT = """
import json, os, sys, time, urllib.request
def think(text):
    body = json.dumps({{"model": "m", "messages": [{{"role": "user", "content": text}}]}}).encode()
    headers = {{"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}}
    request = urllib.request.Request("{model_url}/v1/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=60))
turns = int(os.environ.get("TURNS", "2"))
reply = "nothing"
for turn in range(turns):
    reply = think("turn %d after %s" % (turn, reply))["id"]
if os.environ.get("WORK"):
    exec(os.environ["WORK"])
if os.environ.get("STAY"):
    time.sleep(float(os.environ["STAY"]))
print("thought", turns, "times")
"""

LIGHT = AgentSpec(
    name="light",
    version="1",
    summary="Thinks TURNS times, does WORK, stays STAY seconds.",
    user="agent",  # WORK edits the work folder
    command=("python3", "-I", "-S", "{home}/agent.py"),
    env={"KEY": "{episode_key}"},
    files={"{home}/agent.py": SCRIPT},
)

TEST = """
import unittest, answer
class T(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(answer.ANSWER, 42)
"""
TASK: dict[str, Any] = {
    "instruction": "Make ANSWER 42.",
    "base": {"inline": {"answer.py": "ANSWER = 41\n"}},
    "tests": {"files": {"inline": {"test_answer.py": TEST}}, "expected": ["test_answer.T.test_answer"]},
}
SOLVE = "open('answer.py', 'w').write('ANSWER = 42')"


def light_work(model: Path, data_dir: Path, folder: Path, **settings: Any) -> tuple[Backends, dict[str, Any]]:
    """Backends whose one agent is LIGHT, and the settings that they were built from."""
    wanted = {"sandboxes": {"kind": "local"}, "agents": {"install_dir": folder}, **settings}
    made = build_backends(bounded_settings(**{"model": model, "data_dir": data_dir, **wanted}))
    return replace(made, agents=AgentRegistry({LIGHT.name: LIGHT})), wanted
