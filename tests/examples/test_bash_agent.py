"""The example agent against a scripted chat server: its loop, its tool, its endings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, Fail, Say

from bash_agent import Ending, run_bash
from waiting import wait_until_sync

AGENT = Path(__file__).resolve().parents[2] / "examples" / "bash_agent.py"


def run_agent(server: ChatServer, repo: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, AGENT, "the task", "--repo", repo, *options],
        env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_command_of_the_model_runs_in_the_repository_and_its_output_goes_back(
    tmp_path: Path, stream: tuple[str, ...]
) -> None:
    (tmp_path / "seen.txt").write_text("content of the file")
    with ChatServer([Say("Let me look.", command="cat seen.txt"), Say("Done.")]) as server:
        code, turns = run_agent(server, tmp_path, *stream)
    assert code == Ending.FINISHED
    assert [turn["calls"] for turn in turns] == [1, 0]
    first, second = server.calls
    assert second["messages"][: len(first["messages"])] == first["messages"]
    reply, result = second["messages"][len(first["messages"]) :]
    assert reply == Say("Let me look.", command="cat seen.txt").message
    assert result == {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": "content of the file\n[exit status 0]",
    }


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_model_that_never_calls_is_shown_real_output_until_min_turns(
    tmp_path: Path, stream: tuple[str, ...]
) -> None:
    (tmp_path / "README.md").write_text("read me")
    with ChatServer([Say("words")] * 4) as server:
        code, turns = run_agent(server, tmp_path, "--min-turns", "4", *stream)
    assert code == Ending.FINISHED
    assert len(turns) == 4
    last = server.calls[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user"] + ["assistant", "user"] * 3
    assert "I ran `cat README.md`:\nread me\n[exit status 0]" in last[-1]["content"]


@pytest.mark.thorough
@pytest.mark.slow
def test_it_stops_at_max_turns(tmp_path: Path) -> None:
    with ChatServer([Say(command="true")] * 2) as server:
        code, turns = run_agent(server, tmp_path, "--max-turns", "2")
    assert (code, len(turns)) == (Ending.MAX_TURNS, 2)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "failure", [Fail(400, "context_length_exceeded"), Fail(400, "budget_exhausted"), Fail(410)]
)
def test_a_refusal_ends_it_without_a_retry(tmp_path: Path, failure: Fail) -> None:
    with ChatServer([Say(command="true"), failure]) as server:
        code, lines = run_agent(server, tmp_path)
    assert code == Ending.REFUSED
    assert lines[-1]["ending"] == "refused"
    assert failure.type in lines[-1]["message"]
    assert len(server.calls) == 2


@pytest.mark.slow
def test_a_passing_failure_is_retried_and_a_lasting_one_ends_it(tmp_path: Path) -> None:
    with ChatServer([Fail(503), Say("Done.")]) as server:
        assert run_agent(server, tmp_path)[0] == Ending.FINISHED
    with ChatServer([Fail(503)] * 3) as server:
        assert run_agent(server, tmp_path)[0] == Ending.API_FAILED


@pytest.mark.thorough
@pytest.mark.slow
def test_a_cut_stream_is_asked_again_with_the_same_history(tmp_path: Path) -> None:
    with ChatServer([Say("half", cut=True), Say("Done.")]) as server:
        code, turns = run_agent(server, tmp_path, "--stream")
    assert (code, len(turns)) == (Ending.FINISHED, 1)
    assert server.calls[0] == server.calls[1]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_stream_that_is_cut_each_time_ends_it(tmp_path: Path) -> None:
    with ChatServer([Say("half", cut=True)] * 3) as server:
        assert run_agent(server, tmp_path, "--stream")[0] == Ending.API_FAILED


@pytest.mark.slow
def test_a_command_over_its_time_is_killed_with_its_children(tmp_path: Path) -> None:
    output = run_bash("sleep 1000 & echo $!; wait", tmp_path, timeout_s=0.5, max_chars=1000)
    child, status = output.split("\n")
    assert status == "[killed after 0.5 s]"
    wait_until_sync(lambda: not alive(int(child)))


@pytest.mark.slow
def test_a_background_process_neither_holds_the_agent_nor_outlives_the_command(tmp_path: Path) -> None:
    output = run_bash("sleep 1000 & echo $!", tmp_path, timeout_s=30, max_chars=1000)
    child, status = output.split("\n")
    assert status == "[exit status 0]"
    wait_until_sync(lambda: not alive(int(child)))


@pytest.mark.thorough
@pytest.mark.slow
def test_long_output_is_cut_in_the_middle(tmp_path: Path) -> None:
    output = run_bash("seq 1 10000", tmp_path, timeout_s=30, max_chars=100)
    assert output.startswith("1\n2\n")
    assert output.endswith("9999\n10000\n[exit status 0]")
    assert "characters left out" in output
    assert len(output) < 200


@pytest.mark.slow
def test_a_call_that_cannot_be_run_is_answered_with_what_is_wrong(tmp_path: Path) -> None:
    with ChatServer([BadCall(), Say("Done.")]) as server:
        assert run_agent(server, tmp_path)[0] == Ending.FINISHED
    assert server.calls[1]["messages"][-1]["content"].startswith("Error: the only tool is bash")


class BadCall(Say):
    @property
    def message(self) -> dict[str, Any]:
        function = {"name": "bash", "arguments": "not json"}
        call = {"id": "call_1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


def alive(pid: int) -> bool:
    """Whether ``pid`` still runs; a zombie does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
