"""The template backend: parity with transformers, continuations, thinking policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML_FAMILY
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from rendering_models import BASH, USER, ids_of, make_folder, parse
from transformers import PreTrainedTokenizerFast

from products import examples
from turnstile.models import Message, Tool, ToolCall
from turnstile_server.errors import InvalidRequest
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.settings import RenderingSettings

Make = Callable[..., TemplateRenderer]

CLEAN = st.text(
    st.characters(exclude_characters="<>|", exclude_categories=("Cs",)) | st.sampled_from("\n  é中"), max_size=30
)
ARGUMENTS = st.dictionaries(CLEAN, CLEAN | st.integers() | st.booleans() | st.none(), max_size=3)
CALL = st.builds(
    lambda name, value: ToolCall(name, json.dumps(value)), st.sampled_from(["bash", "read"]), ARGUMENTS
)
ASSISTANT = st.builds(
    lambda text, thought, calls: Message("assistant", text, reasoning=thought, tool_calls=tuple(calls)),
    CLEAN,
    st.none() | CLEAN.filter(bool),
    st.lists(CALL, max_size=2),
)
AFTER = st.lists(st.builds(Message, st.sampled_from(["user", "tool", "system"]), CLEAN), min_size=1, max_size=3)
CONVERSATION = st.builds(
    lambda system, user, rest: [
        *system,
        Message("user", user),
        *(m for pair in rest for m in [pair[0], *pair[1]]),
    ],
    st.lists(st.builds(Message, st.just("system"), CLEAN), max_size=1),
    CLEAN,
    st.lists(st.tuples(ASSISTANT, AFTER), max_size=3),
)
TOOLS = st.lists(
    st.builds(
        lambda name, text: Tool(
            name, {"type": "function", "function": {"name": name, "description": text, "parameters": {}}}
        ),
        st.sampled_from(["bash", "read"]),
        CLEAN,
    ),
    max_size=2,
)
NAMES = [*CHATML_FAMILY, "tiny", "role_stop", "llama"]


def stock(message: Message) -> dict[str, Any]:
    """What a careful user of transformers would pass."""
    result: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in message.tool_calls
        ]
    return result


def end_of(
    renderer: TemplateRenderer, prompt: Any, text: str, tools: Any = (BASH,), reason: Any = "stop"
) -> PathEnd:
    ids = ids_of(renderer, text)
    _, reply = parse(renderer, ids, tools, prompt_tail=prompt[-64:])
    return PathEnd(prompt[-64:], ids, reply.message, reason)


def bridged(renderer: TemplateRenderer, end: PathEnd, new: list[Message], tools: Any = (BASH,)) -> str:
    result = renderer.bridge(end, new, list(tools))
    assert isinstance(result, Bridge), result
    return renderer.decode(result.context_ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversation=CONVERSATION, tools=TOOLS)
def test_a_clean_conversation_renders_as_transformers_renders_it(
    renderer: Make, folders: dict[str, Path], name: str, conversation: list[Message], tools: list[Tool]
) -> None:
    subject = renderer(name)
    reference = PreTrainedTokenizerFast.from_pretrained(str(folders[name]))
    arguments: dict[str, Any] = {
        "tools": [dict(tool.spec) for tool in tools] or None,
        "add_generation_prompt": True,
    }
    try:
        expected = reference.apply_chat_template(
            [stock(message) for message in conversation], return_dict=False, **arguments
        )
    except TemplateError:
        assert subject.render(conversation, tools).rewritten == {"system_as_user"}
        return
    assert subject.render(conversation, tools).ids.tolist() == expected


@pytest.mark.parametrize("name", ["hermes", "reorders", "ascii", "role_stop"])
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=ASSISTANT, after=AFTER)
def test_a_bridge_is_the_difference_of_two_full_renders_where_the_template_only_appends(
    renderer: Make, name: str, reply: Message, after: list[Message]
) -> None:
    assume(name != "role_stop" or after[0].role != "system")  # <|system|> ends no turn of that model
    subject = renderer(name)
    reply = Message("assistant", reply.content, tool_calls=reply.tool_calls)
    prompt = subject.render([USER], [BASH]).ids
    whole = subject.render([USER, reply, *after], [BASH]).ids
    closed = subject.decode(whole)[len(subject.decode(prompt)) :]
    end = "<|observation|>" if after[0].role == "tool" else f"<|{after[0].role}|>"
    if name != "role_stop":
        end = "<|im_end|>"
    written = closed[: closed.index(end) + len(end)]
    completion = ids_of(subject, written)
    result = subject.bridge(PathEnd(prompt[-64:], completion, reply, "stop"), after, [BASH])
    assert isinstance(result, Bridge)
    assert prompt.tolist() + completion.tolist() + result.context_ids.tolist() == whole.tolist()


@pytest.mark.parametrize("name", [*CHATML_FAMILY, "tiny"])
def test_thinking_trimming_and_reordering_do_not_break_a_kept_path(renderer: Make, name: str) -> None:
    subject = renderer(name)
    prompt = subject.render([USER], [BASH]).ids
    opened = "" if name == "opens_thinking" else "<think>\n"
    end = end_of(
        subject,
        prompt,
        opened
        + "Hm.\n</think>\n\n Look. \n"
        + '<tool_call>\n{"name":"bash","arguments":{"b":1,"a":2}}\n</tool_call><|im_end|>',
    )
    assert bridged(subject, end, [Message("tool", "out")]) == (
        "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        + ("<think>\n" if name == "opens_thinking" else "")
    )
    text = bridged(subject, end, [Message("user", "And now?")])
    assert text.startswith("\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")


def test_the_close_is_added_where_the_completion_has_none(renderer: Make) -> None:
    subject = renderer("qwen3")
    prompt = subject.render([USER], [BASH]).ids
    go = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    new = [Message("user", "go")]
    cut = end_of(subject, prompt, "Half an ans", reason="length")
    assert bridged(subject, cut, new) == "<|im_end|>\n" + go
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    assert bridged(subject, end_of(subject, prompt, call, reason="abort"), new) == "<|im_end|>\n" + go


def test_open_thinking_is_closed_before_the_turn(renderer: Make) -> None:
    close = "\n</think>\n\n<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    new = [Message("user", "go")]
    subject = renderer("qwen3")
    prompt = subject.render([USER], [BASH]).ids
    assert bridged(subject, end_of(subject, prompt, "<think>\nI was", reason="length"), new) == close
    opens = renderer("opens_thinking")
    prompt = opens.render([USER], [BASH]).ids
    assert bridged(opens, end_of(opens, prompt, "I was", reason="length"), new) == close + "<think>\n"
    assert bridged(opens, end_of(opens, prompt, "", reason="abort"), new) == close + "<think>\n"


def test_a_turn_that_stopped_inside_thinking_goes_on_behind_its_stop_token(renderer: Make) -> None:
    subject = renderer("qwen3")
    prompt = subject.render([USER], [BASH]).ids
    end = end_of(subject, prompt, "<think>\nI was<|im_end|>")
    assert bridged(subject, end, [Message("user", "go")]).startswith("\n<|im_start|>user\ngo")


def test_a_completion_of_only_the_end_of_turn_continues(renderer: Make) -> None:
    subject = renderer("tiny")
    end = end_of(subject, subject.render([USER], []).ids, "<|im_end|>", ())
    assert bridged(subject, end, [Message("user", "go")], ()) == (
        "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_role_token_that_ended_the_turn_is_not_written_again(renderer: Make) -> None:
    subject = renderer("role_stop")
    prompt = subject.render([USER], [BASH]).ids
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    end = end_of(subject, prompt, call + "<|observation|>")
    assert bridged(subject, end, [Message("tool", "out")]) == (
        "\n<tool_response>\nout\n</tool_response><|assistant|>\n"
    )
    result = subject.bridge(end, [Message("user", "go")], [BASH])
    assert isinstance(result, CannotBridge)
    assert result.reason == "renderer_cannot_continue"
    unclosed = end_of(subject, prompt, call, reason="length")
    assert bridged(subject, unclosed, [Message("user", "go")]) == "<|user|>\ngo<|assistant|>\n"


def test_an_end_token_that_is_not_the_templates_is_followed_by_its_close(renderer: Make) -> None:
    """The close of this template is empty: the next role's token ends the turn. More cases: test_close.py."""
    subject = renderer("role_stop")
    end = end_of(subject, subject.render([USER], []).ids, "Done.<|endoftext|>", ())
    assert bridged(subject, end, [Message("user", "go")], ()) == "<|user|>\ngo<|assistant|>\n"


