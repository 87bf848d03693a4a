"""The models' own templates and tokens: every call that they can write is read, and a dialogue stays on one path.

The battery of values (``call_battery.json``) is rendered by each model's template and read back, its control
tokens once as the model would sample them and once spelled in ordinary tokens. The dialogue has calls beside text,
two calls at once, late system text, ``developer`` messages, and messages of one role in a row.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_kits import families
from turnstile.models import Int32Array, Message, Tool, ToolCall
from turnstile_server.errors import StartupError
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd
from turnstile_server.rendering.tags import opened_by
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.rendering.written_reply import written_reply
from turnstile_server.settings import RenderingSettings
from turnstile_server.testing.chat_format import ChatFormat
from turnstile_server.testing.policy import Step

pytestmark = pytest.mark.thorough

BATTERY = json.loads((Path(__file__).parent / "call_battery.json").read_text())["values"]
WITHOUT_TOOLS = {
    "deepseek-r1": "fails on any tool: it gives a generator to tojson",
    "deepseek-v3": "shows no tools: they go into the system text by hand",
    "deepseek-v3.1": "shows no tools: they go into the system text by hand",
    "gemma-2": "shows no tools",
    "gemma-3": "shows no tools",
    "kimi-k2-thinking": "llama.cpp's edit calls list.append, which transformers' sandbox refuses",
    "phi-3.5": "shows no tools",
    "r1-distill-qwen": "shows no tools",
    "smollm3": "shows no tools",
}
UNWRITTEN = {"lfm2"}
"""Templates that write no calls: there is nothing to read back."""
ONE_CALL = {"gigachat-3.1", "gpt-oss", "llama-3.1", "llama-3.2", "llama-3.3"}
"""Templates that write, or take, the first of several calls alone."""
BARE = {"qwen3_coder", "glm", "hunyuan3", "minimax_m2", "minicpm5", "minimax_m3", "muse"}
"""Formats of bare values: without a type, 5 is the text that stands there."""
LOST = {
    "minimax-m3": {"null", "list-empty", "object-empty", "list-mixed", "object-deep", "opt-string"},
    "hermes-3": {"null", "opt-string", "opt-number-text", "opt-int"},
}
"""Values that the template does not keep."""
UNPLAYED = {
    "apertus": "told apart",
    "apriel-1.6": "no way that can be read",
    "deepseek-v3.2": "told apart",
    "gemma-4": "no way that can be read",
    "gigachat-3.1": "no way that can be read",
    "hermes-3": "no way that can be read",
    "kimi-k3": "no way that can be read",
    "lfm2": "writes no calls",
}
"""Models that no scripted policy plays: how each of them is refused."""


@pytest.fixture(scope="module", params=sorted(set(families()) - set(WITHOUT_TOOLS)))
def subject(request: pytest.FixtureRequest, kit: Callable[[str], Path]) -> tuple[str, TemplateRenderer]:
    made = create_renderer(kit(request.param), RenderingSettings())
    assert isinstance(made, TemplateRenderer)
    return request.param, made


def tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return Tool(
        name, {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}
    )


TOOLS = (tool("bash", command={"type": "string"}), tool("read", command={"type": "string"}))


def written(renderer: TemplateRenderer, message: Message, tools: Sequence[Tool]) -> tuple[str, Any]:
    """What the template writes for a reply, behind its opening, and the shield of what a caller wrote in it."""
    reply = written_reply(renderer._template, message, tools)
    return reply.text, reply.shield


def completion(renderer: TemplateRenderer, text: str, shield: Any, *, spelled: bool) -> list[int]:
    after = renderer._encoder.anchor_id
    if spelled:
        ids = renderer._encoder.encode(text, shield, after=after).ids
    else:
        ids = renderer._encoder.encode(shield.restore(text), after=after).ids
    end = next((place + 1 for place, index in enumerate(ids) if index in renderer.stop_token_ids), None)
    return ids[:end] if end is not None else [*ids, renderer.stop_token_ids[0]]


def closing(renderer: TemplateRenderer, text: str) -> Int32Array:
    """A prompt's end behind which ``text`` is no thinking, or the end of it."""
    think = renderer._tags.think
    if think is None or not text.lstrip().startswith(think[1]):
        return np.array([], dtype=np.int32)
    return np.array(renderer._encoder.encode(think[0]).ids, dtype=np.int32)


@pytest.mark.parametrize("spelled", [False, True])
def test_every_value_comes_back_as_it_was_written(subject: tuple[str, TemplateRenderer], spelled: bool) -> None:
    name, renderer = subject
    if name in UNWRITTEN:
        return
    call_format = renderer.report.call_format
    wrong: list[str] = []
    for case in BATTERY:
        if case["id"] in LOST.get(name, ()) or (case["id"] == "no-schema-number" and call_format in BARE):
            continue
        if case["id"] == "im-end" and not spelled:
            continue  # the end of the reply, as a token
        offered = [tool("write", v=case["schema"])]
        call = ToolCall("write", json.dumps({"v": case["value"]}, ensure_ascii=False), "call_0")
        text, shield = written(renderer, Message("assistant", "", tool_calls=(call,)), offered)
        ids = completion(renderer, text, shield, spelled=spelled)
        replies = []
        for step in (len(ids), 1, 3):
            parser = renderer.parser(offered, prompt_tail=closing(renderer, text))
            for start in range(0, len(ids), step):
                parser.feed(ids[start : start + step])
            replies.append(parser.finish()[1])
        assert replies[0] == replies[1] == replies[2], "streamed as whole"
        found = [(each.name, json.loads(each.arguments)) for each in replies[0].message.tool_calls]
        if as_text(found) != as_text([("write", {"v": case["value"]})]):
            wrong.append(case["id"])
    assert wrong == []


