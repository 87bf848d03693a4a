"""A continuation whose template does not run is the one that the template gives, for every template and text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML_FAMILY, HERMES
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from rendering_models import BASH, USER, ids_of, make_folder

from products import examples
from turnstile.models import Message, Role, ToolCall
from turnstile_server.rendering import bridge_traces
from turnstile_server.rendering.bridge_traces import BridgeTraces
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd, TooManyTokens
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

Make = Callable[..., TemplateRenderer]
Result = Bridge | CannotBridge | TooManyTokens

CONTENT = "message.content"
HABITS = {
    "dates": HERMES.replace("{%- if tools %}", "{{- strftime_now('%H:%M:%S') }}{%- if tools %}", 1),
    "json": HERMES.replace(
        f"'\\n<tool_response>\\n' + {CONTENT}",
        f"'\\n<tool_response>\\n' + ({CONTENT} | tojson if {CONTENT} is iterable else {CONTENT})",
    ),
    "macro": "{%- macro text(content) %}{%- if content is string %}{{- content }}{%- else %}"
    "{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}{%- endmacro %}"
    + HERMES.replace(CONTENT, "(text(message.content) | trim)"),
    "asks": HERMES.replace(
        f"'\\n<tool_response>\\n' + {CONTENT}",
        f"('\\nlong' if {CONTENT} | length > 9 else '\\n') ~ ('[]' if 'a' in {CONTENT} else '') ~ "
        f"('empty' if not {CONTENT} else '') ~ {CONTENT}.rstrip('\\n')",
    ),
    "names": HERMES.replace(
        f"'\\n<tool_response>\\n' + {CONTENT}",
        f"'\\n<tool_response>\\n' ~ (message.name or 'none') ~ message.tool_call_id ~ {CONTENT}",
    ),
    "splits": HERMES.replace(f"'\\n<tool_response>\\n' + {CONTENT}", f"{CONTENT}.split('a')[-1]"),
    "upper": HERMES.replace(f"'\\n<tool_response>\\n' + {CONTENT}", f"({CONTENT} | upper)"),
    "wraps": HERMES.replace("'\\n<tool_response>\\n'", "'<'").replace("'\\n</tool_response>'", "'>'"),
}
"""Templates that do more with a tool result than write it out."""

NEVER = {"splits", "upper"}
"""Those that do with a result what cannot be noted."""

PARTS = [
    *("<|im_end|>", "<think>", "</think>", "<tool_call>", "<tool_response>", "</tool_response>", "think"),
    *("<", ">", "<|", "|>", "im_end|>", "<|im_", "\n", "\n\n", " ", "\t", "\r\n", "a", "the end", "42"),
    *("é", "e\u0301", "\u0338", "中文", "🙂", "\ud800", "\x00", "\ufeff", "\u200d", "\u2028", "\U00100000"),
    *('"', "\\", "{}", "</", "user", "Ġ", "▁", "x" * 500),
]
TEXT = st.lists(st.sampled_from(PARTS), max_size=5).map("".join) | st.text(max_size=12)
PLAIN = st.text(st.characters(codec="ascii", exclude_characters="<>|"), max_size=20)
CONTENTS = st.one_of(PLAIN, PLAIN, TEXT)
PLAIN_OR_NOT = st.sampled_from(["call_1", "call_1", "call_2", "", "c<|im_end|>"])
NAMES = st.sampled_from(["bash", "bash", "a b", "x</think>"])
RARELY = st.sampled_from([None, None, "Hm."])
FOREIGN_CALLS = st.lists(st.builds(ToolCall, NAMES, st.sampled_from(["{}", '{"x": 1}'])), max_size=1)
ROLES = st.sampled_from(["tool", "tool", "tool", "user", "user", "system", "developer", "assistant"])
Fields = tuple[Role, bool, bool]


def texts_for(
    draw: Callable[..., Any], shape: Sequence[Fields], calls: int, named: bool
) -> tuple[list[Message], tuple[ToolCall, ...]]:
    """New messages of a shape, and the calls of the reply before them."""
    new = [
        Message(
            role,
            draw(CONTENTS),
            tool_call_id=draw(PLAIN_OR_NOT) if has_id else None,
            name=draw(NAMES) if has_name else None,
            reasoning=draw(RARELY) if role == "assistant" else None,
            tool_calls=tuple(draw(FOREIGN_CALLS)) if role == "assistant" else (),
        )
        for role, has_id, has_name in shape
    ]
    return new, tuple(ToolCall(draw(NAMES), "{}", draw(PLAIN_OR_NOT) if named else None) for _ in range(calls))


ENDINGS = ["Yes.<|im_end|>", "Yes.<|endoftext|>", "Yes.", "<think>\nHm", "", "Yes.<|user|>", "Yes.<|observation|>"]
EXAMPLES = settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))


def bridged(subject: TemplateRenderer, end: PathEnd, new: Sequence[Message], most: int | None) -> Result:
    try:
        return subject.bridge(end, new, [BASH], most=most)
    except TooManyTokens as refused:
        return refused


def comparable(result: Result) -> Any:
    if isinstance(result, Bridge):
        assert result.context_ids.dtype == np.int32
        return result.context_ids.tolist(), result.tokenized_bytes
    return (type(result), str(result))


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, renderer: Make) -> Make:
    root = tmp_path_factory.mktemp("habits")
    habits: dict[str, TemplateRenderer] = {}

    def make(name: str) -> TemplateRenderer:
        if name not in HABITS:
            return renderer(name)
        if name not in habits:
            folder = make_folder(tiny_model, root / name, HABITS[name])
            built = create_renderer(folder, RenderingSettings())
            assert isinstance(built, TemplateRenderer)
            habits[name] = built
        return habits[name]

    return make


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """Counts the continuations that were made without a run of the template (True), and all others."""
    counts: Counter[bool] = Counter()
    encode = BridgeTraces.encode

    def noted(self: BridgeTraces, *arguments: Any) -> Any:
        encoded = encode(self, *arguments)
        counts[encoded is not None] += 1
        return encoded

    monkeypatch.setattr(BridgeTraces, "encode", noted)
    return counts


def both(subject: TemplateRenderer, end: PathEnd, new: Sequence[Message], most: int | None = None) -> None:
    """Holds the continuation equal, first time and again, to the one that the template gives."""
    continuation = subject._continuation
    traces = continuation._traces
    assert traces is not None
    continuation._traces = None
    try:
        expected = comparable(bridged(subject, end, new, most))
    finally:
        continuation._traces = traces
    for _ in range(2):
        assert comparable(bridged(subject, end, new, most)) == expected


@pytest.mark.parametrize("name", [*CHATML_FAMILY, "tiny", "role_stop", "llama", "hoists", "glues", *HABITS])
def test_a_continuation_without_the_template_is_the_one_that_the_template_gives(
    made: Make, name: str, taken: Counter[bool]
) -> None:
    subject = made(name)
    prompt = subject.render([USER], [BASH]).ids[-64:]

    @EXAMPLES
    @given(
        data=st.data(),
        shape=st.lists(st.tuples(ROLES, st.booleans(), st.booleans()), min_size=1, max_size=3),
        calls=st.integers(0, 2),
        named=st.booleans(),
        ending=st.sampled_from(ENDINGS),
    )
    def compare(data: st.DataObject, shape: list[Fields], calls: int, named: bool, ending: str) -> None:
        for _ in range(3):  # the same shape with other texts
            new, called = texts_for(data.draw, shape, calls, named)
            reply = Message("assistant", "Yes.", tool_calls=called)
            end = PathEnd(prompt, ids_of(subject, ending), reply, "stop")
            both(subject, end, new, data.draw(st.sampled_from([None, None, None, 500, 20])))

    compare()
    enough = 3 if name in NEVER else 12
    for more in range(20):  # chance may draw few shapes that can be noted; what these seeds draw is enough
        if taken[True] < enough:
            seed(more)(compare)()
    assert taken[True] >= enough, taken


@pytest.mark.parametrize("name", [*CHATML_FAMILY, "tiny", "role_stop", "llama", "glues", *HABITS])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_ordinary_results_and_questions_are_written_without_the_template(
    made: Make, name: str, role: Role, taken: Counter[bool]
) -> None:
    subject = made(name)
    stop = "<|observation|>" if role == "tool" else "<|user|>"
    ending = stop if name == "role_stop" else "<|eot_id|>" if name == "llama" else "<|im_end|>"
    prompt = subject.render([USER], [BASH]).ids[-64:]
    calls = (ToolCall("bash", '{"x": 1}', "call_9"),) if role == "tool" else ()
    end = PathEnd(prompt, ids_of(subject, f"Yes.{ending}"), Message("assistant", "Yes.", tool_calls=calls), "stop")
    texts = ["one", "two <b>", "größer\n", "def f(x):\n    return x\n" * 20]
    for index, text in enumerate(texts):
        both(subject, end, [Message(role, text, tool_call_id=f"call_{index}" if role == "tool" else None)])
    never = role == "tool" and name in NEVER
    assert (taken[True] == 0) if never else (taken[True] >= len(texts)), taken


def test_only_whole_texts_that_a_template_asks_alike_share_a_trace(made: Make) -> None:
    """Qwen3 asks of a user's message whether it is a wrapped tool response."""
    subject = made("qwen3")
    end = PathEnd(
        subject.render([USER], []).ids[-64:], ids_of(subject, "Yes.<|im_end|>"), Message("assistant"), "stop"
    )
    for text in ("go", "x\n</tool_response>", "go on"):
        both(subject, end, [Message("user", text)])
    traces = subject._continuation._traces
    assert traces is not None
    questions = {
        guard.question
        for variant in traces._shapes[((), (("user", True, True),))] or ()
        for guard in variant.guards
    }
    assert "starts" in questions


