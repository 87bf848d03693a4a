"""The wire format between server and helper, and that the helper's source is what old Pythons can read."""

from __future__ import annotations

import ast
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile_server.sandboxes.helper import HELPER_FOLDER
from turnstile_server.sandboxes.helper.turnstile_helper import frames

HEADERS = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=20) | st.none(), max_size=4)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=300)), max_size=6), st.integers(1, 50))
def test_frames_come_out_as_they_went_in_however_they_are_cut(sent: list[frames.Frame], size: int) -> None:
    stream = b"".join(frames.encode(header, payload) for header, payload in sent)
    decoder = frames.Decoder()
    received = [
        frame for start in range(0, len(stream), size) for frame in decoder.feed(stream[start : start + size])
    ]
    assert received == sent


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("!II", frames.MAX_HEADER + 1, 0),
        struct.pack("!II", 2, frames.MAX_PAYLOAD + 1),
        struct.pack("!II", 3, 0) + b"[1]",
        struct.pack("!II", 3, 0) + b"\xff{}",
        struct.pack("!II", 0, 0),
        struct.pack("!II", 200_000, 0) + b"[" * 200_000,
    ],
    ids=["long header", "long payload", "no object", "no text", "empty", "deep"],
)
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(frames.FrameError):
        list(frames.Decoder().feed(stream))


def test_a_frame_that_would_be_refused_is_not_made() -> None:
    with pytest.raises(frames.FrameError):
        frames.encode({"a": "x" * frames.MAX_HEADER})
    with pytest.raises(frames.FrameError):
        frames.encode({}, bytes(frames.MAX_PAYLOAD + 1))


def test_the_helper_is_written_in_python_3_8() -> None:
    sources = sorted(HELPER_FOLDER.rglob("*.py"))
    assert len(sources) > 8
    for source in sources:
        ast.parse(source.read_text(), filename=str(source), feature_version=(3, 8))