def test_the_template_policy_breaks_where_the_stock_template_drops_thinking(renderer: Make) -> None:
    subject = renderer("qwen3", thinking_history="template")
    prompt = subject.render([USER], [BASH]).ids
    call = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call><|im_end|>'
    thought = end_of(subject, prompt, "<think>\nHm.\n</think>\n\n" + call)
    plain = end_of(subject, prompt, call)
    dropped = subject.bridge(thought, [Message("user", "go")], [BASH])
    assert isinstance(dropped, CannotBridge)
    assert dropped.reason == "thinking_stripped"
    assert isinstance(subject.bridge(thought, [Message("tool", "out")], [BASH]), Bridge)
    assert isinstance(
        subject.bridge(replace(plain, earlier_thinking=False), [Message("user", "go")], [BASH]), Bridge
    )
    unknown = subject.bridge(plain, [Message("user", "go")], [BASH])
    assert isinstance(unknown, CannotBridge)  # a turn above may have thought; the stock template would drop it
    keep = renderer("qwen3")
    assert isinstance(keep.bridge(thought, [Message("user", "go")], [BASH]), Bridge)
    assert keep.template_hash != subject.template_hash


@pytest.mark.slow
def test_reasoning_goes_where_the_template_reads_it(tiny_model: Path, tmp_path: Path) -> None:
    template = (tiny_model / "chat_template.jinja").read_text().replace("reasoning_content", "thinking")
    built = create_renderer(make_folder(tiny_model, tmp_path / "model", template), RenderingSettings())
    said = [USER, Message("assistant", "a", reasoning="because"), Message("tool", "out")]
    assert "<think>\nbecause\n</think>" in built.decode(built.render(said, []).ids)


