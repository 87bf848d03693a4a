"""Grammars of replies: whatever one lets a model sample is read back as the answer or the call that was asked for.

Sampled here by llguidance's masks over real vocabularies, without any preference, and read by the reply parser.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from turnstile.models import Int32Array, Message, ParseStatus, Tool, ToolCall
from turnstile_server.engines.embedded.grammars import Grammars
from turnstile_server.engines.embedded.model import load_tokenizer
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import ParsedReply
from turnstile_server.rendering.reply_grammar import CallForm, ReplyGrammar
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

GO = (Message("user", "go"),)
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "maxLength": 12, "description": "What to run."},
        "count": {"type": "integer", "minimum": 0, "maximum": 9, "description": "How often."},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "description": "Which."},
    },
    "required": ["command"],
}
BASH, READ = (
    Tool(name, {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}})
    for name in ("bash", "read-file_2")
)
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}},
    "required": ["word"],
    "additionalProperties": False,
}
MOST = 200
"""Tokens of thinking and call; a model without preferences thinks until it hits the closing tag, so it is led."""

Renderers = Callable[..., TemplateRenderer]


class Sampler:
    """Samples replies of one model folder under a grammar."""

    def __init__(self, folder: Path, renderer: TemplateRenderer) -> None:
        self.renderer = renderer
        self._stops = renderer.stop_token_ids
        self._grammars = Grammars(load_tokenizer(folder), renderer.vocab_size, self._stops[0])

    def reply(self, tag: str, seed: int, *, tools: tuple[Tool, ...] = (BASH, READ)) -> ParsedReply:
        ids = self.sampled(tag, seed)
        parser = self.renderer.parser(tools, prompt_tail=self.tail)
        parser.feed(ids)
        return parser.finish()[1]

    @property
    def tail(self) -> Int32Array:
        return self.renderer.render(GO, (BASH, READ)).ids[-64:]

    def sampled(self, tag: str, seed: int) -> list[int]:
        """Ids, the stop id included. After some it takes control tokens where it may: the end of thinking."""
        constraint = anyio.run(lambda: self._grammars.constraint(self._stops, (), structural_tag=tag))
        chance = np.random.default_rng(seed)
        control = [index for index in self.renderer.token_bytes.control if index < self.renderer.vocab_size]
        ids: list[int] = []
        while len(ids) < MOST:
            allowed = constraint.mask().numpy().nonzero()[0]
            ending = [index for index in control if index in allowed] if len(ids) > seed % 7 else []
            ids.append(int(chance.choice(ending if ending and len(allowed) > 2000 else allowed)))
            constraint.take(ids[-1])
            if ids[-1] in self._stops:
                return ids
        raise AssertionError(f"no end: {self.renderer.decode(ids)!r}")


@pytest.fixture(scope="module")
def sampler(folders: dict[str, Path], renderer: Renderers) -> Callable[[str], Sampler]:
    made: dict[str, Sampler] = {}

    def make(name: str) -> Sampler:
        if name not in made:
            made[name] = Sampler(folders[name], renderer(name))
        return made[name]

    return make


def assert_one_call(reply: ParsedReply, tools: tuple[Tool, ...]) -> None:
    assert reply.message.content == ""
    (call,) = reply.message.tool_calls
    assert call.name in {tool.name for tool in tools}
    assert set(reply.parse_status) == {"ok"}
    arguments = json.loads(call.arguments)
    Draft202012Validator({**PARAMETERS, "additionalProperties": False}).validate(arguments)


CALLING = ("tiny", "qwen3", "hermes", "ascii", "opens_thinking")


@pytest.mark.parametrize("name", CALLING)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1_000_000), forced=st.sampled_from(["", "bash", "read-file_2"]))
def test_whatever_a_grammar_lets_pass_is_read_as_one_call(
    sampler: Callable[[str], Sampler], name: str, seed: int, forced: str
) -> None:
    made = sampler(name)
    tag = made.renderer.call_grammar((BASH, READ), forced, made.tail)
    assert tag is not None
    reply = made.reply(tag, seed)
    assert_one_call(reply, tuple(tool for tool in (BASH, READ) if forced in ("", tool.name)))


def test_a_tool_that_is_nested_too_deep_has_no_grammar(sampler: Callable[[str], Sampler]) -> None:
    deep: dict[str, Any] = {}
    for _ in range(2_000):
        deep = {"items": deep}
    parameters = {"type": "object", "properties": {"a": deep}}
    tool = Tool("bash", {"type": "function", "function": {"name": "bash", "parameters": parameters}})
    made = sampler("tiny")
    assert made.renderer.call_grammar((tool,), "", made.tail) is None


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1_000_000))
def test_whatever_a_grammar_lets_pass_is_read_as_the_answer_behind_its_thinking(
    sampler: Callable[[str], Sampler], seed: int
) -> None:
    made = sampler("opens_thinking")
    tag = made.renderer.answer_grammar(json.dumps(ANSWER), made.tail)
    assert tag is not None
    reply = made.reply(tag, seed, tools=())
    Draft202012Validator(ANSWER).validate(json.loads(reply.message.content))
    assert reply.message.tool_calls == ()


def grammar_of(think: tuple[str, str] | None, control: dict[str, int]) -> ReplyGrammar:
    def unused(*given: Any) -> Any:
        raise AssertionError(given)

    return ReplyGrammar(control, think, [], [9], write=unused, read=unused)


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ('<turn>\n<call>{"zq":"zq7"}</call>\n<end>\n', CallForm("<call>", "</call>")),
        ('{"zq": "zq7"}<end>', CallForm("", "")),
        ('<call>{"zq": "zq7"}{"zq": "zq7"}', None),
        ("<call><zq>zq7</zq>", None),
    ],
)
def test_the_form_of_a_call_is_what_stands_around_its_arguments(written: str, form: CallForm | None) -> None:
    def read(text: str, tools: Any) -> ParsedReply:
        arguments = text.removeprefix("<call>").removesuffix("</call>")
        return ParsedReply(Message("assistant", tool_calls=(ToolCall("f", arguments),)), (ParseStatus.OK,))

    control = {"<turn>": 1, "<end>": 9, "<call>": 3, "</call>": 4}
    made = ReplyGrammar(control, None, ["<call>", "</call>"], [9], write=lambda *_: written, read=read)
    assert made._form("f") == form


@pytest.mark.parametrize(
    "reply",
    [
        Message("assistant", "text"),
        Message("assistant", "text", tool_calls=(ToolCall("f", '{"zq": [1, {"a": "}\\n]"}, null]}'),)),
        Message("assistant", tool_calls=(ToolCall("g", '{"zq": [1, {"a": "}\\n]"}, null]}'),)),
        Message("assistant", tool_calls=(ToolCall("f", "{}"),)),
        Message("assistant", tool_calls=(ToolCall("f", '{"zq": [1, {"a": "}\\n]"}, null]}', own_id="1"),)),
    ],
)
def test_a_form_that_is_not_read_back_as_the_call_is_none(reply: Message) -> None:
    written = '<call>{"zq": "zq7"}'
    made = ReplyGrammar({}, None, [], [9], write=lambda *_: written, read=lambda *_: ParsedReply(reply, ()))
    assert made._form("f") is None


def test_a_prompt_that_opens_no_thinking_needs_the_schema_alone() -> None:
    assert grammar_of(None, {}).answer("{}", opened=True) is None
    assert grammar_of(("<think>", "</think>"), {}).answer("{}", opened=False) is None


def test_an_agents_own_options_of_a_grammar_are_left_out() -> None:
    schema = json.dumps({"type": "string", "x-guidance": {"lenient": True}})
    tag = json.loads(grammar_of(("<think>", "</think>"), {}).answer(schema, opened=True) or "")
    assert tag["format"]["elements"][1] == {"type": "json_schema", "json_schema": {"type": "string"}}


def test_thinking_ends_with_its_tag_as_the_model_has_it() -> None:
    def thinking(think: tuple[str, str], control: dict[str, int], *, opened: bool) -> Any:
        return grammar_of(think, control)._thinking(opened=opened)

    tags = ("<think>", "</think>")
    blank = {"type": "regex", "pattern": r"[\n ]{0,2}"}
    rest = [{"type": "any_tokens", "exclude_tokens": [2, 9]}, {"type": "token", "token": 2}, blank]
    tokens = {"<think>": 1, "</think>": 2, "<open>": 3, "<close>": 4, "<sep>": 5}
    assert thinking(tags, tokens, opened=True) == {"type": "sequence", "elements": rest}
    begun = [{"type": "token", "token": 1}, *rest]
    assert thinking(tags, tokens, opened=False) == {
        "type": "optional",
        "content": {"type": "sequence", "elements": begun},
    }
    text = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    assert thinking(tags, {}, opened=True) == {"type": "sequence", "elements": [text, blank]}
    parts = ("<open>think<sep>", "<close>think<sep>")
    assert thinking(parts, tokens, opened=True)["elements"] == [
        {"type": "any_tokens", "exclude_tokens": [4, 9]},
        {"type": "token", "token": 4},
        {"type": "const_string", "value": "think"},
        {"type": "token", "token": 5},
        blank,
    ]
    assert thinking(("<x>", "end<sep>"), tokens, opened=True) is None, "it cannot be told from thinking"


def test_a_tool_that_has_no_grammar_is_left_free(renderer: Renderers) -> None:
    made = renderer("qwen3")
    tail = made.render(GO, (BASH,)).ids
    control = Tool("a<|im_end|>", {"type": "function", "function": {"name": "a<|im_end|>"}})
    text = Tool("text", {"type": "function", "function": {"name": "text", "parameters": {"type": "string"}}})
    assert made.call_grammar((control,), "", tail) is None
    assert made.call_grammar((text, BASH), "", tail) is None
    assert made.call_grammar((text, BASH), "bash", tail) is not None
    assert made.call_grammar((BASH,), "other", tail) is None


def test_what_a_tool_declares_is_kept_and_nothing_is_made_up(renderer: Renderers) -> None:
    made = renderer("hermes")
    union = {"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}], "description": "d"}
    tools = (Tool("union", {"type": "function", "function": {"name": "union", "parameters": union}}), BASH)
    tag = json.loads(made.call_grammar(tools, "", made.render(GO, tools).ids) or "")
    calls = tag["format"]["elements"][-1]
    schemas = [
        part["json_schema"]
        for call in calls["elements"]
        for part in call["elements"]
        if part["type"] == "json_schema"
    ]
    ours = {"x-guidance": {"lenient": True, "coerce_one_of": True}}
    assert schemas == [{**union, **ours}, {**PARAMETERS, "additionalProperties": False, **ours}]


def test_control_tokens_of_a_form_are_asked_for_as_tokens(renderer: Renderers) -> None:
    made = renderer("qwen3")
    tag = made.call_grammar((BASH,), "bash", made.render(GO, (BASH,)).ids) or ""
    assert "<tool_call>" not in tag
    opening = made.encode_completion("<tool_call>", close=False).tolist()
    assert len(opening) == 1
    assert f'"token": {opening[0]}' in tag


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("qwen3", True),
        ("hermes-3", True),
        ("llama-3.1", True),
        ("granite-4.0", True),
        ("apriel-1.6", True),
        ("gpt-oss", True),
        ("qwen3-coder", False),  # values without quotes
        ("glm-4.6", False),
        ("kimi-k2", False),  # ids of its own
    ],
)
def test_calls_of_real_families_have_a_grammar_or_are_free(
    kit: Callable[[str], Path], family: str, forms: bool
) -> None:
    folder = kit(family)
    made = Sampler(folder, _renderer(folder))
    tag = made.renderer.call_grammar((BASH, READ), "", made.tail)
    assert (tag is not None) is forms
    for seed in range(20 if tag is not None else 0):
        assert_one_call(made.reply(tag or "", seed), (BASH, READ))


def _renderer(folder: Path) -> TemplateRenderer:
    made = create_renderer(folder, RenderingSettings())
    assert isinstance(made, TemplateRenderer)
    return made