def as_text(value: Any) -> str:
    """JSON in which types differ; composed, as some vocabularies encode letters (NFC)."""
    return unicodedata.normalize("NFC", json.dumps(value, sort_keys=True, ensure_ascii=False))


def result(index: int) -> Message:
    return Message("tool", f"result {index}", tool_call_id=f"call_{index}")


def calls(*indexes: int) -> tuple[ToolCall, ...]:
    return tuple(ToolCall("bash", json.dumps({"command": f"c {index}"}), f"call_{index}") for index in indexes)


DIALOGUE = (
    (Message("assistant", "Let me look.", tool_calls=calls(0)), [result(0)]),
    (Message("assistant", "", tool_calls=calls(1)), [result(1)]),
    (Message("assistant", "", tool_calls=calls(2, 3)), [result(2), result(3)]),
    (Message("assistant", "", tool_calls=calls(4)), [result(4), Message("user", "More?")]),
    (Message("assistant", "Done."), [Message("user", "Go on.")]),
    (Message("assistant", "Yes."), [Message("system", "Be brief."), Message("user", "And?")]),
    (Message("assistant", "", tool_calls=calls(5)), [result(5), Message("system", "Late reminder.")]),
    (Message("assistant", "Fine."), [Message("user", "One."), Message("developer", "Two.")]),
    (Message("assistant", "Ok."), [Message("user", "Three."), Message("user", "Four.")]),
)


def test_a_dialogue_stays_on_one_path_with_every_text_in_its_place(subject: tuple[str, TemplateRenderer]) -> None:
    name, renderer = subject
    path = renderer.render([Message("system", "Be good."), Message("user", "Hello")], TOOLS).ids
    for message, new in DIALOGUE:
        if message.tool_calls and (name in UNWRITTEN or (len(message.tool_calls) > 1 and name in ONE_CALL)):
            continue
        text, shield = written(renderer, message, TOOLS)
        think = renderer._tags.think
        if opened_by(path[-64:], renderer._tags, renderer.token_bytes) and think is not None:
            text = f"I think.{text}" if text.lstrip().startswith(think[1]) else f"I think.\n{think[1]}\n\n{text}"
        ids = np.array(completion(renderer, text, shield, spelled=False), dtype=np.int32)
        parser = renderer.parser(TOOLS, prompt_tail=path[-64:])
        parser.feed(ids)
        reply = parser.finish()[1].message
        if name != "nemotron-nano-v2" or not message.content:  # it writes text and calls as two messages
            assert [json.loads(call.arguments) for call in reply.tool_calls] == [
                json.loads(call.arguments) for call in message.tool_calls
            ]
        given = tuple(
            ToolCall(found.name, found.arguments, call.id, found.own_id)
            for found, call in zip(reply.tool_calls, message.tool_calls, strict=False)
        )
        end = PathEnd(path[-64:], ids, Message("assistant", reply.content, reply.reasoning, given), "stop")
        if not given and message.tool_calls:
            continue
        bridge = renderer.bridge(end, new, TOOLS)
        assert isinstance(bridge, Bridge), bridge
        shown = renderer.decode(bridge.context_ids)
        places = [shown.find(each.content) for each in new]
        assert -1 not in places, shown
        assert places == sorted(places)
        path = np.concatenate([path, ids, bridge.context_ids])


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_a_model_without_tools_says_so_at_start(name: str, kit: Callable[[str], Path]) -> None:
    report = create_renderer(kit(name), RenderingSettings()).report
    assert report.call_format is None
    assert report.inexact[0].startswith("calls with tools are refused: ")


def test_a_scripted_policy_plays_it_in_its_own_format(
    subject: tuple[str, TemplateRenderer], kit: Callable[[str], Path]
) -> None:
    name, renderer = subject
    vocabulary = load_vocabulary(kit(name))
    if name in UNPLAYED:
        with pytest.raises(StartupError, match=UNPLAYED[name]):
            ChatFormat(vocabulary, renderer)
        return
    chat = ChatFormat(vocabulary, renderer)
    prompt = renderer.render([Message("system", "Be good."), Message("user", "Count.")], TOOLS).ids
    for turn in range(3):
        scene = chat.read(prompt.tolist())
        assert (scene.turn, scene.calls_made) == (turn, turn)
        assert set(scene.tools) == {each.name for each in TOOLS}
        step = Step(text="I look.", tool="bash", arguments={"command": f"  echo {turn} <|im_end|>\n"})
        ids = np.array(chat.write(step, scene), dtype=np.int32)
        parser = renderer.parser(TOOLS, prompt_tail=prompt[-64:])
        parser.feed(ids)
        reply = parser.finish()[1]
        [call] = reply.message.tool_calls
        assert (call.name, json.loads(call.arguments), reply.parse_notes) == ("bash", step.arguments, ())
        said = replace(reply.message, tool_calls=(replace(call, id=f"call_{turn}"),))
        result = Message("tool", "out", tool_call_id=f"call_{turn}")
        bridge = renderer.bridge(PathEnd(prompt[-64:], ids, said, "stop"), [result], TOOLS)
        assert isinstance(bridge, Bridge)
        prompt = np.concatenate([prompt, ids, bridge.context_ids]).astype(np.int32)
    parser = renderer.parser(TOOLS, prompt_tail=prompt[-64:])
    parser.feed(chat.write(Step(text="Done."), chat.read(prompt.tolist())))
    assert parser.finish()[1].message.content.strip() == "Done."
