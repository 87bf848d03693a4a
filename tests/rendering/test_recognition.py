"""The call format of a chat template is found by what the template writes, and what does not come back is told.

The templates here write calls as models' own do, one for each kind of form. With the models' own templates,
``scripts/model_kits.py`` is for: docs/models.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rendering_models import BASH, USER, ids_of, make_folder, parse

from turnstile.models import Message, ParseNote, ToolCall
from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

pytestmark = pytest.mark.slow

Made = Callable[..., TemplateRenderer]

LOOP = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}INSTRUCTIONS<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% set f = call.function %}CALL{% endfor -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WRITTEN = {
    "hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n"
    "{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson if v is mapping or v is iterable else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ f.name }}{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "mistral_v3": '[TOOL_CALLS][{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": '
    '"{% if call.id | length == 9 %}{{ call.id }}{% else %}{{ raise_exception("ids have nine characters") }}'
    '{% endif %}"}]',
    "mistral_v11": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n'
    "</minimax:tool_call>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": '
    "{{ f.arguments | tojson }}}]<|END_ACTION|>",
}
"""How a call is written, by the format that reads it."""


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """``made(call, instructions, **settings)``: a renderer whose template writes calls so."""

    def make(call: str, instructions: str = "", **settings: str) -> TemplateRenderer:
        template = LOOP.replace("CALL", call).replace("INSTRUCTIONS", instructions)
        folder = make_folder(tiny_model, tmp_path_factory.mktemp("made") / "model", template)
        built = create_renderer(folder, RenderingSettings.model_validate(settings))
        assert isinstance(built, TemplateRenderer)
        return built

    return make


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_format_is_found_by_what_the_template_writes(made: Made, name: str) -> None:
    subject = made(WRITTEN[name])
    assert subject.report.call_format == name
    assert not any("come back" in sentence for sentence in subject.report.inexact)
    subject.check_tools([BASH])


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_call_of_a_model_is_read_and_its_result_continues_the_path(made: Made, name: str) -> None:
    subject = made(WRITTEN[name])
    call = ToolCall("bash", '{"command": "  ls\\n"}', "call_0")
    history = [USER, Message("assistant", "Look.\n", tool_calls=(call,))]
    result = Message("tool", "out", tool_call_id="call_0")
    whole = subject.decode(subject.render([*history, result], [BASH]).ids)
    opened = subject.decode(subject.render([USER], [BASH]).ids)
    written = whole[len(opened) :].partition("<|im_end|>")[0] + "<|im_end|>"
    ids = ids_of(subject, written)
    prompt = subject.render([USER], [BASH]).ids
    _, reply = parse(subject, ids, prompt_tail=prompt[-64:])
    [found] = reply.message.tool_calls
    assert json.loads(found.arguments) == {"command": "  ls\n"}
    path = PathEnd(prompt[-64:], ids, Message("assistant", "Look.", tool_calls=(found,)), "stop")
    bridge = subject.bridge(path, [result], [BASH])
    assert isinstance(bridge, Bridge)
    assert opened + written + subject.decode(bridge.context_ids) == whole


def test_the_models_own_id_stays_in_its_context(made: Made) -> None:
    """Kimi K2: the call's name stands nowhere but in its id."""
    subject = made(WRITTEN["kimi_k2"])
    calls = tuple(ToolCall("bash", "{}", f"call_{index}") for index in range(2))
    history = [USER, Message("assistant", "", tool_calls=calls), Message("tool", "out", tool_call_id="call_1")]
    text = subject.decode(subject.render(history, [BASH]).ids)
    assert "functions.bash:0" in text
    assert "functions.bash:1" in text
    assert "call_" not in text.replace("tool_call", "")


def test_what_a_template_does_not_write_back_is_told(made: Made) -> None:
    trims = WRITTEN["minimax_m2"].replace("v if v is string", "v | trim if v is string")
    [sentence] = [each for each in made(trims).report.inexact if "come back" in each]
    assert sentence.endswith("white space around a string")


def test_a_template_that_writes_no_calls_is_known_by_the_marks_of_its_instructions(made: Made) -> None:
    subject = made("", "Write calls between <tool_call> and </tool_call>.")
    assert subject.report.call_format == "hermes"
    assert any("writes no calls" in sentence for sentence in subject.report.inexact)


