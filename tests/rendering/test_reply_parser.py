"""The reply parser: streamed and unstreamed are the same, tags are tokens, calls are the model's own text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_models import BASH, USER, ids_of, parse

from products import examples
from turnstile.models import Message, ParseStatus, ToolCall
from turnstile_server.rendering.call_formats.json_formats import hermes
from turnstile_server.rendering.call_formats.protocol import Called, Shown, Unread
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.detokenizer import Detokenizer, Piece, StopFilter
from turnstile_server.rendering.protocol import CallDelta, Delta, ParsedReply, ReasoningDelta, TextDelta
from turnstile_server.rendering.reply_parser import TagParser
from turnstile_server.rendering.tags import Tags
from turnstile_server.rendering.template import TemplateRenderer

Make = Callable[..., TemplateRenderer]

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call>'
SNIPPETS = st.sampled_from(
    [
        CALL,
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<|im_start|>",
        "<|im_end|>",
        '{"name": "bash", "arguments": {}}',
        '{"name": "nobody", "arguments": {}}',
        "STOP",
        "ST",
        "\n\n",
        " ",
        "text",
        "é中🙂",
        "\u2028",
    ]
)


def assert_law(deltas: Sequence[Delta], reply: ParsedReply) -> None:
    message = reply.message
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == message.content
    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == (
        message.reasoning or ""
    )
    calls = [delta for delta in deltas if isinstance(delta, CallDelta)]
    assert [(delta.call.name, delta.call.arguments) for delta in calls] == [
        (c.name, c.arguments) for c in message.tool_calls
    ]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert sum(status is ParseStatus.OK for status in reply.parse_status) == len(calls)


@pytest.mark.parametrize("name", ["tiny", "llama"])
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_chunking_of_any_ids_gives_the_same_reply(renderer: Make, name: str, data: st.DataObject) -> None:
    subject = renderer(name)
    random_ids = st.lists(st.integers(0, subject.vocab_size + 3), max_size=30)
    spelled = st.lists(SNIPPETS, max_size=8).map(lambda parts: ids_of(subject, "".join(parts)).tolist())
    ids = [index for part in data.draw(st.lists(random_ids | spelled, max_size=3)) for index in part]
    tail = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]))
    options: dict[str, Any] = {
        "prompt_tail": ids_of(subject, tail),
        "stop": data.draw(st.lists(st.sampled_from(["STOP", "T", "<tool_call>", "\n\n", "l>\n"]), max_size=2)),
        "parse_calls": data.draw(st.booleans()),
    }
    deltas, whole = parse(subject, ids, **options)
    assert_law(deltas, whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    parser = subject.parser([BASH], **options)
    streamed: list[Delta] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        streamed += parser.feed(np.array(ids[start:end], dtype=np.int32))
    last, reply = parser.finish()
    assert reply == whole
    assert_law(streamed + last, reply)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_text_decodes_as_the_tokenizer_decodes_it(renderer: Make, data: st.DataObject) -> None:
    subject = renderer("tiny")
    ids = data.draw(st.lists(st.integers(0, subject.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(subject._table)
    cut = data.draw(st.integers(0, len(ids)))
    pieces = detokenizer.feed(ids[:cut]) + detokenizer.feed(ids[cut:]) + detokenizer.finish()
    assert "".join(piece.text for piece in pieces) == subject.decode(ids)


def test_a_character_split_over_tokens_is_held_until_it_is_whole(renderer: Make) -> None:
    subject = renderer("tiny")
    parser = subject.parser([], prompt_tail=np.array([], dtype=np.int32))
    ids = ids_of(subject, "🙂")
    assert len(ids) > 1
    seen = [parser.feed([index]) for index in ids]
    assert seen[:-1] == [[]] * (len(ids) - 1)
    assert seen[-1] == [TextDelta("🙂")]
    assert parse(subject, ids[:-1])[1].message.content == "\ufffd"


def test_thinking_text_and_calls_are_told_apart(renderer: Make) -> None:
    subject = renderer("tiny")
    deltas, reply = parse(subject, ids_of(subject, f"<think>\nHm.\n</think>\n\nLet me.\n{CALL}<|im_end|>"))
    assert deltas == [
        ReasoningDelta("Hm."),
        TextDelta("Let me."),
        CallDelta(0, ToolCall("bash", '{"command":  "ls"}')),
    ]
    assert reply.parse_status == (ParseStatus.OK,)


def test_the_prompt_may_open_thinking(renderer: Make) -> None:
    subject = renderer("opens_thinking")
    tail = subject.render([USER], []).ids
    _, reply = parse(subject, ids_of(subject, "Hm.\n</think>\n\nYes."), prompt_tail=tail)
    assert (reply.message.reasoning, reply.message.content) == ("Hm.", "Yes.")
    quoted = subject.render([Message("user", "<think>")], []).ids
    assert parse(renderer("tiny"), ids_of(subject, "Yes."), prompt_tail=quoted[:-4])[1].message.content == "Yes."


def test_a_tag_spelled_in_ordinary_tokens_is_text(renderer: Make) -> None:
    subject = renderer("tiny")
    spelled = [index for character in f"<think>a</think>{CALL}" for index in ids_of(subject, character)]
    _, reply = parse(subject, spelled)
    assert reply.message.content == f"<think>a</think>{CALL}"
    assert reply.message.reasoning is None
    assert reply.parse_status == ()


def test_a_second_thinking_tag_and_one_after_text_are_text(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, "<think>a</think>b<think>c</think>"))
    assert (reply.message.reasoning, reply.message.content) == ("a", "b<think>c</think>")
    assert parse(subject, ids_of(subject, "b<think>c"))[1].message.content == "b<think>c"


def test_a_call_inside_thinking_is_thinking(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, f"<think>{CALL}"))
    assert reply.message.reasoning == CALL
    assert reply.message.tool_calls == ()


def test_text_around_calls_is_kept_and_trimmed(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, f"\n\na \n{CALL}\n{CALL}\n b \n<|im_end|>"))
    assert reply.message.content == "a \n\n\n b"
    assert len(reply.message.tool_calls) == 2
    assert parse(subject, ids_of(subject, f"{CALL}\n"))[1].message.content == ""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{'name': 'bash'}", ParseStatus.INVALID_JSON),
        ('{"name": "bash", "arguments": {"a": NaN}}', ParseStatus.INVALID_JSON),
        ('{"name": "bash", "arguments": {}} x', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": {}}\n{"name": "bash", "arguments": {}}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": {},}', ParseStatus.INVALID_JSON),
        ('{"name": "bash" "arguments": {}}', ParseStatus.INVALID_JSON),
        ("[" * 100_000, ParseStatus.INVALID_JSON),
        ("1" * 5000, ParseStatus.INVALID_JSON),
        ("", ParseStatus.INVALID_JSON),
        ("[]", ParseStatus.MALFORMED),
        ("{}", ParseStatus.MALFORMED),
        ('{"arguments": {}}', ParseStatus.MALFORMED),
        ('{"name": "", "arguments": {}}', ParseStatus.MALFORMED),
        ('{"name": 1, "arguments": {}}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": [1]}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": "x"}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": {}, "parameters": {}}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": {}, "name": "bash"}', ParseStatus.MALFORMED),
    ],
)
def test_a_call_that_is_none_comes_back_as_its_text(renderer: Make, body: str, status: ParseStatus) -> None:
    whole = f"<tool_call>{body}</tool_call>"
    assert hermes().read(whole, ToolSchemas([BASH]), ended=True)[:2] == [Shown(""), Unread(whole, status)]
    if len(body) < 1000:
        subject = renderer("tiny")
        text = f"a <tool_call>{body}</tool_call> b"
        _, reply = parse(subject, ids_of(subject, text + "<|im_end|>"))
        assert reply.message.content == text
        assert reply.parse_status == (status,)
        assert reply.message.tool_calls == ()


def test_an_unclosed_call_is_text_and_does_not_hide_the_next(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, f'a<tool_call>{{"name": {CALL}'))
    assert reply.message.content == 'a<tool_call>{"name":'
    assert reply.parse_status == (ParseStatus.UNCLOSED, ParseStatus.OK)
    _, reply = parse(subject, ids_of(subject, "a<tool_call>\n{"))
    assert reply.message.content == "a<tool_call>\n{"


@settings(max_examples=examples(100))
@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.lists(st.none()), max_size=4))
def test_arguments_are_the_exact_text_that_the_model_wrote(arguments: dict[str, Any]) -> None:
    for written in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=3)):
        text = f'<tool_call> {{"x": [1], "arguments": {written} , "name" :"bash"}}\n</tool_call>'
        found = hermes().read(text, ToolSchemas([BASH]), ended=True)
        assert found == [Shown(""), Called(ToolCall("bash", written)), Shown("")]


def test_call_syntax_stays_text_where_calls_are_forbidden_or_no_tool_is_offered(renderer: Make) -> None:
    subject = renderer("tiny")
    ids = ids_of(subject, CALL)
    for options in ({"parse_calls": False}, {"tools": ()}):
        deltas, reply = parse(subject, ids, **options)
        assert reply.message.content == CALL
        assert reply.parse_status == ()
        assert all(isinstance(delta, TextDelta) for delta in deltas)


def test_a_stop_string_ends_the_view_but_not_the_ids(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, "one STOP two"), stop=["XX", "STOP"])
    assert (reply.message.content, reply.stop_string) == ("one", "STOP")
    _, reply = parse(subject, ids_of(subject, f"one {CALL}"), stop=["</tool_call>"])
    assert reply.message.content == 'one <tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}'
    assert reply.parse_status == (ParseStatus.UNCLOSED,)
    _, reply = parse(subject, ids_of(subject, "<think>one STOP</think>"), stop=["STOP"])
    assert (reply.message.reasoning, reply.message.content) == ("one", "")


def test_text_that_may_begin_a_stop_string_is_held(renderer: Make) -> None:
    subject = renderer("tiny")
    parser = subject.parser([], prompt_tail=np.array([], dtype=np.int32), stop=["STOP"])
    assert parser.feed(ids_of(subject, "a S")) == [TextDelta("a")]
    assert parser.feed(ids_of(subject, "T")) == []
    assert parser.feed(ids_of(subject, "x")) == [TextDelta(" STx")]
    assert parser.feed(ids_of(subject, "STO")) == []
    assert parser.finish()[0] == [TextDelta("STO")]


def test_the_stop_string_that_ends_first_counts() -> None:
    stop = StopFilter(["bcd", "c"])
    assert stop.feed([Piece("abcd")]) == [Piece("ab")]
    assert stop.matched == "c"


TEXT_TAGS = Tags(
    think=("<think>", "</think>"),
    call_format=hermes(),
)


@settings(max_examples=examples(150))
@given(st.lists(SNIPPETS | st.text("<>/think", max_size=6), max_size=8).map("".join), st.data())
def test_tags_that_are_no_tokens_count_as_text_however_they_are_cut(text: str, data: st.DataObject) -> None:
    def run(parts: list[str]) -> tuple[str, str, list[Any], list[ParseStatus]]:
        parser = TagParser(TEXT_TAGS, ToolSchemas([BASH]), special=(), thinking=False)
        for part in parts:
            parser.feed([Piece(part)])
        parser.finish(ended=False)
        return "".join(parser.text), "".join(parser.reasoning), parser.calls, parser.status

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run([text]) == run(parts) == run(list(text))


def test_textual_tags_are_acted_on() -> None:
    parser = TagParser(TEXT_TAGS, ToolSchemas([BASH]), special=(), thinking=False)
    parser.feed([Piece(f"\n<think>a</think>b{CALL}")])
    parser.finish(ended=True)
    assert ("".join(parser.reasoning), "".join(parser.text), len(parser.calls)) == ("a", "b", 1)


def test_special_tokens_are_not_shown(renderer: Make) -> None:
    subject = renderer("tiny")
    _, reply = parse(subject, ids_of(subject, "a<|im_start|>b<tool_response>c<|endoftext|>"))
    assert reply.message.content == "ab<tool_response>c"


def test_an_end_of_turn_alone_is_an_empty_reply(renderer: Make) -> None:
    subject = renderer("tiny")
    deltas, reply = parse(subject, ids_of(subject, "<|im_end|>"))
    assert deltas == []
    assert (reply.message.content, reply.message.reasoning, reply.message.tool_calls) == ("", None, ())
