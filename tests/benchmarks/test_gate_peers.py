"""The peers of the gate's benchmark: how they are started and called, and what is read of what they recorded.

The stream was recorded of agentcore-rl-toolkit 0.2.0. Records have the fields that it and rllm-model-gateway 0.1.0
give, with fewer tokens."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from gate_parts.chat_reply import read_reply
from gate_parts.conversation import Reply
from gate_parts.peers import (
    AGENTCORE,
    LAUNCHER,
    REQUIREMENTS,
    RLLM,
    Agentcore,
    AgentcoreServer,
    Peer,
    Rllm,
    RllmServer,
    Site,
    continued,
    holds_reply,
    trains_reply,
)
from gate_parts.process import Process
from gate_parts.wire import FIRST_TEXT

REPLY = Reply("I will", "bash", '{"command": "ls"}', (41, 42, 43), ("I", " will", ""))
SITE = Site("http://127.0.0.1:9000", 9001, Path("/x"), Path("/models/tiny"), 2)
AGENTCORE_STREAM = Path(__file__).parent / "recorded" / "agentcore-0.2.0-stream.http"
"""The body of a streamed reply, in its HTTP chunks."""


def record(tail: list[int], mask: list[int], healed: int = 0) -> dict[str, Any]:
    """One of agentcore's, its prompt cut to three ids."""
    metadata = {"sid": "s0", "linear_healer": {"healed_turns": healed, "nonlinear": 0, "close_unresolved": 0}}
    return {"token_ids": [7, 8, 9, *tail], "loss_mask": mask, "logprobs": [0.0] * len(mask), "metadata": metadata}


def test_agentcores_stream_is_read_and_its_first_text_found() -> None:
    stream = AGENTCORE_STREAM.read_bytes()
    reply = read_reply(stream, stream=True)
    assert reply.tokens == 40
    assert reply.message["content"] == "I will read the next part of the module first and then run"
    assert reply.message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls"}'}
    found = FIRST_TEXT.search(stream)
    assert found is not None
    assert stream[found.start() :].startswith(b'"content": "I will')


def test_agentcores_records_must_train_whole_replies_and_nothing_else() -> None:
    once = record([41, 42, 43], [1, 1, 1])
    twice = record([41, 42, 43, 5, 6, 41, 42, 43], [1, 1, 1, 0, 0, 1, 1, 1])
    context = record([41, 42, 43, 5, 41, 42, 43], [0, 0, 0, 0, 1, 1, 1])
    assert trains_reply([once, twice, context], REPLY)
    wrong = [
        record([41, 42], [1, 1]),
        record([41, 42, 44], [1, 1, 1]),
        record([41, 42, 43, 5], [1, 1, 1, 1]),
        record([41, 42, 43], [0, 0, 0]),
    ]
    for each in wrong:
        assert not trains_reply([once, each], REPLY)
    assert not trains_reply([], REPLY)


def test_agentcores_linear_mode_must_have_gone_on_from_earlier_ids() -> None:
    once = record([41, 42, 43], [1, 1, 1])
    assert continued([once, record([41, 42, 43], [1, 1, 1], healed=2)])
    assert not continued([once])
    assert not continued([once | {"metadata": {"sid": "s0"}}])


def test_rllms_trace_must_have_the_ids_of_the_reply_and_a_prompt() -> None:
    trace = {
        "session_id": "s0",
        "model": "tiny",
        "prompt_token_ids": [7, 8, 9],
        "completion_token_ids": [41, 42, 43],
        "logprobs": [-0.5, -0.5, -0.5],
        "finish_reason": "tool_calls",
    }
    assert holds_reply([trace], REPLY)
    for wrong in ([], [trace | {"completion_token_ids": [41, 42]}], [trace | {"prompt_token_ids": []}]):
        assert not holds_reply(wrong, REPLY)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (Rllm("sqlite", Path("/venv")), ["--worker http://127.0.0.1:9000/v1", "--port 9001", "--store sqlite"]),
        (Agentcore("linear", Path("/venv")), [f"{LAUNCHER} http://127.0.0.1:9000 /models/tiny 9001 linear"]),
    ],
)
def test_a_peer_runs_in_its_own_python_on_the_engine(peer: Peer, words: list[str]) -> None:
    command = peer.command(SITE)
    assert command[0].startswith("/venv/bin/")
    for each in words:
        assert each in " ".join(command)


def test_the_version_of_the_second_peer_is_the_one_that_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
    assert REQUIREMENTS[AGENTCORE] == f"{AGENTCORE}[gateway]==0.2.0"
    assert f"`{AGENTCORE}` 0.2.0" in page
    assert RLLM in page


class Recorded(http.server.BaseHTTPRequestHandler):
    """Answers what was recorded, and notes what was asked."""

    asked: list[str]
    answers: dict[str, Any]

    def _answer(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        self.asked.append(f"{self.command} {self.path}")
        content = json.dumps(self.answers.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


@contextmanager
def recorded(answers: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """The port of a server with ``answers`` by path, and the requests that it got."""
    asked: list[str] = []
    handler = type("Handler", (Recorded,), {"asked": asked, "answers": answers})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()


def site(port: int) -> Site:
    return Site("http://127.0.0.1:9000", port, Path("/x"), Path("/models/tiny"), 2)


@pytest.mark.slow
def test_each_slice_of_agentcore_has_sessions_of_its_own_and_the_first_ones_are_checked(process: Process) -> None:
    records = [record([41, 42, 43], [1, 1, 1], healed=1)]
    with recorded({"/bench/sessions/s0-1": records}) as (port, asked):
        server = Agentcore("linear", Path("/venv")).server(site(port), process)
        assert isinstance(server, AgentcoreServer)
        heads = []
        for _ in range(3):
            anyio.run(server.begin_slice)
            heads.append(server.head(1, 500))
        anyio.run(server.check_captured, REPLY)
    assert [head.split(b"Bearer ")[1].split(b"\r\n")[0] for head in heads] == [b"s1-1", b"s1-2", b"s1-3"]
    assert asked == ["DELETE /bench/sessions/s0-2", "DELETE /bench/sessions/s1-2", "GET /bench/sessions/s0-1"]


@pytest.mark.slow
def test_a_run_fails_where_a_peer_did_not_record_its_calls(process: Process) -> None:
    trace = {"completion_token_ids": [41, 42], "prompt_token_ids": [7]}
    unhealed = [record([41, 42, 43], [1, 1, 1])]
    answers = {"/sessions/s0/traces?limit=1": [trace], "/bench/sessions/s0-1": unhealed}
    with recorded(answers) as (port, asked):
        rllm = Rllm("memory", Path("/venv")).server(site(port), process)
        assert isinstance(rllm, RllmServer)
        with pytest.raises(SystemExit, match="did not record"):
            anyio.run(rllm.check_captured, REPLY)
        assert asked[0] == "POST /admin/flush"
        linear = Agentcore("linear", Path("/venv")).server(site(port), process)
        anyio.run(linear.begin_slice)
        with pytest.raises(SystemExit, match="tokenized each prompt whole"):
            anyio.run(linear.check_captured, REPLY)
        tree = Agentcore("tree", Path("/venv")).server(site(port), process)
        anyio.run(tree.begin_slice)
        anyio.run(tree.check_captured, REPLY)


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """None that runs: these servers are asked nothing of their processes."""
    return Process("peer", None, tmp_path / "log")  # type: ignore[arg-type]
