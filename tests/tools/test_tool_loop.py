"""The agents that are loops over MCP tools, as processes, between a real MCP endpoint and a scripted model."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from subprocess import PIPE
from typing import Any

import anyio
import pytest
from chat_server import ChatServer, Fail, Raw, Say
from subprocess_sandbox import SubprocessSandbox
from tools_support import McpStage, PlayedEpisode

from turnstile_server.agents.registry import load_registry
from turnstile_server.agents.shipped import SPECS
from turnstile_server.agents.specs.loops.loop_parts import http_connection

pytestmark = pytest.mark.anyio

FINISHED, REFUSED, API_FAILED, LIMIT, TOOLS_FAILED = 0, 3, 4, 5, 6


@dataclass
class Played:
    code: int
    lines: list[dict[str, Any]]
    errors: str

    @property
    def ending(self) -> str:
        ending: str = self.lines[-1]["ending"]
        return ending


@dataclass(frozen=True)
class Agent:
    name: str
    options: str
    """Of its Python, as its spec gives them."""
    task_at: int
    """Index of the task among the messages: 1 where a system prompt stands before it."""

    @property
    def program(self) -> Path:
        return LOOPS / f"{self.name.replace('-', '_')}.py"


LOOPS = SPECS / "loops"
AGENTS = (Agent("tool-loop", "-IBS", 1), Agent("plain-loop", "-IBS", 0))


@pytest.fixture(params=AGENTS, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    chosen: Agent = request.param
    return chosen


@dataclass
class Player:
    agent: Agent
    stage: McpStage
    episode: PlayedEpisode
    folder: Path

    async def __call__(self, model: ChatServer, *options: str, tool_url: str | None = None) -> Played:
        instruction = self.folder / "instruction.md"
        instruction.write_text("Do it: é")
        env = {
            "PATH": os.environ["PATH"],
            "OPENAI_BASE_URL": model.url,
            "OPENAI_API_KEY": self.episode.key,
            "TOOL_URL": tool_url or self.stage.tool_url(self.episode),
        }
        command = [sys.executable, self.agent.options, str(self.agent.program), str(instruction), *options]
        result = await anyio.run_process(command, env=env, check=False, stdout=PIPE, stderr=PIPE)
        lines = [json.loads(line) for line in result.stdout.decode().splitlines()]
        return Played(result.returncode, lines, result.stderr.decode())


@pytest.fixture
def play(agent: Agent, stage: McpStage, sandbox: SubprocessSandbox, tmp_path: Path) -> Player:
    return Player(agent, stage, stage.episodes.begin("e1", sandbox), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "options"),
    [(AGENTS[0], ()), (AGENTS[0], ("--stream",)), (AGENTS[1], ())],
    indirect=["agent"],
    ids=["tool-loop", "tool-loop-streamed", "plain-loop"],
)
async def test_it_does_what_the_model_calls_until_it_answers_without_a_call(
    play: Player, options: tuple[str, ...]
) -> None:
    write = ("write_file", json.dumps({"path": "a", "content": "one\n"}))
    look = ("bash", json.dumps({"command": "cat a"}))
    with ChatServer([Say("First.", calls=(write, look)), Say("Done.")]) as model:
        played = await play(model, *options)
    assert played.code == FINISHED, played.errors
    assert played.lines == [
        {"turn": 1, "characters": 6, "calls": ["write_file", "bash"]},
        {"turn": 2, "characters": 5, "calls": []},
        {"ending": "finished", "message": ""},
    ]
    first, second = model.calls
    assert [tool["function"]["name"] for tool in first["tools"]] == [
        "bash",
        "read_file",
        "write_file",
        "edit_file",
        "submit",
    ]
    at = play.agent.task_at
    assert first["messages"][at:] == [{"role": "user", "content": "Do it: é"}]
    assert second["messages"][: at + 1] == first["messages"]
    assert second["messages"][at + 1] == Say("First.", calls=(write, look)).message
    assert second["messages"][at + 2 :] == [
        {"role": "tool", "tool_call_id": "call_1", "content": "Wrote 4 bytes to a."},
        {"role": "tool", "tool_call_id": "call_2", "content": "one\n[exit status 0]"},
    ]


@pytest.mark.slow
async def test_it_ends_when_the_model_hands_in_its_answer(play: Player) -> None:
    with ChatServer([Say(calls=(("submit", '{"answer": "42"}'),))]) as model:
        assert (await play(model)).code == FINISHED
    assert play.episode.answers == ["42"]


@pytest.mark.slow
async def test_it_goes_on_while_a_user_replies_to_what_is_submitted(play: Player) -> None:
    play.episode.user = iter(("Which one?",))
    submit = (("submit", '{"answer": "one"}'),)
    with ChatServer([Say(calls=submit), Say(calls=submit)]) as model:
        assert (await play(model)).code == FINISHED
    assert play.episode.answers == ["one", "one"]
    assert model.calls[1]["messages"][-1]["content"] == "The user replies: Which one?"


@pytest.mark.slow
async def test_an_answer_without_a_call_is_said_to_the_user_if_there_is_one(play: Player) -> None:
    play.episode.user = iter(("Hello. Do it.",))
    with ChatServer([Say("What shall I do?"), Say("It is done.")]) as model:
        assert (await play(model)).code == FINISHED
    assert play.episode.answers == ["What shall I do?", "It is done."]
    assert model.calls[1]["messages"][-1] == {"role": "user", "content": "Hello. Do it."}


@pytest.mark.slow
async def test_wrong_calls_are_told_to_the_model_and_end_nothing(play: Player) -> None:
    calls = (("bash", "{"), ("bash", "[]"), ("bash", "{}"), ("python", ""), ("submit", "{}"))
    with ChatServer([Say(calls=calls), Say("Sorry.")]) as model:
        played = await play(model)
    assert played.code == FINISHED
    contents = [message["content"] for message in model.calls[1]["messages"][play.agent.task_at + 2 :]]
    assert all(content.startswith("Error: ") for content in contents)
    assert "not JSON" in contents[0]
    assert "not a JSON object" in contents[1]
    assert "command: Field required" in contents[2]
    assert "no tool 'python'" in contents[3]
    assert "answer: Field required" in contents[4]


@pytest.mark.slow
async def test_it_stops_when_its_turns_are_used_up(play: Player) -> None:
    with ChatServer([Say(command="true")] * 2) as model:
        played = await play(model, "--max-turns", "2")
    assert (played.code, played.ending, len(model.calls)) == (LIMIT, "limit", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "code", "calls"),
    [
        (Fail(400, "context_length_exceeded"), LIMIT, 1),
        (Fail(410, "episode_ended"), REFUSED, 1),
        (Fail(503, "engine_unavailable"), API_FAILED, 2),
    ],
)
async def test_its_exit_code_says_how_the_model_api_failed(
    play: Player, failure: Fail, code: int, calls: int
) -> None:
    with ChatServer([failure] * 2) as model:
        played = await play(model, "--retries", "1")
    assert (played.code, len(model.calls)) == (code, calls)
    assert failure.type in played.lines[-1]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS[:1], indirect=True, ids=["tool-loop"])
async def test_a_stream_that_breaks_off_is_a_failure_of_the_api(play: Player) -> None:
    with ChatServer([Say("half", cut=True)]) as model:
        assert (await play(model, "--stream")).code == API_FAILED


@pytest.mark.slow
async def test_its_exit_code_says_when_the_tools_are_gone(play: Player) -> None:
    with ChatServer([]) as model:
        unknown = await play(model, tool_url=f"{play.stage.url}/e/e2/mcp")
        unserved = await play(model, tool_url="http://127.0.0.1:9/e/e1/mcp")
    assert [unknown.code, unserved.code] == [TOOLS_FAILED, TOOLS_FAILED]
    assert "no episode e2" in unknown.lines[-1]["message"]


@pytest.mark.slow
@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("answer", "code", "calls"),
    [
        (Raw(200, b'{"choices": []}'), API_FAILED, None),
        (Raw(502, b"<html>no upstream</html>", "text/html"), API_FAILED, 2),
        (Raw(403, b'{"error": "forbidden"}'), REFUSED, 1),
        (Raw(200, b"[]"), API_FAILED, None),
        (Raw(200, b'{"choices": [{"message": null}]}'), API_FAILED, None),
        (Raw(200, b'{"choices": [{"mess', promised=9), API_FAILED, 2),
        (Raw(404, b"<html>no such page</html>", "text/html"), REFUSED, 1),
    ],
)
async def test_an_answer_that_is_no_completion_is_no_crash(
    play: Player, answer: Raw, code: int, calls: int | None
) -> None:
    """``calls`` None: an SDK takes a status 200 for the end, plain-loop tries again."""
    calls = calls or (1 if play.agent.name == "tool-loop" else 2)
    with ChatServer([answer] * 2) as model:
        played = await play(model, "--retries", "1")
    assert (played.code, len(model.calls)) == (code, calls), played.errors


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "answer",
    [
        Raw(502, b"<html>"),
        Raw(200, b'data: {"jsonrpc": "2.0", "id": 1, "resu', "text/event-stream"),
        Raw(200, b"[]"),
        Raw(200, b'{"jsonrpc": "2.0", "id": 1, "error": "no"}'),
        Raw(200, b"data: [1]\n\n", "text/event-stream"),
        Raw(200, b'data: {"jsonrpc": "2.0", "id": 7, "result": {}}\n\n', "text/event-stream"),
    ],
)
async def test_an_answer_of_the_tools_that_is_none_is_their_failure(play: Player, answer: Raw) -> None:
    with ChatServer([answer]) as tools, ChatServer([]) as model:
        played = await play(model, tool_url=tools.url)
    assert (played.code, len(tools.calls)) == (TOOLS_FAILED, 1), played.errors


class _Silently(BaseHTTPRequestHandler):
    """Closes each connection after one answer without having announced it, as a server does with an idle one."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
        self.close_connection = True

    def log_message(self, format: str, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Silently)
        self.closed: Queue[None] = Queue()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.put(None)


@pytest.mark.slow
def test_a_connection_that_idled_too_long_for_the_server_is_opened_anew() -> None:
    """Between two tool calls the policy may sample for minutes; nothing may be sent twice, so nothing may fail."""
    with _Server() as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        connection = http_connection.Connection(f"http://127.0.0.1:{server.server_port}/mcp", "key", 30.0)
        try:
            for _ in range(3):
                assert connection.post({}, {}).read() == b"{}"
                server.closed.get(timeout=30)
        finally:
            connection.close()
            server.shutdown()
            serving.join()


def test_its_spec_runs_this_file_without_packages(agent: Agent) -> None:
    spec = load_registry().get(agent.name)
    assert spec.install.tree is not None
    assert Path(spec.install.tree) / agent.program.name == agent.program
    assert spec.command[:3] == ("{python}", agent.options, f"{{install}}/files/{agent.program.name}")
    assert spec.install.pip == ()
    assert spec.success == (FINISHED, LIMIT)
    parts = agent.program.parent / "loop_parts" / agent.program.name
    assert f'"version": "{spec.version}"' in parts.read_text()
