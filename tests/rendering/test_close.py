"""How a turn is closed before the next message, whatever token ended it: every kind of ending.

A model may have several end tokens (``eos_token_id`` of generation_config.json is a list for Qwen, Llama and
others), and its chat template closes a turn with one of them. A completion that ends with another one is followed
by the template's close, as context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML_FAMILY, LLAMA, OPENS_THINKING, QWEN3, ROLE_STOP
from rendering_models import BASH, LLAMA_TOKENS, ROLE_TOKENS, USER, ids_of, make_folder, parse

from turnstile.models import Message, Tool
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd, Renderer
from turnstile_server.settings import RenderingSettings

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
GO = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
RESULT = "<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
USER_GO, TOOL_OUT = [Message("user", "go")], [Message("tool", "out")]

Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """``folder(template, stops, …)``: a model folder whose generation config names these end tokens."""

    def make(template: str, stops: Sequence[str | int], **options: Any) -> Path:
        made = make_folder(tiny_model, tmp_path_factory.mktemp("model") / "model", template, **options)
        added = json.loads((made / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        named = [ids[stop] if isinstance(stop, str) else stop for stop in stops]
        (made / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        return made

    return make


def ending(
    renderer: Renderer, completion: Any, *, reason: Any = "stop", tools: Sequence[Tool] = (BASH,)
) -> PathEnd:
    """The end of a path that was sampled as ``completion`` (text with control tokens, or ids)."""
    prompt = renderer.render([USER], tools).ids[-64:]
    ids = ids_of(renderer, completion) if isinstance(completion, str) else np.array(completion, np.int32)
    return PathEnd(prompt, ids, parse(renderer, ids, tools, prompt_tail=prompt)[1].message, reason)


def context(renderer: Renderer, completion: Any, new: list[Message], **options: Any) -> str:
    """The text of ``context_ids``; its ids are checked to be those of the text."""
    result = renderer.bridge(ending(renderer, completion, **options), new, options.get("tools", (BASH,)))
    assert isinstance(result, Bridge), result
    text = renderer.decode(result.context_ids)
    assert result.context_ids.tolist() == ids_of(renderer, text).tolist()
    return text


@pytest.fixture(scope="module")
def qwen(folder: Folder) -> Renderer:
    """Qwen3 with both of its end tokens."""
    return create_renderer(folder(QWEN3, ["<|im_end|>", "<|endoftext|>"]), RenderingSettings())


@pytest.mark.parametrize(
    ("completion", "new", "expected"),
    [
        ("Yes.", USER_GO, GO),
        ("", USER_GO, GO),
        ("<think>\nHm.\n</think>\n\nYes.", USER_GO, GO),
        (CALL, TOOL_OUT, RESULT),
        (f"<think>\nHm.\n</think>\n\nLook.\n{CALL}", TOOL_OUT, RESULT),
        (f"{CALL}\n{CALL}", TOOL_OUT, RESULT),
        ('<tool_call>\n{"name', USER_GO, GO),
    ],
)
def test_another_end_token_is_followed_by_the_templates_close(
    qwen: Renderer, completion: str, new: list[Message], expected: str
) -> None:
    assert context(qwen, f"{completion}<|endoftext|>", new) == f"<|im_end|>\n{expected}"
    # The template's own end token, and a completion that was cut: as before.
    assert context(qwen, f"{completion}<|im_end|>", new) == f"\n{expected}"
    assert context(qwen, completion, new, reason="length") == f"<|im_end|>\n{expected}"


def test_another_end_token_inside_thinking_closes_the_thinking_too(qwen: Renderer) -> None:
    text = context(qwen, "<think>\nI was<|endoftext|>", USER_GO)
    assert text.replace("\n", "") == f"</think><|im_end|>{GO}".replace("\n", "")
    assert context(qwen, "<think>\nI was", USER_GO, reason="length") == text


def test_the_templates_own_end_token_inside_thinking_is_not_repeated(qwen: Renderer) -> None:
    assert context(qwen, "<think>\nI was<|im_end|>", USER_GO) == f"\n{GO}"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHATML_FAMILY))
def test_every_template_writes_its_close_behind_another_end_token(folder: Folder, name: str) -> None:
    subject = create_renderer(folder(CHATML_FAMILY[name], ["<|im_end|>", "<|endoftext|>"]), RenderingSettings())
    thought = "I was" if name == "opens_thinking" else "<think>\nI was"
    for completion, new in (("</think>Yes.", USER_GO), (f"</think>{CALL}", TOOL_OUT), (thought, USER_GO)):
        cut = context(subject, completion, new, reason="length")
        assert context(subject, f"{completion}<|endoftext|>", new) == cut
        assert context(subject, f"{completion}<|im_end|>", new) == cut.partition("<|im_end|>")[2]


@pytest.mark.slow
def test_a_prompt_that_opens_thinking(folder: Folder) -> None:
    subject = create_renderer(folder(OPENS_THINKING, ["<|im_end|>", "<|endoftext|>"]), RenderingSettings())
    assert context(subject, "I was<|endoftext|>", USER_GO) == f"\n</think>\n\n<|im_end|>\n{GO}<think>\n"
    assert context(subject, "Hm.\n</think>\n\nYes.<|endoftext|>", USER_GO) == f"<|im_end|>\n{GO}<think>\n"


@pytest.mark.slow
def test_an_end_token_that_only_the_generation_config_knows(folder: Folder) -> None:
    """The id is an ordinary token, or the tokenizer does not know it at all."""
    plain = 65
    made = folder(QWEN3, ["<|im_end|>", plain, 100_000])
    subject = create_renderer(made, RenderingSettings())
    for last in (plain, 100_000):
        assert context(subject, [*ids_of(subject, "Yes."), last], USER_GO) == f"<|im_end|>\n{GO}"


@pytest.mark.slow
def test_an_end_token_that_the_folder_does_not_name(folder: Folder) -> None:
    """The engine stopped by its own configuration."""
    subject = create_renderer(folder(QWEN3, ["<|im_end|>"]), RenderingSettings())
    assert context(subject, "Yes.<|endoftext|>", USER_GO) == f"<|im_end|>\n{GO}"


@pytest.mark.parametrize("cut", ["a stop string", "length", "abort"])
def test_a_completion_without_an_end_token_is_closed(qwen: Renderer, cut: str) -> None:
    reason = cut if cut in ("length", "abort") else "stop"
    assert context(qwen, "Yes. STOP", USER_GO, reason=reason) == f"<|im_end|>\n{GO}"


def test_a_call_tag_that_length_cut_is_not_taken_for_the_close(qwen: Renderer) -> None:
    assert context(qwen, CALL, TOOL_OUT, reason="length") == f"<|im_end|>\n{RESULT}"
    text = context(qwen, f"{CALL}\n<tool_call>", TOOL_OUT, reason="length")
    assert text == f"<|im_end|>\n{RESULT}"


@pytest.mark.slow
def test_a_call_tag_that_is_an_end_token_is_closed_too(folder: Folder) -> None:
    subject = create_renderer(folder(QWEN3, ["<|im_end|>", "</tool_call>", "<tool_call>"]), RenderingSettings())
    assert context(subject, CALL, TOOL_OUT) == f"<|im_end|>\n{RESULT}"
    assert context(subject, f"{CALL}\n<tool_call>", TOOL_OUT) == f"<|im_end|>\n{RESULT}"


@pytest.mark.slow
def test_llama_with_its_three_end_tokens(folder: Folder) -> None:
    tokens = [*LLAMA_TOKENS, "<|end_of_text|>", "<|eom_id|>"]
    made = folder(
        LLAMA,
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        added=tokens,
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    )
    subject = create_renderer(made, RenderingSettings())
    go = (
        "<|start_header_id|>user<|end_header_id|>\n\ngo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert context(subject, "Yes.<|eot_id|>", USER_GO, tools=()) == go
    for other in ("<|end_of_text|>", "<|eom_id|>"):
        assert context(subject, f"Yes.{other}", USER_GO, tools=()) == f"<|eot_id|>{go}"


ROLE_STOPS = ["<|endoftext|>", "<|user|>", "<|observation|>"]


@pytest.mark.slow
def test_a_template_without_a_close_goes_on_with_the_next_role(folder: Folder) -> None:
    subject = create_renderer(
        folder(ROLE_STOP, ROLE_STOPS, added=ROLE_TOKENS, eos="<|endoftext|>"), RenderingSettings()
    )
    go = "\ngo<|assistant|>\n"
    assert context(subject, "Yes.<|user|>", USER_GO) == go
    assert context(subject, "Yes.<|endoftext|>", USER_GO) == f"<|user|>{go}"
    assert context(subject, f"{CALL}<|endoftext|>", TOOL_OUT).startswith("<|observation|>\n<tool_response>")
    # A token that opens another role's message is no end token: an empty message would stand there.
    other = subject.bridge(ending(subject, "Yes.<|observation|>"), USER_GO, [BASH])
    assert isinstance(other, CannotBridge)


@pytest.mark.slow
def test_the_template_policy_breaks_only_where_thinking_would_be_dropped(folder: Folder) -> None:
    made = folder(QWEN3, ["<|im_end|>", "<|endoftext|>"])
    subject = create_renderer(made, RenderingSettings(thinking_history="template"))
    thought = f"<think>\nHm.\n</think>\n\n{CALL}<|endoftext|>"
    assert context(subject, thought, TOOL_OUT) == f"<|im_end|>\n{RESULT}"
    dropped = subject.bridge(ending(subject, thought), USER_GO, [BASH])
    assert isinstance(dropped, CannotBridge)
    assert dropped.reason == "thinking_stripped"


@pytest.mark.slow
def test_a_template_that_does_not_show_a_replys_text_is_not_closed_by_its_own_beginning(folder: Folder) -> None:
    """The end token is the template's BOS too: what stands behind that is the conversation, not the close."""
    template = (
        "{{- '<|endoftext|>' }}{%- for message in messages %}{%- if message.role == 'user' %}"
        "{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    subject = create_renderer(folder(template, ["<|im_end|>", "<|endoftext|>"]), RenderingSettings())
    assert isinstance(subject.bridge(ending(subject, "Yes.<|endoftext|>", tools=()), USER_GO, []), CannotBridge)
