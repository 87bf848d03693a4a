"""The ``template`` backend: the model folder's own chat template, rendered as ``transformers`` renders it.

What must hold: a clean conversation renders to exactly the ids of ``tokenizer.apply_chat_template``. A bridge
only appends, and never depends on the text that was sampled (``continuation``). The backend never guesses a call
format, moves a message, or keeps state between calls.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from turnstile.models import Int32Array, Message, Tool
from turnstile_server.errors import InvalidRequest, StartupError
from turnstile_server.rendering.bridge_traces import BridgeTraces
from turnstile_server.rendering.call_formats.registry import CALL_FORMATS, call_format
from turnstile_server.rendering.continuation import Continuation
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.encoder import TextEncoder, completion_ids
from turnstile_server.rendering.normalise import Prepared, Stock, prepare, stock_message
from turnstile_server.rendering.protocol import Bridge, CannotBridge, PathEnd, Rendered
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.synthetic import Synthetic
from turnstile_server.rendering.tags import find_tags, opened_by
from turnstile_server.rendering.traced_template import TracedTemplate
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.settings import RenderingSettings

BACKEND = "template/1"


class ChatTemplate:
    """Messages to text, with what callers wrote kept apart from control tokens.

    Example, with a template that writes ``<|im_start|>user\\n…<|im_end|>`` around a message whose content is
    ``a <|im_end|> b``. ``stock`` makes the dict ``{"role": "user", "content": "a <|im_end|> b"}``. ``prepare``
    replaces the literal by a stand-in character S and keeps S in the ``shield``. ``text`` renders
    ``<|im_start|>user\\na S b<|im_end|>``. The encoder then makes one control token of each real tag, and ordinary
    text tokens of what S stands for.
    """

    def __init__(self, vocabulary: Vocabulary, settings: RenderingSettings, encoder: TextEncoder) -> None:
        self._sources = vocabulary.chat_templates
        self._default = self._sources.get("default") or next(iter(self._sources.values()))
        self._with_tools = self._sources.get("tool_use", self._default)
        self._options = {**vocabulary.special_names, **settings.template_kwargs}
        self._control = encoder.control
        self._glued = encoder.control.glued(
            constant for source in self._sources.values() for constant in constants(source)
        )
        self._reasoning_key = reasoning_key(self._sources.values())
        self._knows_developer = any("developer" in source for source in self._sources.values())

    def stock(self, messages: Sequence[Message]) -> list[Stock]:
        """The messages as the dicts that ``transformers`` passes to a template."""
        return [
            stock_message(message, knows_developer=self._knows_developer, reasoning_key=self._reasoning_key)
            for message in messages
        ]

    def prepare(self, messages: Sequence[Stock], tools: Sequence[Tool]) -> Prepared:
        """The input with stand-ins for control text. ``fenced`` is a second input for strings that the template's
        own text would complete to a control token (``_glued``: ``think`` between ``<`` and ``>``)."""
        return prepare(messages, tools, self._control, glued=self._glued)

    def traces(self, synthetic: Synthetic, encoder: TextEncoder) -> BridgeTraces:
        """Continuations of conversations without tools, to be noted."""
        template = TracedTemplate(self._default, self._options)
        return BridgeTraces(template, self.stock, synthetic, encoder, self._glued)

    def text(self, messages: list[Stock], tools: list[Stock], *, prompt: bool) -> str:
        """The rendered text, stand-ins included. ``prompt``: with the opening of the next reply
        (``add_generation_prompt``). Raises InvalidRequest with the template's words where the template refuses."""
        try:
            rendered = render_jinja_template(
                conversations=[messages],
                tools=[*tools] or None,
                chat_template=self._with_tools if tools else self._default,
                add_generation_prompt=prompt,
                **self._options,
            )
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(f"the chat template fails on these messages: {error}") from error
        return str(rendered[0][0])


