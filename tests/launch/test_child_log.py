"""The log of a child: whole lines, bounded, and nothing in them that a terminal obeys."""

from __future__ import annotations

import logging
import os
import time

import pytest

from turnstile_server.engines.child_log import LINE_BYTES, ChildLog

pytestmark = pytest.mark.anyio


async def lines_of(*parts: bytes, kept: int = 10) -> list[str]:
    child_log = ChildLog("engine", kept)
    with child_log.writing() as descriptor:
        for part in parts:
            os.write(descriptor, part)
    assert await child_log.ended(10.0)
    return child_log.last_lines


async def test_lines_that_come_in_pieces_are_joined_and_the_last_needs_no_end() -> None:
    assert await lines_of(b"on", b"e\ntw", b"o\n\nthr", b"ee") == ["one", "two", "three"]


async def test_progress_bars_are_lines_of_their_own() -> None:
    assert await lines_of(b"10%\r20%\r\ndone") == ["10%", "20%", "done"]


async def test_colours_and_titles_are_removed_and_the_rest_is_shown_as_escapes() -> None:
    [line] = await lines_of(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07 \x1bc \xe2\x80\xae \xff\tx\n")
    assert line == "red  \\x1bc \\u202e \ufffd     x"


async def test_a_line_without_end_is_cut_and_cannot_fill_the_memory() -> None:
    lines = await lines_of(*[b"x" * 50_000] * 40, kept=5)
    assert [len(line) for line in lines[:4]] == [LINE_BYTES] * 4
    assert len(lines) == 5


async def test_the_last_lines_alone_are_kept_and_all_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert await lines_of(b"".join(b"%d\n" % number for number in range(100)), kept=2) == ["98", "99"]
    assert [record.getMessage() for record in caplog.records] == [f"engine: {number}" for number in range(100)]


@pytest.mark.slow
async def test_what_several_children_hold_open_is_waited_for_together() -> None:
    child_log = ChildLog("engine", 10)
    held = []
    for _ in range(4):
        with child_log.writing() as descriptor:
            held.append(os.dup(descriptor))
    began = time.monotonic()
    assert not await child_log.ended(0.5)
    assert time.monotonic() - began < 1.5
    for descriptor in held:
        os.close(descriptor)
    assert await child_log.ended(10.0)
