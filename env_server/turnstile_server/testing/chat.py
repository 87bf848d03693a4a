"""The chat format of a model folder, read off the parts that the server renders with."""

from __future__ import annotations

from turnstile.models import Message, Tool
from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.conventions import find_tags, speaks_hermes
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.testing.policy import ChatFormat

INSTEAD = (
    "Take any Qwen3 (its tokenizer and chat template are enough), or the folder that "
    "`python examples/make_tiny_model.py DIR` makes"
)
PROBE = Tool(
    name="probe",
    spec={
        "type": "function",
        "function": {
            "name": "probe",
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
)
"""Shown to a template once, to see whether it can be read off the prompt again."""


def chat_format(vocabulary: Vocabulary, renderer: Renderer) -> ChatFormat:
    """Raises StartupError for a model whose tools a policy cannot read, or whose calls it cannot write."""
    if not speaks_hermes(vocabulary.chat_templates.values()):
        raise StartupError(
            "a scripted policy writes tool calls as JSON between <tool_call> tags; the chat template of "
            f"{vocabulary.path} has another form. {INSTEAD}"
        )
    chat = _format(vocabulary, renderer)
    try:
        shown = chat.read(renderer.render([Message(role="user", content="x")], [PROBE]).ids.tolist()).tools
    except InvalidRequest as error:
        raise StartupError(f"the chat template of {vocabulary.path} shows no tools: {error.message}") from error
    if shown != {PROBE.name: PROBE.spec["function"]}:
        raise StartupError(
            "a scripted policy reads the tools as JSON, one a line, between <tools> tags; the chat template of "
            f"{vocabulary.path} shows them in another form. {INSTEAD}"
        )
    return chat


def _format(vocabulary: Vocabulary, renderer: Renderer) -> ChatFormat:
    think = find_tags(vocabulary, calls=True).think
    try:
        return ChatFormat(
            renderer.decode,
            lambda text: renderer.encode_completion(text).tolist(),
            prompt=renderer.render([Message(role="user", content="x")], []).ids.tolist(),
            control={token.text: token.id for token in vocabulary.control},
            thinking=None if think is None else (think[0].text, think[1].text),
        )
    except ValueError as error:
        raise StartupError(f"{vocabulary.path}: {error}") from error