def test_new_messages_of_every_role_are_appended_in_place(renderer: Make) -> None:
    subject = renderer("qwen3")
    end = end_of(subject, subject.render([USER], [BASH]).ids, "Yes.<|im_end|>")
    new = [
        Message("developer", "Be brief."),
        Message("user", "a"),
        Message("user", "b"),
        Message("assistant", "c", tool_calls=(ToolCall("bash", '{"x":1}', "id"),)),
        Message("tool", "d"),
        Message("assistant", "e"),
    ]
    assert bridged(subject, end, new) == (
        "\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n"
        '<|im_start|>assistant\nc\n<tool_call>\n{"name": "bash", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nd\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\ne<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_system_message_that_ends_like_a_control_token_is_appended_too(renderer: Make) -> None:
    subject = renderer("hermes")
    end = end_of(subject, subject.render([USER], []).ids, "Yes.<|im_end|>", ())
    text = bridged(subject, end, [Message("system", " Be <|im_ "), Message("system", "brief <")], ())
    assert text.startswith("\n<|im_start|>system\n Be <|im_ <|im_end|>\n<|im_start|>system\nbrief <<|im_end|>\n")


def test_arguments_nested_too_deeply_are_text_and_such_a_tool_is_refused(renderer: Make) -> None:
    subject = renderer("hermes")
    call = ToolCall("bash", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert "[[[" in subject.decode(subject.render([USER, Message("assistant", tool_calls=(call,)), USER], []).ids)
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        subject.render([USER], [Tool("bash", {"function": {"name": "bash", "x": nested}})])


@pytest.mark.parametrize("name", ["opens_thinking", "hoists"])
def test_a_system_message_in_the_middle_is_never_moved(renderer: Make, name: str) -> None:
    subject = renderer(name)
    end = end_of(subject, subject.render([USER], []).ids, "Yes.<|im_end|>", ())
    result = subject.bridge(end, [Message("system", "Be brief."), USER], [])
    assert isinstance(result, Bridge)
    assert result.rewritten == {"system_as_user"}
    assert "user\n<system>\nBe brief.\n</system><|im_end|>" in subject.decode(result.context_ids)


@pytest.mark.slow
def test_what_a_template_refuses_is_an_invalid_request_with_its_words(
    renderer: Make, tiny_model: Path, tmp_path: Path
) -> None:
    shows = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
    refuses = "{% if tools and messages[0].content == 'No.' %}{{ raise_exception('Not with tools.') }}{% endif %}"
    folder = make_folder(tiny_model, tmp_path / "refuses", refuses + shows)
    with pytest.raises(InvalidRequest, match="Not with tools"):
        create_renderer(folder, RenderingSettings()).render([Message("user", "No.")], [BASH])
    with pytest.raises(InvalidRequest, match="at least one message"):
        renderer("qwen3").render([], [])


def test_a_bridge_tokenizes_only_the_new_text(renderer: Make) -> None:
    subject = renderer("tiny")
    sizes = []
    for turns in (1, 200):
        history = [message for _ in range(turns) for message in (USER, Message("assistant", "word " * 50))]
        prompt = subject.render([*history, USER], [BASH]).ids
        result = subject.bridge(end_of(subject, prompt, "Ok.<|im_end|>"), [Message("user", "é" * 10)], [BASH])
        assert isinstance(result, Bridge)
        sizes.append(result.tokenized_bytes)
    assert sizes[0] == sizes[1]
    assert sizes[0] == len(("\n<|im_start|>user\n" + "é" * 10 + "<|im_end|>\n<|im_start|>assistant\n").encode())


def test_a_bridge_does_not_pay_for_tools_that_its_text_does_not_depend_on(renderer: Make) -> None:
    subject = renderer("qwen3")
    assert not subject._synthetic.needs_tools
    end = end_of(subject, subject.render([USER], [BASH]).ids, "Ok.<|im_end|>")
    assert bridged(subject, end, [USER], ()) == bridged(subject, end, [USER], (BASH,))


@pytest.mark.slow
def test_template_options_and_bos_are_the_templates_own(renderer: Make) -> None:
    off = renderer("qwen3", template_kwargs={"enable_thinking": False})
    assert off.decode(off.render([USER], []).ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert off.template_hash != renderer("qwen3").template_hash
    llama = renderer("llama")
    ids = llama.render([USER], []).ids.tolist()
    assert llama.decode(ids).count("<|begin_of_text|>") == 1


def test_stop_tokens_are_those_of_the_folder_and_of_the_template(renderer: Make) -> None:
    for name, texts in {
        "tiny": ["<|im_end|>"],
        "llama": ["<|eot_id|>"],
        "role_stop": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    }.items():
        subject = renderer(name)
        assert [subject.decode([index]) for index in subject.stop_token_ids] == texts


def test_one_renderer_serves_many_threads(renderer: Make) -> None:
    subject = renderer("qwen3")
    calls = [[USER, Message("assistant", f"a{i} <|im_end|>"), Message("user", f"{i} <think>")] for i in range(64)]
    alone = [subject.render(call, [BASH]).ids.tolist() for call in calls]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda call: subject.render(call, [BASH]).ids.tolist(), calls * 4))
    assert together == alone * 4


def test_ids_are_int32_and_inside_the_vocabulary(renderer: Make) -> None:
    rendered = renderer("tiny").render([USER], [BASH])
    assert rendered.ids.dtype == np.int32
    assert int(rendered.ids.max()) < renderer("tiny").vocab_size