def test_a_template_that_takes_its_tools_by_another_name_shows_them(tiny_model: Path, tmp_path: Path) -> None:
    """SmolLM3's."""
    template = LOOP.replace("CALL", WRITTEN["hermes"]).replace("INSTRUCTIONS", "")
    folder = make_folder(tiny_model, tmp_path / "model", template.replace("tools %}", "xml_tools %}"))
    subject = create_renderer(folder, RenderingSettings())
    assert subject.report.call_format == "hermes"
    assert '"name": "bash"' in subject.decode(subject.render([USER], [BASH]).ids)


def test_a_template_without_a_known_form_refuses_tools_and_says_so(made: Made) -> None:
    subject = made("<<{{ f.name }}: {{ f.arguments | tojson }}>>")
    assert subject.report.call_format is None
    with pytest.raises(InvalidRequest, match="no installed call format"):
        subject.check_tools([BASH])
    subject.check_tools([])


def test_a_template_that_fails_on_every_call_is_told_in_its_own_words(made: Made) -> None:
    with pytest.raises(InvalidRequest, match="I take no calls"):
        made("{{ raise_exception('I take no calls') }}").check_tools([BASH])
    with pytest.raises(InvalidRequest, match="unsafe"):
        made("{% set _ = messages.append(1) %}").check_tools([BASH])


def test_a_form_that_is_named_is_used_and_checked(made: Made) -> None:
    subject = made(WRITTEN["hermes"], call_format="glm")
    assert subject.report.call_format == "glm"
    assert any("does not come back equal: a call" in sentence for sentence in subject.report.inexact)
    with pytest.raises(StartupError, match="no call format 'nothing'"):
        made(WRITTEN["hermes"], call_format="nothing")


@pytest.mark.parametrize(
    ("call", "calls", "left_out"),
    [
        ("", 1, {"calls_left_out"}),
        ("{% if loop.first %}" + WRITTEN["hermes"] + "{% endif %}", 2, {"calls_left_out"}),
        ("{% if loop.first %}" + WRITTEN["hermes"] + "{% endif %}", 1, set()),
        (WRITTEN["hermes"], 2, set()),
    ],
    ids=["writes-none", "writes-the-first", "one", "writes-all"],
)
def test_what_a_template_leaves_out_of_earlier_replies_is_counted(
    made: Made, call: str, calls: int, left_out: set[str]
) -> None:
    subject = made(call, "Write calls between <tool_call> and </tool_call>.")
    made_calls = tuple(ToolCall("bash", "{}", f"call_{index}") for index in range(calls))
    results = [Message("tool", "out", tool_call_id=each.id) for each in made_calls]
    history = [USER, Message("assistant", "Look.", tool_calls=made_calls), *results]
    assert subject.render(history, [BASH]).rewritten == left_out
    assert subject.render([USER], [BASH]).rewritten == frozenset()


def test_text_that_a_template_leaves_out_beside_a_call_is_counted(tiny_model: Path, tmp_path: Path) -> None:
    silent = LOOP.replace(
        "{{ message.content }}", "{% if not message.tool_calls %}{{ message.content }}{% endif %}"
    )
    template = silent.replace("CALL", WRITTEN["hermes"]).replace("INSTRUCTIONS", "")
    subject = create_renderer(make_folder(tiny_model, tmp_path / "model", template), RenderingSettings())
    calls = (ToolCall("bash", "{}", "call_0"),)
    result = Message("tool", "out", tool_call_id="call_0")
    for text, counted in (("Look.", {"text_beside_call"}), ("", set())):
        history = [USER, Message("assistant", text, tool_calls=calls), result]
        assert subject.render(history, [BASH]).rewritten == counted


def test_an_opening_that_the_vocabulary_splits_is_told(made: Made) -> None:
    subject = made(WRITTEN["minimax_m2"])
    assert any("<minimax:tool_call> is no token" in sentence for sentence in subject.report.inexact)
    assert not any("is no token" in sentence for sentence in made(WRITTEN["hermes"]).report.inexact)


def test_strict_reading_takes_no_liberty(made: Made) -> None:
    ids = ids_of(made(WRITTEN["hermes"]), '<tool_call>{"name": "bash", "arguments": {}}<|im_end|>')
    _, faithful = parse(made(WRITTEN["hermes"]), ids)
    assert (len(faithful.message.tool_calls), faithful.parse_notes) == (1, (ParseNote.END_MISSING,))
    _, strict = parse(made(WRITTEN["hermes"], calls="strict"), ids)
    assert strict.message.tool_calls == ()