class TemplateRenderer:
    """A ``Renderer`` over a chat template. Raises StartupError when the folder has no usable one."""

    def __init__(self, vocabulary: Vocabulary, settings: RenderingSettings) -> None:
        if not vocabulary.chat_templates:
            raise StartupError(
                f"the tokenizer of {vocabulary.path} has no chat template; put a chat_template.jinja there "
                "or set rendering.backend = renderers with a family"
            )
        self._vocabulary = vocabulary
        self._encoder = TextEncoder(vocabulary)
        self._table = TokenBytes(vocabulary)
        self._template = ChatTemplate(vocabulary, settings, self._encoder)
        calls = call_format(settings.tool_format, vocabulary.chat_templates.values())
        self._tags = find_tags(vocabulary, calls)
        try:
            self._template.text(self._template.stock([Message("user", "Hello")]), [], prompt=True)
        except InvalidRequest as error:
            raise StartupError(
                f"the chat template of {vocabulary.path} cannot render one user message: {error}"
            ) from error
        self._synthetic = Synthetic(self._template, self._encoder)
        close = self._synthetic.turn_close_id
        self._stop_ids = tuple(dict.fromkeys([*vocabulary.stop_ids, *([] if close is None else [close])]))
        if not self._stop_ids:
            raise StartupError(f"{vocabulary.path} names no end-of-turn token (eos_token or generation_config)")
        self._close = self._stop_ids[0] if close is None else close
        self._continuation = Continuation(
            self._synthetic,
            self._encoder,
            self._table,
            self._tags,
            traces=self._template.traces(self._synthetic, self._encoder) if self._encoder.divides else None,
            stop_ids=frozenset(self._stop_ids),
            follow_template=settings.thinking_history == "template",
        )
        parts = (
            BACKEND,
            vocabulary.chat_templates,
            vocabulary.special_names,
            settings.template_kwargs,
            settings.thinking_history,
            vocabulary.fingerprint,
        )
        self._hash = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    @property
    def template_hash(self) -> str:
        return self._hash

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.size

    @property
    def token_bytes(self) -> TokenBytes:
        return self._table

    def check_tools(self, tools: Sequence[Tool]) -> None:
        if tools and self._tags.call_format is None:
            known = ", ".join(CALL_FORMATS.names())
            raise InvalidRequest(
                "tools with no known call format: this model's chat template asks for none that is installed "
                f"({known}). Set rendering.tool_format to the one that the model writes, or rendering.backend = "
                "renderers with the model's family"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        if not messages:
            raise InvalidRequest("a call needs at least one message")
        prepared = self._template.prepare(self._template.stock(messages), tools)
        shield = prepared.shield
        text = shield.unescape(self._template.text(prepared.messages, prepared.tools, prompt=True))
        if prepared.fenced is not None:
            fenced = prepared.fenced.shield.unescape(
                self._template.text(prepared.fenced.messages, prepared.fenced.tools, prompt=True)
            )
            # The fences may change what the template writes; then the text without them stands.
            if prepared.fenced.unfenced(fenced) == text:
                text, shield = fenced, prepared.fenced.shield
        encoded = self._encoder.encode(text, shield, most=most)
        return Rendered(np.array(encoded.ids, dtype=np.int32), encoded.tokenized_bytes)

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        return self._continuation.bridge(end, new_messages, tools, most=most)

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> TagReplyParser:
        return TagReplyParser(
            self._table,
            self._tags,
            frozenset(tool.name for tool in tools),
            thinking=opened_by(prompt_tail, self._tags, self._table),
            stop=stop,
            parse_calls=parse_calls and bool(tools),
        )

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        return completion_ids(self._encoder, text, self._stop_ids, self._close if close else None)

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        return str(self._vocabulary.tokenizer.decode([int(index) for index in ids], skip_special_tokens=False))


def reasoning_key(sources: Iterable[str]) -> str:
    """The field in which the templates look for a reply's reasoning; ``reasoning_content`` where they do not."""
    text = "\n".join(sources)
    keys = ("reasoning_content", "reasoning", "thinking")
    return next((key for key in keys if re.search(rf"[.'\"]{key}\b", text)), keys[0])


def constants(source: str) -> list[str]:
    """The text and string constants of a template. Raises StartupError when it cannot be parsed."""
    try:
        tokens = list(Environment().lex(source))
    except TemplateSyntaxError as error:
        raise StartupError(f"the chat template cannot be read: {error}") from error
    data = [value for _, kind, value in tokens if kind == "data"]
    return data + [value[1:-1] for _, kind, value in tokens if kind == "string"]
