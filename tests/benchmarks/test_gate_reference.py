"""The comparison with SGLang's own server: replies are read, processes told apart. No SGLang is started."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import uvloop

from gate_parts.chat_reply import dechunked, read_reply
from gate_parts.conversation import Conversation
from gate_parts.reference import (
    DETOKENIZER,
    DIRECT,
    HTTP,
    OTHER,
    SCHEDULER,
    THROUGH,
    ReferencePlan,
    engine_processes,
    played,
    reference_table,
    role_of,
)
from gate_parts.row import Figures
from gate_parts.servers import Servers

PLAIN = {
    "id": "20e309ef78464a78881001b6cf9b940c",
    "object": "chat.completion",
    "created": 1764190000,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "phabet tryMap",
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ],
    "usage": {"prompt_tokens": 812, "total_tokens": 820, "completion_tokens": 8, "prompt_tokens_details": None},
}
"""As SGLang 0.5 answers."""


def chunked(*events: object) -> bytes:
    framed = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [b"data: [DONE]\n\n"]
    return b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in framed) + b"0\r\n\r\n"


def delta(**fields: object) -> dict[str, object]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def test_a_whole_reply_becomes_the_message_that_an_agent_sends_back() -> None:
    reply = read_reply(json.dumps(PLAIN).encode(), stream=False)
    assert reply.message == {"role": "assistant", "content": "phabet tryMap"}
    assert reply.tokens == 8


def test_a_stream_becomes_the_same_message_as_the_whole_reply() -> None:
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"comm'}}
    rest = {"index": 0, "id": None, "function": {"name": None, "arguments": 'and": "ls"}'}}
    usage = {"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 8}}
    body = chunked(
        delta(role="assistant", content=""),
        delta(reasoning_content="so"),
        delta(content="phabet"),
        delta(content=" try\r\nMap", reasoning_content=None, tool_calls=None),
        delta(tool_calls=[call]),
        delta(tool_calls=[rest]),
        usage,
    )
    function = {"name": "bash", "arguments": '{"command": "ls"}'}
    assert read_reply(body, stream=True).message == {
        "role": "assistant",
        "content": "phabet try\r\nMap",
        "reasoning_content": "so",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    assert read_reply(body, stream=True).tokens == 8


def test_an_error_within_a_stream_and_a_stream_without_usage_are_no_replies() -> None:
    for body in (chunked(delta(content="a"), {"error": {"message": "no room"}}), chunked(delta(content="a"))):
        with pytest.raises(ValueError, match="stream has"):
            read_reply(body, stream=True)


def test_chunks_are_joined_whatever_is_in_them() -> None:
    assert dechunked(b"4\r\na\r\nb\r\n3;x=y\r\ncde\r\n0\r\n\r\n") == b"a\r\nbcde"


def test_the_processes_of_sglang_are_told_apart_by_their_titles() -> None:
    assert role_of(b"sglang::scheduler") == SCHEDULER
    assert role_of(b"sglang::scheduler_TP0\0\0\0") == SCHEDULER
    assert role_of(b"sglang::detokenizer\0") == DETOKENIZER
    assert role_of(b"/x/python\0-c\0from multiprocessing.resource_tracker import main\0") == OTHER
    assert engine_processes(os.getpid())[HTTP] == [os.getpid()]


def figures(through: str, p50: float, cpu: dict[str, float]) -> Figures:
    shared = {
        "first": 1_000,
        "stream": False,
        "calls": 6,
        "p99_ms": 1.0,
        "first_text_p50_ms": None,
        "sampled": 16.0,
    }
    return {"through": through, "p50_ms": p50, "cpu_ms": cpu, **shared}


def test_the_table_puts_the_cpu_of_each_process_beside_the_other_servers() -> None:
    rows = [
        figures(DIRECT, 40.0, {"http": 6.0, "scheduler": 30.0, "detokenizer": 0.5, "other": 0.0}),
        figures(
            THROUGH, 43.5, {"turnstile": 2.0, "http": 3.0, "scheduler": 31.0, "detokenizer": 0.25, "other": 0.0}
        ),
    ]
    _, _, direct, through = reference_table(rows).splitlines()
    assert direct == "| 1,000 | unstreamed | sglang | 40.0 | - | - | - | 6.00 | 30.00 | 0.50 | 6.50 | 16.0 |"
    assert (
        through == "| 1,000 | unstreamed | turnstile | 43.5 | 3.5 | - | 2.00 | 3.00 | 31.00 | 0.25 | 5.25 | 16.0 |"
    )


def test_conversations_differ_from_episode_to_episode_and_grow_with_their_first_message(tiny_model: Path) -> None:
    conversation = Conversation(tiny_model)
    one, other, longer = (conversation.opening(*of)[1]["content"] for of in ((1, 1_000), (2, 1_000), (1, 4_000)))
    assert one != other
    assert one.splitlines()[2] != other.splitlines()[2]
    tokens = [len(conversation.tokenizer.encode(text).ids) for text in (one, longer)]
    assert [round(count, -3) for count in tokens] == [1_000, 4_000]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_servers_are_played_through_with_the_same_calls(tiny_model: Path, tmp_path: Path) -> None:
    """With the mock engine in SGLang's place."""

    async def play() -> tuple[list[Figures], int]:
        cores = sorted(os.sched_getaffinity(0))
        async with Servers(tmp_path, tiny_model, (cores[0], cores[-1]), 0) as servers:
            plan = ReferencePlan(firsts=(500,), rounds=2, turns=3, sampled=40)
            engine = {HTTP: [servers.direct().process.popen.pid]}
            return await played(servers, tiny_model, engine, servers.engine_port, plan)

    rows, breaks = uvloop.run(play())
    assert breaks == 0
    assert [(row["through"], row["stream"]) for row in rows] == [
        (through, stream) for stream in (False, True) for through in (DIRECT, THROUGH)
    ]
    assert all(row["calls"] == 6 and row["sampled"] == 40 for row in rows)
    assert [sorted(row["cpu_ms"]) for row in rows] == [["http"], ["http", "turnstile"]] * 2
    assert len(re.findall(r"\| turnstile \|", reference_table(rows))) == 2
