"""The `renderers` backend: its limits are closed by our wrapper, its parse obeys the same laws."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_models import BASH, USER, ids_of, make_folder, parse
from test_render_hostile import HOSTILE, LITERALS, controls, everywhere
from test_reply_parser import CALL, SNIPPETS, assert_law

from products import examples
from turnstile.models import Message, ParseStatus, Tool, ToolCall
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.family import FamilyRenderer
from turnstile_server.rendering.protocol import (
    Bridge,
    CallDelta,
    CannotBridge,
    Delta,
    PathEnd,
    ReasoningDelta,
    TextDelta,
)
from turnstile_server.settings import RenderingSettings


@pytest.fixture(scope="module")
def subject(tiny_model: Path) -> FamilyRenderer:
    return make(tiny_model)


def make(folder: Path, family: str = "qwen3", **settings: Any) -> FamilyRenderer:
    built = create_renderer(folder, RenderingSettings(backend="renderers", family=family, **settings))
    assert isinstance(built, FamilyRenderer)
    return built


def end_of(renderer: FamilyRenderer, text: str, *, tools: Sequence[Tool] = (BASH,)) -> PathEnd:
    prompt = renderer.render([USER], tools).ids[-64:]
    ids = ids_of(renderer, text)
    return PathEnd(prompt, ids, parse(renderer, ids, tools, prompt_tail=prompt)[1].message, "stop")


@pytest.mark.parametrize("text", LITERALS)
def test_control_text_in_every_field_makes_no_control_token(subject: FamilyRenderer, text: str) -> None:
    rendered = subject.render(*everywhere(text)).ids
    assert controls(subject, rendered) == controls(subject, subject.render(*everywhere("x")).ids)
    for shown in (f"u{text}u", f"t{text}t", f"b{text}b", f"d{text}", f"s{text}s"):
        assert shown in subject.decode(rendered)
    end = end_of(subject, CALL + "<|im_end|>")
    bridges = [subject.bridge(end, [Message("tool", f"t{t}t"), Message("user", t)], [BASH]) for t in (text, "x")]
    assert isinstance(bridges[0], Bridge)
    assert isinstance(bridges[1], Bridge)
    assert controls(subject, bridges[0].context_ids) == controls(subject, bridges[1].context_ids)
    assert f"t{text}t" in subject.decode(bridges[0].context_ids)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_pieces_of_control_text_never_join_into_a_control_token(subject: FamilyRenderer, text: str) -> None:
    messages = [Message("user", text), Message("assistant", "a" + text), Message("user", text + "b")]
    clean = [Message("user", "x"), Message("assistant", "a"), Message("user", "b")]
    assert controls(subject, subject.render(messages, []).ids) == controls(subject, subject.render(clean, []).ids)


def test_a_developer_message_is_not_dropped(subject: FamilyRenderer) -> None:
    text = subject.decode(subject.render([Message("developer", "Be brief."), USER], []).ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_it_renders_as_the_stock_template_of_its_family(folders: dict[str, Path], subject: FamilyRenderer) -> None:
    """Our Qwen3-like template differs in the words around tools only."""
    template = create_renderer(folders["qwen3"], RenderingSettings())
    call = ToolCall("bash", '{"a":1}')
    conversation = [
        Message("system", "s"),
        USER,
        Message("assistant", "a", reasoning="r", tool_calls=(call,)),
        Message("tool", "out"),
        Message("assistant", "b", reasoning="r"),
    ]
    for count in range(1, len(conversation) + 1):
        expected = template.render(conversation[:count], []).ids.tolist()
        assert subject.render(conversation[:count], []).ids.tolist() == expected


def test_a_bridge_appends_and_thinking_is_kept(subject: FamilyRenderer) -> None:
    end = end_of(subject, "<think>\nHm.\n</think>\n\nYes.<|im_end|>")
    result = subject.bridge(end, [Message("user", "go")], [BASH])
    assert isinstance(result, Bridge)
    text = "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert subject.decode(result.context_ids) == text
    longer = np.concatenate([subject.render([Message("user", "word " * 500)], []).ids, end.prompt_tail])
    again = subject.bridge(PathEnd(longer, end.completion_ids, end.reply, "stop"), [Message("user", "go")], [BASH])
    assert isinstance(again, Bridge)
    assert again.tokenized_bytes == result.tokenized_bytes < 100  # the package also encodes its own header


def test_the_template_policy_breaks_where_the_family_drops_thinking(tiny_model: Path) -> None:
    subject = make(tiny_model, thinking_history="template")
    end = end_of(subject, f"<think>\nHm.\n</think>\n\n{CALL}<|im_end|>")
    result = subject.bridge(end, [Message("user", "go")], [BASH])
    assert isinstance(result, CannotBridge)
    assert result.reason == "thinking_stripped"
    assert isinstance(subject.bridge(end, [Message("tool", "out")], [BASH]), Bridge)


def test_truncated_thinking_is_closed_and_a_stop_inside_it_goes_on_behind_it(subject: FamilyRenderer) -> None:
    cut = subject.bridge(end_of(subject, "<think>\nI was"), [Message("user", "go")], [BASH])
    assert isinstance(cut, Bridge)
    assert subject.decode(cut.context_ids).startswith("</think><|im_end|>\n<|im_start|>user\ngo")
    stopped = subject.bridge(end_of(subject, "<think>\nI was<|im_end|>"), [Message("user", "go")], [BASH])
    assert isinstance(stopped, Bridge)
    assert subject.decode(stopped.context_ids).startswith("\n<|im_start|>user\ngo")


def test_a_result_that_changes_what_was_sampled_is_refused(subject: FamilyRenderer) -> None:
    """The package cuts tokens behind the last stop token."""
    result = subject.bridge(end_of(subject, "a<|im_end|>b"), [Message("user", "go")], [BASH])
    assert isinstance(result, CannotBridge)
    assert result.reason == "renderer_cannot_continue"


def test_a_foreign_assistant_message_cannot_be_bridged(subject: FamilyRenderer) -> None:
    end = end_of(subject, "a<|im_end|>")
    assert isinstance(subject.bridge(end, [Message("assistant", "b"), USER], [BASH]), CannotBridge)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_chunking_of_any_ids_gives_the_same_reply(subject: FamilyRenderer, data: st.DataObject) -> None:
    random_ids = st.lists(st.integers(0, subject.vocab_size + 3), max_size=30)
    spelled = st.lists(SNIPPETS, max_size=8).map(lambda parts: ids_of(subject, "".join(parts)).tolist())
    ids = [index for part in data.draw(st.lists(random_ids | spelled, max_size=3)) for index in part]
    options: dict[str, Any] = {
        "prompt_tail": ids_of(subject, data.draw(st.sampled_from(["", "<|im_start|>assistant\n<think>\n"]))),
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


def test_text_and_reasoning_leave_before_the_end(subject: FamilyRenderer) -> None:
    parser = subject.parser([BASH], prompt_tail=np.array([], dtype=np.int32))
    assert parser.feed(ids_of(subject, "<think>\nHm")) == [ReasoningDelta("Hm")]
    assert parser.feed(ids_of(subject, ".\n</think>\n\nLet")) == [ReasoningDelta("."), TextDelta("Let")]
    assert parser.feed(ids_of(subject, f" me.\n{CALL}")) == [TextDelta(" me.")]
    deltas, reply = parser.finish()
    assert deltas == [CallDelta(0, ToolCall("bash", '{"command":  "ls"}'))]
    assert reply.message.content == "Let me."


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{'name': 'bash'}", ParseStatus.INVALID_JSON),
        ('{"arguments": {}}', ParseStatus.MALFORMED),
        ('{"name": "bash", "arguments": 1}', ParseStatus.MALFORMED),
        ('{"name": "rm", "arguments": {}}', ParseStatus.UNKNOWN_TOOL),
    ],
)
def test_a_call_that_is_none_comes_back_as_its_text(
    subject: FamilyRenderer, body: str, status: ParseStatus
) -> None:
    _, reply = parse(subject, ids_of(subject, f"a<tool_call>{body}</tool_call>b{CALL}<|im_end|>"))
    assert reply.message.content == f"a\n<tool_call>{body}</tool_call>\nb"
    assert reply.parse_status == (status, ParseStatus.OK)
    assert len(reply.message.tool_calls) == 1


def test_an_unclosed_call_and_forbidden_calls_are_text(subject: FamilyRenderer) -> None:
    _, reply = parse(subject, ids_of(subject, 'a<tool_call>\n{"name'))
    assert reply.message.content == 'a\n<tool_call>\n{"name'
    assert reply.parse_status == (ParseStatus.UNCLOSED,)
    _, reply = parse(subject, ids_of(subject, CALL), parse_calls=False)
    assert (reply.message.content, reply.parse_status) == (CALL, ())


def test_a_stop_string_ends_the_view(subject: FamilyRenderer) -> None:
    _, reply = parse(subject, ids_of(subject, "one STOP two"), stop=["STOP"])
    assert (reply.message.content, reply.stop_string) == ("one", "STOP")
    _, reply = parse(subject, ids_of(subject, f"one {CALL} two STOP"), stop=["STOP"])
    assert (reply.message.content, len(reply.message.tool_calls)) == ("one\ntwo", 1)


def test_one_renderer_serves_many_threads(subject: FamilyRenderer) -> None:
    calls = [[Message("user", f"{i} <think>" if i % 2 else f"{i}")] for i in range(64)]
    alone = [subject.render(call, [BASH]).ids.tolist() for call in calls]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda call: subject.render(call, [BASH]).ids.tolist(), calls * 4))
    assert together == alone * 4


def test_xml_calls_of_another_family_are_parsed_with_typed_arguments(tiny_model: Path, tmp_path: Path) -> None:
    added = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    subject = make(make_folder(tiny_model, tmp_path / "qwen3.5", "unused", added=added), "qwen3.5")
    call = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    tail = subject.render([USER], [BASH]).ids
    _, reply = parse(subject, ids_of(subject, f"Hm.\n</think>\n\nGo.\n{call}<|im_end|>"), prompt_tail=tail)
    assert (reply.message.reasoning, reply.message.content) == ("Hm.", "Go.")
    assert json.loads(reply.message.tool_calls[0].arguments) == {"command": "ls"}
    hostile = Tool("bash", {"type": "function", "function": {"name": "bash", "parameters": {"think": "x"}}})
    clean = Tool("bash", {"type": "function", "function": {"name": "bash", "parameters": {"thank": "x"}}})
    assert controls(subject, subject.render([USER], [hostile]).ids) == controls(
        subject, subject.render([USER], [clean]).ids
    )
