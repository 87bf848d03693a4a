"""The parts of the gate's benchmark: what is sent, what is read, and what is made of the numbers."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gate_parts.aims import OPEN_EPISODES, OPEN_TOKENS, TRACE_TOKENS, aims
from gate_parts.conversation import CHAIN, NONCE_CHARS, REPLY_TOKENS, Conversation
from gate_parts.counted import CallCounter, read_counts, window
from gate_parts.engine import MockEngine
from gate_parts.measure import check_tokenized, first_text_delays
from gate_parts.memory import MemoryCost, slope
from gate_parts.process import cpu_s, descendants, private_bytes
from gate_parts.row import Row, Slice
from gate_parts.server import parse_metrics
from gate_parts.tables import aims_table, ratios
from gate_parts.wire import Connection, Inbox, Paced
from waiting import wait_until_sync

SMAPS = """\
55d0c0a00000-7ffd0f5f2000 ---p 00000000 00:00 0    [rollup]
Rss:              160000 kB
Pss:              150000 kB
Pss_Anon:         140000 kB
Shared_Clean:      10000 kB
Private_Clean:      1000 kB
Private_Dirty:    140000 kB
Anonymous:        140000 kB
Swap:                 24 kB
SwapPss:              24 kB
"""


@pytest.fixture(scope="module")
def conversation(tiny_model: Path) -> Conversation:
    return Conversation(tiny_model)


def messages_of(body: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(body)["messages"]
    return found


def test_a_chain_branches_once_and_then_continues_as_an_agent_does(conversation: Conversation) -> None:
    bodies = conversation.chain(3, stream=False)
    assert len(bodies) == CHAIN
    sent = [b"".join(body.parts(30)) for body in bodies]
    assert [len(each) for each in sent] == [body.size for body in bodies]
    history = messages_of(conversation.step(3))
    first = messages_of(sent[0])
    assert first[:-1] == history[:-1], "the first one has the history, with a last tool result of its own"
    for before, after in itertools.pairwise(sent):
        assert messages_of(after)[: len(messages_of(before))] == messages_of(before)
        echo, result = messages_of(after)[len(messages_of(before)) :]
        assert (echo["content"], result["role"]) == (conversation.reply.content, "tool")


def test_no_two_tool_results_of_measured_calls_are_equal_and_all_are_as_long(conversation: Conversation) -> None:
    texts: list[str] = []
    for number in (0, CHAIN):
        whole = b"".join(conversation.chain(2, stream=True)[-1].parts(number))
        texts += [message["content"] for message in messages_of(whole)[-2 * CHAIN + 1 :: 2]]
    assert len(set(texts)) == 2 * CHAIN
    assert {len(text) for text in texts} == {len(texts[0])}
    assert all(text.startswith("run " + "0" * (NONCE_CHARS - 1)) for text in texts)


def test_another_seed_gives_another_text(tiny_model: Path, conversation: Conversation) -> None:
    assert Conversation(tiny_model, seed=1).step(2) != conversation.step(2)
    assert Conversation(tiny_model).step(2) == conversation.step(2)


def test_a_paced_engine_says_when_it_wrote_its_first_token(tiny_model: Path) -> None:
    engine = MockEngine(tiny_model)
    request = b"POST /generate HTTP/1.1\r\n\r\n", b'{"stream":true}'
    at_once = engine.answer(*request)
    engine.answer(b"POST /bench/pace HTTP/1.1\r\n\r\n", b"true")
    first, second, *rest = engine.answer(*request)
    assert isinstance(first, Paced)
    assert isinstance(second, Paced)
    assert [first.data, second.data, *rest] == at_once
    assert first.written is not None
    first.written(12.5)
    asked = b"GET /bench/first-tokens HTTP/1.1\r\n\r\n", b""
    assert [b"".join(map(bytes, engine.answer(*asked)))[-6:] for _ in range(2)] == [b"[12.5]", b"\r\n\r\n[]"]
    assert not any(isinstance(piece, Paced) for piece in engine.answer(request[0], b"{}")), "only streams"


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_the_first_text_of_a_stream_is_found_wherever_reads_cut_it(size: int) -> None:
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    text = b'data: {"choices":[{"delta":{"content":"I"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

    class Watched(Connection):
        def text_seen(self) -> bool:
            return self._text_at > 0

    connection = Watched()
    for start in range(0, len(head + role), size):
        connection.data_received((head + role)[start : start + size])
    assert not connection.text_seen()
    for start in range(0, len(text), size):
        connection.data_received(text[start : start + size])
    assert connection.text_seen()


def test_an_inbox_takes_a_message_in_pieces() -> None:
    inbox = Inbox()
    assert inbox.feed(b"POST / HTTP/1.1\r\ncontent-le") is None
    assert inbox.feed(b"ngth: 3\r\n\r\nab") is None
    assert inbox.feed(b"c") == (b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n", b"abc")


def test_private_memory_is_what_is_private_or_swapped() -> None:
    assert private_bytes(SMAPS) == (1000 + 140000 + 24) * 1024


def test_the_clock_of_a_process_is_its_cpu_time() -> None:
    before, found, after = time.process_time(), cpu_s(os.getpid()), time.process_time()
    assert before <= found <= after
    assert os.getpid() in descendants(os.getppid())


def test_counters_are_summed_over_their_labels() -> None:
    text = '# HELP a words\na_total{x="1"} 2\na_total{x="2"} 3.5\nb 1e3\n'
    assert parse_metrics(text) == {"a_total": 5.5, "b": 1000.0}


def test_calls_are_counted_in_every_thread_and_told_over_a_socket(tmp_path: Path) -> None:
    counter = CallCounter()
    path = tmp_path / "s"
    threading.Thread(target=window, args=(str(path), counter), daemon=True).start()
    wait_until_sync(path.exists)

    def call_once() -> int:
        return len("")

    def call_often() -> None:
        for _ in range(1_000):
            call_once()

    counter.start()
    try:
        call_often()
        other = threading.Thread(target=call_often)
        other.start()
        other.join()
    finally:
        counter.stop()
    counts = read_counts(path)
    assert 2_000 <= counts["python"] < 2_200
    assert 2_000 <= counts["c"] < 2_200


def row(
    server: str, tokens: int, stream: bool, cpu_ms: float, per_cpu_s: float = 100.0, **more: float
) -> dict[str, Any]:
    figures = {"p50_ms": cpu_ms, "cpu_ms": cpu_ms, "turns_per_s": per_cpu_s, "turns_per_cpu_s": per_cpu_s}
    return {"server": server, "tokens": tokens, "stream": stream, **figures, **more}


ROWS = [
    row("direct", 8_000, False, 0.1),
    row("relay", 8_000, False, 0.5),
    row("turnstile-process", 8_000, False, 2.0, 600.0),
    row("rllm-memory", 8_000, False, 9.0, 100.0),
    row("turnstile-process", 8_000, True, 3.1, first_text_p50_ms=0.9, first_text_p99_ms=4.0),
    row("turnstile-process", 128_000, False, 2.5, 290.0),
    row("rllm-memory", 128_000, False, 70.0, 10.0),
]
COST = MemoryCost(TRACE_TOKENS, 5, 0.7, 0.79, OPEN_TOKENS, OPEN_EPISODES, 90.0, 599.0, 601.0, 30.0)


def test_each_aim_is_held_against_its_own_figures() -> None:
    found = aims(ROWS, COST)
    assert [(aim.measured, aim.reached) for aim in found] == [
        ("4.00 times (2.00 and 0.50 ms)", True),
        ("6.0 times (600 and 100)", True),
        ("29.0 times (290 and 10)", False),
        ("1.25 times (2.50 and 2.00 ms)", True),
        ("1.55 times (3.10 and 2.00 ms)", False),
        ("0.90 ms (p99 4.00)", True),
        ("0.70 MB hot, 0.79 MB at rest", True),
        ("599 MB hot, 601 MB at rest (90 MB empty)", False),
    ]
    table = aims_table(found)
    assert table.count("| reached |") == 5
    assert table.count("| not reached |") == 3


def test_an_aim_that_a_run_did_not_measure_is_neither_reached_nor_missed() -> None:
    shorter = MemoryCost(4_000, 2, 0.1, 0.1, 2_000, 8, 90.0, 99.0, 99.0, 0.5)
    for cost in (None, shorter):
        assert {aim.reached for aim in aims([row("direct", 1_000, False, 0.1)], cost)} == {None}


def test_ratios_are_of_one_length_and_mode() -> None:
    head, _, line = ratios(ROWS[:4]).splitlines()
    assert "turns per CPU s, times rllm-memory" in head
    assert line == "| 8,000 | unstreamed | 1.90 | 1.50 | 4.0 | 6.0 |"


def test_the_cpu_of_a_call_is_that_of_the_quiet_quarter_and_the_mean_is_beside_it() -> None:
    measured = Row("x", 1_000, False, latencies=[0.001] * 10)
    measured.single = [Slice(2, cpu_s, 1.0) for cpu_s in (0.002, 0.004, 0.006, 0.008, 0.1)]
    measured.several = [Slice(10, cpu_s, 0.5) for cpu_s in (0.01, 0.02, 0.03, 0.04, 0.05)]
    figures = measured.figures()
    assert figures["cpu_ms"] == pytest.approx(2.0)
    assert figures["cpu_mean_ms"] == pytest.approx(12.0)
    assert figures["turns_per_cpu_s"] == pytest.approx(500.0)
    assert figures["turns_per_s"] == pytest.approx(20.0)
    assert "first_text_p50_ms" not in figures


def test_a_run_fails_where_a_turn_tokenizes_other_bytes_at_one_length_than_at_another() -> None:
    def at(length: int, tokenized: float) -> Row:
        counters = {"turnstile_tokenized_bytes": 10 * tokenized}
        return Row("turnstile", length, False, result_bytes=600, counted=10, counters=counters)

    check_tokenized([at(1_000, 650), at(8_000, 650), Row("relay", 1_000, False)])
    for wrong in ([at(1_000, 650), at(8_000, 651)], [at(1_000, 599)], [at(1_000, 900)]):
        with pytest.raises(SystemExit):
            check_tokenized(wrong)


def test_first_texts_belong_to_the_streams_of_the_engine_one_by_one() -> None:
    assert first_text_delays("x", [1.0, 2.0], [1.5, 2.25]) == [0.5, 0.25]
    assert first_text_delays("x", [], [1.5, 2.5]) == [], "no stream was asked of the engine"
    for written, seen in (([1.0], [1.5, 2.5]), ([1.0, 2.0], [1.5, 0.0]), ([1.0, 2.0], [1.5, 1.9])):
        with pytest.raises(SystemExit):
            first_text_delays("x", written, seen)


def test_the_cost_of_a_trace_is_the_slope_over_their_number() -> None:
    assert slope([100.0, 101.0, 102.0, 103.0]) == pytest.approx(1.0)
    assert slope([100.0, 100.0]) == pytest.approx(0.0)


def test_the_reply_has_the_tokens_that_it_says(conversation: Conversation) -> None:
    assert len(conversation.reply.ids) == len(conversation.reply.pieces) == REPLY_TOKENS
