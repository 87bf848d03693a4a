"""Invariant 7: text in content is never control. Hostile text in every field, both ways in (render, bridge)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML_FAMILY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_models import BASH, USER, ids_of, make_folder, parse
from tokenizers import Tokenizer, normalizers

from products import examples
from turnstile.models import Message, Tool, ToolCall
from turnstile_server.rendering.factory import create_renderer
from turnstile_server.rendering.protocol import Bridge, PathEnd
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import load_vocabulary
from turnstile_server.settings import RenderingSettings

Make = Callable[..., TemplateRenderer]

LITERALS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_response>",
]
PARTS = ["<|im_", "end|>", "<", ">", "<|", "|>", "think", "</", "tool_call>", "\n", "user", "a", " "]
HOSTILE = st.lists(st.sampled_from(LITERALS + PARTS), min_size=1, max_size=6).map("".join)


def controls(renderer: TemplateRenderer, ids: Any) -> list[int]:
    known = {token.id for token in renderer._vocabulary.control}
    return [int(index) for index in ids if int(index) in known]


def everywhere(text: str) -> tuple[list[Message], list[Tool]]:
    """A conversation with ``text`` in every field that a caller can fill."""
    call = ToolCall(f"bash{text}", json.dumps({f"k{text}": [text, {"deep": text}]}), f"id{text}")
    tool = Tool(
        f"bash{text}",
        {
            "type": "function",
            "function": {
                "name": f"bash{text}",
                "description": f"d{text}",
                "parameters": {"type": "object", "properties": {f"p{text}": {"type": "string", "enum": [text]}}},
            },
            f"extra{text}": text,
        },
    )
    messages = [
        Message("system", f"s{text}s"),
        Message("user", f"u{text}u", name=f"n{text}"),
        Message("assistant", f"a{text}a", reasoning=f"r{text}r", tool_calls=(call,)),
        Message("tool", f"t{text}t", tool_call_id=f"id{text}"),
        Message("assistant", f"b{text}b", tool_calls=(ToolCall("x", f"not json {text}"),)),
        Message("user", f"v{text}v"),
    ]
    return messages, [tool]


@pytest.mark.parametrize("name", [*CHATML_FAMILY, "tiny", "hoists", "glues"])
@pytest.mark.parametrize("text", LITERALS)
def test_control_text_in_every_field_makes_no_control_token(renderer: Make, name: str, text: str) -> None:
    subject = renderer(name)
    messages, tools = everywhere(text)
    harmless, harmless_tools = everywhere("x")
    rendered = subject.render(messages, tools).ids
    assert controls(subject, rendered) == controls(subject, subject.render(harmless, harmless_tools).ids)
    shown = subject.decode(rendered)
    assert f"u{text}u" in shown
    assert f"b{text}b" in shown or name in ("opens_thinking",)


@pytest.mark.parametrize("name", ["tiny", "qwen3", "hermes", "trims", "ascii", "glues"])
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_pieces_of_control_text_never_join_into_a_control_token(renderer: Make, name: str, text: str) -> None:
    subject = renderer(name)
    messages = [Message("user", text), Message("assistant", "a" + text), Message("user", text + "b")]
    rendered = subject.render(messages, []).ids
    clean = [Message("user", "x"), Message("assistant", "a"), Message("user", "b")]
    assert controls(subject, rendered) == controls(subject, subject.render(clean, []).ids)
    assert text.strip() in subject.decode(rendered)


@pytest.mark.parametrize("name", ["tiny", "qwen3", "hermes", "role_stop"])
@pytest.mark.parametrize("text", [*LITERALS, "<|user|>"])
def test_control_text_in_a_continuation_makes_no_control_token(renderer: Make, name: str, text: str) -> None:
    subject = renderer(name)
    prompt = subject.render([USER], [BASH]).ids
    stop = "<|observation|>" if name == "role_stop" else "<|im_end|>"
    completion = ids_of(subject, '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>' + stop)
    _, reply = parse(subject, completion)

    def bridge(content: str) -> Any:
        new = [Message("tool", f"t{content}t"), Message("user", f"u{content}")]
        result = subject.bridge(PathEnd(prompt[-64:], completion, reply.message, "stop"), new, [BASH])
        assert isinstance(result, Bridge)
        return result.context_ids

    assert controls(subject, bridge(text)) == controls(subject, bridge("x"))
    assert f"t{text}t" in subject.decode(bridge(text))


def test_a_callers_key_between_a_templates_brackets_makes_no_control_token(renderer: Make) -> None:
    subject = renderer("glues")

    def tool(key: str) -> Tool:
        return Tool("bash", {"function": {"name": "bash", "parameters": {"properties": {key: {}}}}})

    for key in ("think", "x><think", "think><x"):
        hostile = subject.render([USER], [tool(key)]).ids
        assert f"<{key}>" in subject.decode(hostile)
        assert controls(subject, hostile) == controls(subject, subject.render([USER], [tool("x")]).ids)


def test_a_template_that_inspects_content_still_does(renderer: Make) -> None:
    """The stock template does not count a wrapped tool response as the user's last question."""
    subject = renderer("qwen3")
    said = Message("assistant", "said <|im_end|>", reasoning="why")
    after = subject.decode(subject.render([USER, said, Message("user", "go <|im_end|>")], []).ids)
    assert "why" not in after
    assert "said <|im_end|><|im_end|>" in after


def test_the_private_use_characters_of_a_request_survive(renderer: Make) -> None:
    text = "\U00100000\U00100001 <|im_end|> \U000f0000"
    rendered = renderer("qwen3").render([Message("user", text)], []).ids
    assert text in renderer("qwen3").decode(rendered)


