"""The chat format of a model folder, read off the parts that the server renders with."""

from __future__ import annotations

from turnstile.models import Message
from turnstile_server.engines.scene import ChatFormat
from turnstile_server.errors import StartupError
from turnstile_server.rendering.conventions import find_tags, speaks_hermes
from turnstile_server.rendering.protocol import Renderer
from turnstile_server.rendering.vocabulary import Vocabulary


def chat_format(vocabulary: Vocabulary, renderer: Renderer) -> ChatFormat:
    """Raises StartupError for a model whose calls a policy cannot write."""
    if not speaks_hermes(vocabulary.chat_templates.values()):
        raise StartupError(
            "a scripted policy writes tool calls as JSON between <tool_call> tags; the chat template in "
            f"{vocabulary.path} has another form (Qwen3's has this one; only tokenizer and template are needed)"
        )
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
