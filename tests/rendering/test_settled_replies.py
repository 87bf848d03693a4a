"""A held reply that is shown as far as nothing can change it: gpt-oss's channels, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_models import BASH

from products import examples
from turnstile.models import Message
from turnstile_server.rendering.call_formats.framed_messages import Harmony
from turnstile_server.rendering.call_formats.protocol import Called, Segment, SettlingFormat, Shown, Thought
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import Piece
from turnstile_server.rendering.protocol import CallDelta, Delta, ReasoningDelta, TextDelta
from turnstile_server.rendering.reply_parser import TagParser, merged
from turnstile_server.rendering.tags import Tags

OFFERED = ToolSchemas([BASH])
MARKS = Harmony.marks
THOUGHT = "<|channel|>analysis<|message|>Hm. Let me\nsee.<|end|>"
ASIDE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
CALL = "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"
CALL += '{"command": "ls"}<|call|>'
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 42."
PARTS = st.sampled_from(
    [
        *(THOUGHT, ASIDE, CALL, FINAL, "<|end|>", "<|channel|>analysis<|message|>", "<|message|>"),
        *("<|start|>assistant", "<|channel|>final", " to=functions.bash", '{"command": "<|end|>"}'),
        *('{"command": ', "}", "text", " ", "\n\n", "to=user", "<|call|>", "<|return|>", "<|", "end|>", "é🙂"),
    ]
)


def joined(segments: Iterable[Segment]) -> list[Segment]:
    """Neighbouring texts as one, empty ones left out."""
    found: list[Segment] = []
    for segment in segments:
        before = found[-1] if found else None
        if isinstance(segment, Shown | Thought):
            if not segment.text:
                continue
            if type(before) is type(segment):
                found[-1] = type(segment)(before.text + segment.text)  # type: ignore[union-attr]
                continue
        found.append(segment)
    return found


@settings(max_examples=examples(300), deadline=None)
@given(parts=st.lists(PARTS, max_size=8), ended=st.booleans(), data=st.data())
def test_what_is_settled_and_what_stays_held_are_the_whole(
    parts: list[str], ended: bool, data: st.DataObject
) -> None:
    text = "".join(parts)
    pieces = [piece.text for piece in pieces_of(text)]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=5)))
    taken: list[Segment] = []
    held = ""
    for start, end in zip([0, *cuts], [*cuts, len(pieces)], strict=True):
        segments, held = Harmony().settled(held + "".join(pieces[start:end]), OFFERED)
        taken += segments
    taken += Harmony().read(held, OFFERED, ended=ended)
    assert joined(taken) == joined(Harmony().read(text, OFFERED, ended=ended))


def pieces_of(text: str, *, spelled: bool = False) -> list[Piece]:
    """The text as tokens give it: a mark is one, all else comes by characters. ``spelled``: no mark is one."""
    found: list[Piece] = []
    while text:
        mark = None if spelled else next((mark for mark in MARKS if text.startswith(mark)), None)
        found.append(Piece(mark or text[0], control=None if mark is None else MARKS.index(mark)))
        text = text[len(mark or text[0]) :]
    return found


def parser() -> TagParser:
    tags = Tags(None, Harmony(), tuple(sorted(MARKS, key=len, reverse=True)))
    return TagParser(tags, OFFERED, special=frozenset(MARKS), thinking=False)


def shown(pieces: Sequence[Piece], *, ended: bool = True) -> tuple[list[list[Delta]], Message]:
    """What each piece brings, the end last, and the reply."""
    subject = parser()
    deltas = [subject.feed([piece]) for piece in pieces]
    deltas.append(subject.finish(ended=ended))
    return deltas, Message(
        role="assistant",
        content="".join(subject.text),
        reasoning="".join(subject.reasoning) or None,
        tool_calls=tuple(subject.calls),
    )


def test_harmony_settles() -> None:
    assert isinstance(Harmony(), SettlingFormat)


def test_each_channel_is_shown_as_it_comes() -> None:
    reply = THOUGHT + ASIDE + CALL
    deltas, message = shown(pieces_of(reply))
    assert (message.reasoning, message.content) == ("Hm. Let me\nsee.", "I look.")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("bash", '{"command": "ls"}')]
    assert merged([delta for each in deltas for delta in each]) == [
        ReasoningDelta("Hm. Let me\nsee."),
        TextDelta("I look."),
        CallDelta(0, message.tool_calls[0]),
    ]
    assert deltas[-1] == []  # nothing is left for the end
    letters = [delta for each in deltas for delta in each if isinstance(delta, ReasoningDelta)]
    assert len(letters) > 10  # not one lump
    first = next(number for number, each in enumerate(deltas) if each)
    assert first == len(pieces_of("<|channel|>analysis<|message|>H")) - 1


def test_a_call_that_cannot_be_read_is_told_at_the_end_and_no_text_is_lost() -> None:
    broken = CALL.replace('"ls"}', '"ls"')
    deltas, message = shown(pieces_of(THOUGHT + broken + FINAL))
    assert not message.tool_calls
    assert "It is 42." in message.content
    assert '"command": "ls"' in message.content
    assert not any(isinstance(delta, TextDelta) for each in deltas[:-1] for delta in each)


@settings(max_examples=examples(200), deadline=None)
@given(parts=st.lists(st.tuples(PARTS, st.booleans()), max_size=8), ended=st.booleans())
def test_pieces_and_the_whole_give_one_reply(parts: list[tuple[str, bool]], ended: bool) -> None:
    pieces = [piece for text, spelled in parts for piece in pieces_of(text, spelled=spelled)]
    deltas, message = shown(pieces, ended=ended)
    whole = parser()
    at_once = whole.feed(pieces) + whole.finish(ended=ended)
    assert merged([delta for each in deltas for delta in each]) == merged(at_once)
    assert message.content == "".join(whole.text)
    assert (message.reasoning or "") == "".join(whole.reasoning)
    assert list(message.tool_calls) == whole.calls


@pytest.mark.parametrize("text", ["<|end|>", "<|channel|>"])
def test_a_mark_that_is_spelled_is_text(text: str) -> None:
    pieces = [*pieces_of("<|channel|>final<|message|>a "), *pieces_of(text, spelled=True), *pieces_of(" b<|end|>")]
    assert shown(pieces)[1].content == f"a {text} b"


def test_calls_are_taken_when_they_end() -> None:
    deltas, _ = shown(pieces_of(CALL + FINAL))
    calls = [number for number, each in enumerate(deltas) if any(isinstance(delta, CallDelta) for delta in each)]
    assert calls == [len(pieces_of(CALL)) - 1]
    assert isinstance(Harmony().settled(CALL, OFFERED)[0][0], Called)


class Counted(Harmony):
    """``held``: the lengths of the texts that it was asked to settle."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def settled(self, text: str, offered: ToolSchemas) -> tuple[list[Segment], str]:
        self.held.append(len(text))
        return super().settled(text, offered)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        CALL.replace("ls", "ls " + 9000 * "x"),
        CALL.replace('"ls"}', '"ls"') + 3000 * "text ",
        3000 * "<|start|>" + FINAL,
        3000 * CALL.replace('"ls"}', "ls"),
        "final<|message|>" + 3000 * "text ",
    ],
    ids=["long call", "unreadable call", "marks", "unreadable calls", "text"],
)
def test_what_settles_nothing_is_not_read_again_at_every_token(text: str) -> None:
    counted = Counted()
    subject = TagParser(Tags(None, counted, MARKS), OFFERED, special=frozenset(MARKS), thinking=False)
    for piece in pieces_of("<|channel|>" + text):
        subject.feed([piece])
    assert sum(counted.held) < 30 * len(text)


def test_where_a_mark_is_no_token_the_reply_is_held() -> None:
    counted = Counted()
    subject = TagParser(Tags(None, counted, MARKS[:-1]), OFFERED, special=frozenset(MARKS), thinking=False)
    assert subject.feed(pieces_of(THOUGHT + FINAL)) == []
    subject.finish(ended=True)
    assert (counted.held, "".join(subject.text)) == ([], "It is 42.")