@pytest.mark.slow
def test_what_is_noted_is_bounded(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge_traces, "MOST_SHAPES", 3)
    monkeypatch.setattr(bridge_traces, "MOST_VARIANTS", 2)
    monkeypatch.setattr(bridge_traces, "MOST_TEXTS", 1)
    subject = create_renderer(make_folder(tiny_model, tmp_path / "asks", HABITS["asks"]), RenderingSettings())
    assert isinstance(subject, TemplateRenderer)
    traces = subject._continuation._traces
    assert traces is not None
    prompt = subject.render([USER], []).ids[-64:]
    for ending in ("Yes.<|im_end|>", "Yes."):
        end = PathEnd(prompt, ids_of(subject, ending), Message("assistant", "Yes."), "stop")
        for count in range(1, 6):
            for text in ("b", "a", "a long result", "a longer result", "", "b"):
                both(subject, end, [Message("tool", text)] * count)
                assert len(traces._shapes) <= 3
                assert all(len(variants or ()) <= 2 for variants in traces._shapes.values())
                texts = [variant.texts for variants in traces._shapes.values() for variant in variants or ()]
                assert all(len(one) <= 1 for one in texts)


@pytest.mark.slow
def test_a_date_behind_the_reply_is_written_anew(tiny_model: Path, tmp_path: Path, taken: Counter[bool]) -> None:
    template = HERMES.replace(
        "{%- if add_generation_prompt %}", "{{- strftime_now('%f') }}{%- if add_generation_prompt %}"
    )
    subject = create_renderer(make_folder(tiny_model, tmp_path / "dated", template), RenderingSettings())
    assert isinstance(subject, TemplateRenderer)
    end = PathEnd(
        subject.render([USER], []).ids[-64:], ids_of(subject, "Yes.<|im_end|>"), Message("assistant"), "stop"
    )
    for _ in range(3):
        subject.bridge(end, [Message("user", "go")], [])
    assert not taken


@pytest.mark.slow
def test_under_the_templates_own_policy_thinking_is_looked_at_first(renderer: Make) -> None:
    subject = renderer("qwen3", thinking_history="template")
    prompt = subject.render([USER], [BASH]).ids[-64:]
    plain = PathEnd(prompt, ids_of(subject, "Yes.<|im_end|>"), Message("assistant", "Yes."), "stop", False)
    thought = replace(plain, completion_ids=ids_of(subject, "<think>\nHm.\n</think>\n\nYes.<|im_end|>"))
    for _ in range(3):
        assert isinstance(subject.bridge(plain, [Message("user", "go")], [BASH]), Bridge)
        dropped = subject.bridge(thought, [Message("user", "go")], [BASH])
        assert isinstance(dropped, CannotBridge)
        assert dropped.reason == "thinking_stripped"