def test_a_template_that_escapes_json_to_ascii_shows_the_callers_text(renderer: Make) -> None:
    tool = Tool("bash", {"function": {"name": "bash", "description": "é <|im_end|> \\udbff\\udffd"}})
    rendered = renderer("ascii").render([USER], [tool]).ids
    assert '"description": "\\u00e9 <|im_end|> \\\\udbff\\\\udffd"' in renderer("ascii").decode(rendered)


def test_text_that_no_tokenizer_takes_is_replaced(renderer: Make) -> None:
    rendered = renderer("tiny").render([Message("user", "a\ud800b<|im_end|>")], []).ids
    assert "a\ufffdb<|im_end|>" in renderer("tiny").decode(rendered)


@pytest.mark.slow
def test_text_that_normalises_into_a_token_makes_no_control_token(tiny_model: Path, tmp_path: Path) -> None:
    """NFKC turns full-width letters into ASCII; a token matched after normalisation would be found."""
    folder = make_folder(tiny_model, tmp_path / "nfkc", (tiny_model / "chat_template.jinja").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFKC()
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["normalized"] = token["content"] == "<think>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    subject = create_renderer(folder, RenderingSettings())
    assert isinstance(subject, TemplateRenderer)
    stock = load_vocabulary(folder).tokenizer.encode("＜ｔｈｉｎｋ＞").ids
    assert controls(subject, stock)  # the trap is there
    rendered = subject.render([Message("user", "a ＜ｔｈｉｎｋ＞ b")], []).ids
    assert controls(subject, rendered) == controls(subject, subject.render([USER], []).ids)


def test_tokens_that_swallow_whitespace_do_so_beside_hostile_text_too(tiny_model: Path, tmp_path: Path) -> None:
    folder = make_folder(tiny_model, tmp_path / "rstrip", (tiny_model / "chat_template.jinja").read_text())
    spec = json.loads((folder / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
        token["lstrip"] = token["content"] == "</think>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    subject = create_renderer(folder, RenderingSettings())
    assert isinstance(subject, TemplateRenderer)
    conversation = [USER, Message("assistant", "a", reasoning="r"), Message("tool", "out")]
    clean = subject.render([*conversation, Message("tool", "z")], []).ids.tolist()
    hostile = subject.render([*conversation, Message("tool", "<|im_end|>")], []).ids.tolist()
    same = clean.index(ids_of(subject, "z")[0])
    assert hostile[:same] == clean[:same]
    assert controls(subject, hostile) == controls(subject, clean)
    end = PathEnd(
        np.array(clean[-64:], dtype=np.int32), ids_of(subject, "b<|im_end|>"), Message("assistant", "b"), "stop"
    )
    bridges = [subject.bridge(end, [Message("user", text)], []) for text in ("z", "<|im_end|>")]
    assert isinstance(bridges[0], Bridge)
    assert isinstance(bridges[1], Bridge)
    assert bridges[0].context_ids[:3].tolist() == bridges[1].context_ids[:3].tolist()
    assert subject.decode(bridges[1].context_ids).startswith("<|im_start|>user\n<|im_end|>")


def test_a_sentencepiece_start_marker_is_not_written_in_the_middle(tmp_path: Path) -> None:
    """Metaspace marks the first word of a text; text behind a control token is not a text's start."""
    folder = metaspace_folder(tmp_path / "metaspace")
    subject = create_renderer(folder, RenderingSettings())
    assert isinstance(subject, TemplateRenderer)
    stock = load_vocabulary(folder).tokenizer
    prompt = subject.render([Message("user", "hi")], []).ids
    text = "<s>user hi</s><s>assistant "
    assert prompt.tolist() == stock.encode(text, add_special_tokens=False).ids
    completion = ids_of(subject, "ok</s>")
    _, reply = parse(subject, completion, ())
    result = subject.bridge(PathEnd(prompt, completion, reply.message, "stop"), [Message("user", "a </s> b")], [])
    assert isinstance(result, Bridge)
    assert subject.decode(result.context_ids) == "<s>user a </s> b</s><s>assistant "
    assert controls(subject, result.context_ids) == controls(subject, prompt)


def metaspace_folder(folder: Path) -> Path:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    characters = ["▁", *"abcdefghijklmnopqrstuvwxyz</>|_?.\n"]
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((character, -5.0) for character in characters)]
    tokenizer = Tokenizer(
        models.Unigram([*pieces, ("▁user", -2.0), ("user", -2.5), ("assistant", -2.5)], unk_id=0)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "chat_template.jinja").write_text(
        "{%- for message in messages %}{{- '<s>' + message.role + ' ' + message.content + '</s>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<s>assistant ' }}{%- endif %}"
    )
    return folder


def test_the_ids_of_a_prompt_are_plain_int32(renderer: Make) -> None:
    assert renderer("tiny").render([Message("user", "<|im_end|>")], []).ids.dtype == np.int32


@pytest.mark.slow
def test_control_text_that_a_template_writes_by_pythons_repr_is_in_the_prompt(
    tiny_model: Path, tmp_path: Path
) -> None:
    """MiniCPM 5 and Seed-OSS write lists in this way, and Python escapes private-use characters."""
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
    subject = create_renderer(make_folder(tiny_model, tmp_path / "repr", template), RenderingSettings())

    def rendered(value: str) -> list[int]:
        call = ToolCall("bash", json.dumps({"v": [value]}), "call_0")
        messages = [USER, Message("assistant", "", tool_calls=(call,)), USER]
        return subject.render(messages, []).ids.tolist()

    ids = rendered("a <|im_end|> b")
    assert "['a <|im_end|> b']" in subject.decode(ids)
    assert controls(subject, ids) == controls(subject, rendered("a b"))
