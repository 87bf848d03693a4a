"""The reference agent as it is shipped: installed from its spec, launched in a real sandbox, judged by tests.

Marked `agents` because its packages are installed from the registry (once: they stay in the user's cache).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import reply_ids
from gate_support import says, staged

from bounded import bounded_settings
from turnstile_server.backends import build_backends

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(400)]

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


def tool_call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_it_solves_a_task_in_a_sandbox_with_nothing_but_its_two_doors(
    tiny_model: Path, tmp_path: Path
) -> None:
    wanted: dict[str, Any] = {"sandboxes": {"kind": "local"}}
    work = build_backends(bounded_settings(**{"model": tiny_model, "data_dir": tmp_path, **wanted}))
    async with staged(tiny_model, tmp_path, work=work, **wanted) as stage:
        steps = [
            tool_call_text("read_file", path="answer.py"),
            tool_call_text("edit_file", path="answer.py", old="41", new="42"),
            tool_call_text("bash", command="python3 -c 'import answer; print(answer.ANSWER)'; env"),
            "Done.",
        ]
        stage.engine.answers = [says(reply_ids(stage, step)) for step in steps]
        created = await stage.episode(task=TASK, agent="tool-loop")
        with anyio.fail_after(300):
            shown = await stage.get(created, "?wait=5")
            while shown["timings"]["ended_s"] is None:
                shown = await stage.get(created, "?wait=5")
        turns = (await stage.get(created, "/turns"))["turns"]
    assert (shown["status"], shown["reward"]) == ("completed", 1.0), shown
    lines = [json.loads(line) for line in shown["agent_output"].splitlines()]
    assert [line.get("calls") for line in lines] == [["read_file"], ["edit_file"], ["bash"], [], None]
    assert lines[-1] == {"ending": "finished", "message": ""}
    assert (shown["stats"]["turns"], shown["stats"]["roots"], shown["stats"]["breaks"]) == (4, 1, {})
    results = [
        message["content"] for turn in turns for message in turn["new_messages"] if message["role"] == "tool"
    ]
    assert results[0] == "     1\tANSWER = 41"
    assert results[2].startswith("42\n")
    assert "OPENAI_API_KEY" not in results[2]
    assert "PYTHONPATH" not in results[2]
