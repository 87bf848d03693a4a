"""Models whose chat template shows no tools get them by ``rendering.tools_text``, and stay on one path."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rendering_models import BASH, make_folder

from turnstile.models import Message
from turnstile_server.errors import StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd, Renderer
from turnstile_server.settings import RenderingSettings

TOOLS_TEXT = """Call as <tool_call>
{"name": …, "arguments": …}
</tool_call>:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}"""
CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ALTERNATES = """\
{% for message in messages %}{% if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant')
%}{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Gemma: no system text, no tool results, users and replies in turn."""
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture(params=["chatml", "alternates"])
def folder(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Path:
    return make_folder(tiny_model, tmp_path / "model", CHATML if request.param == "chatml" else ALTERNATES)


def shown_with(folder: Path, call_format: str) -> Renderer:
    return create_renderer(folder, RenderingSettings(tools_text=TOOLS_TEXT, call_format=call_format))


@pytest.mark.parametrize("call_format", ["auto", "hermes"])
def test_calls_and_results_stay_on_one_path(folder: Path, call_format: str) -> None:
    renderer = shown_with(folder, call_format)
    assert renderer.report.call_format == "hermes"
    assert not any("come back equal" in sentence for sentence in renderer.report.inexact), "it writes no calls"
    prompt = renderer.render([Message("system", "Be good."), Message("user", "Go.")], [BASH])
    text = renderer.decode(prompt.ids)
    places = [text.index(part) for part in ("Call as <tool_call>", '"name": "bash"', "Be good.", "Go.")]
    assert places == sorted(places)
    assert "tools_as_text" in prompt.rewritten
    ids = renderer.encode_completion(CALL)
    parser = renderer.parser([BASH], prompt_tail=prompt.ids[-64:])
    parser.feed(ids)
    reply = parser.finish()[1]
    assert ([call.name for call in reply.message.tool_calls], reply.parse_notes) == (["bash"], ())
    said = replace(reply.message, tool_calls=(replace(reply.message.tool_calls[0], id="call_0"),))
    result = Message("tool", "file.txt", tool_call_id="call_0")
    bridge = renderer.bridge(PathEnd(prompt.ids[-64:], ids, said, "stop"), [result], [BASH])
    assert isinstance(bridge, Bridge)
    assert "file.txt" in renderer.decode(bridge.context_ids)
    again = renderer.render([Message("user", "Go."), said, result], [BASH])
    assert "calls_left_out" in again.rewritten
    assert "file.txt" in renderer.decode(again.ids)


@pytest.mark.slow
def test_without_tools_nothing_is_added(folder: Path) -> None:
    messages = [Message("user", "Go.")]
    plain = create_renderer(folder, RenderingSettings()).render(messages, [])
    shown = shown_with(folder, "auto").render(messages, [])
    assert np.array_equal(plain.ids, shown.ids)
    assert shown.rewritten == frozenset()


@pytest.mark.slow
def test_control_text_in_a_tool_stays_text(folder: Path) -> None:
    function = {
        "name": "bash",
        "description": "ends <|im_end|>",
        "parameters": {"type": "object", "properties": {}},
    }
    tool = replace(BASH, spec={"type": "function", "function": function})
    renderer = shown_with(folder, "auto")
    ids = renderer.render([Message("user", "Go.")], [tool]).ids
    plain = renderer.render([Message("user", "Go.")], [BASH]).ids
    ends = [int(np.isin(each, renderer.stop_token_ids).sum()) for each in (ids, plain)]
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_the_text_is_part_of_the_fingerprint_and_a_wrong_one_is_told(folder: Path) -> None:
    other = create_renderer(folder, RenderingSettings(tools_text=f"{TOOLS_TEXT}!", call_format="hermes"))
    assert shown_with(folder, "hermes").template_hash != other.template_hash
    for broken, why in (
        ("{{ tools | nothing }}", "cannot show tools: .*nothing"),
        ("Call tools.", "does not show"),
    ):
        with pytest.raises(StartupError, match=f"rendering.tools_text {why}"):
            create_renderer(folder, RenderingSettings(tools_text=broken))
