"""What a written policy reads and writes is what the renderer renders and parses, in templates of its form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import HERMES, LLAMA, OPENS_THINKING, QWEN3
from rendering_models import BASH, LLAMA_TOKENS, make_folder, parse

from turnstile.models import Message, ToolCall
from turnstile_server.demo import TINY
from turnstile_server.errors import StartupError
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import RenderingSettings
from turnstile_server.testing.chat_format import ChatFormat
from turnstile_server.testing.policy import Step

HISTORY = [
    Message(role="system", content="Be good."),
    Message(role="user", content="Count the files."),
    Message(role="assistant", content="I look.", tool_calls=(ToolCall("bash", '{"command": "ls"}', "c1"),)),
    Message(role="tool", content="a b", tool_call_id="c1"),
]
STEP = Step(reasoning="Two of them.", text="I look again.", tool="bash", arguments={"command": "ls -a"})


@pytest.mark.parametrize("template", [QWEN3, HERMES, OPENS_THINKING], ids=["qwen3", "hermes", "opens-thinking"])
@pytest.mark.parametrize("length", [2, 4])
def test_scenes_are_read_and_steps_are_parsed_back(
    tiny_model: Path, tmp_path: Path, template: str, length: int
) -> None:
    vocabulary = load_vocabulary(make_folder(tiny_model, tmp_path / "model", template))
    renderer = TemplateRenderer(vocabulary, RenderingSettings())
    chat = ChatFormat(vocabulary, renderer)
    prompt = renderer.render(HISTORY[:length], [BASH]).ids
    scene = chat.read(prompt.tolist())
    assert scene.prompt == renderer.decode(prompt)
    assert (scene.turn, scene.calls_made) == ((0, 0) if length == 2 else (1, 1))
    assert scene.tools == {"bash": BASH.spec["function"]}
    assert "Be good." in scene.messages[0].text
    assert ("Count the files." if length == 2 else "a b") in scene.messages[-1].text
    _, reply = parse(renderer, chat.write(STEP, scene), prompt_tail=prompt[-64:])
    (call,) = reply.message.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("bash", STEP.arguments)
    assert (reply.message.reasoning or "").strip() == STEP.reasoning
    assert reply.message.content.strip() == STEP.text
    _, plain = parse(renderer, chat.write(Step(text="Done."), scene), prompt_tail=prompt[-64:])
    assert (plain.message.content.strip(), plain.message.tool_calls) == ("Done.", ())


def test_a_template_without_calls_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_folder(tiny_model, tmp_path / "model", LLAMA, added=LLAMA_TOKENS, eos="<|eot_id|>")
    vocabulary = load_vocabulary(folder)
    with pytest.raises(StartupError, match="cannot play the model"):
        ChatFormat(vocabulary, TemplateRenderer(vocabulary, RenderingSettings()))


def test_a_template_that_shows_tools_by_name_only_is_refused_with_what_to_use_instead() -> None:
    folder = TINY
    vocabulary = load_vocabulary(folder)
    with pytest.raises(StartupError, match="shows tools in no way") as refused:
        ChatFormat(vocabulary, TemplateRenderer(vocabulary, RenderingSettings()))
    assert str(folder) in refused.value.message
    assert "Leave out --model" in refused.value.message
