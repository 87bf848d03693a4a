"""The ``template`` backend: the model folder's own chat template, rendered as ``transformers`` renders it.

What must hold: a clean conversation renders to exactly the ids of ``tokenizer.apply_chat_template``. A bridge
only appends, and never depends on the text that was sampled (``continuation``). The backend never guesses a call
format, moves a message, or keeps state between calls.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateError, TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from turnstile.models import Int32Array, Message, Tool
from turnstile_server.errors import InvalidRequest, ModelCannotServe, StartupError
from turnstile_server.rendering.bridge_traces import BridgeTraces
from turnstile_server.rendering.call_formats.protocol import CallFormat
from turnstile_server.rendering.call_formats.registry import installed_formats, named_format
from turnstile_server.rendering.call_formats.tool_schemas import ToolSchemas
from turnstile_server.rendering.continuation import Continuation
from turnstile_server.rendering.detokenizer import TokenBytes
from turnstile_server.rendering.encoder import Shield, TextEncoder, completion_ids
from turnstile_server.rendering.media_words import probe_media_words
from turnstile_server.rendering.message_rules import MessageRules, Rewritten, callers_texts, in_order, probe_rules
from turnstile_server.rendering.model_report import model_report
from turnstile_server.rendering.normalise import Prepared, Stock, own_ids, prepare, stock_message
from turnstile_server.rendering.protocol import (
    Bridge,
    CannotBridge,
    ModelReport,
    ParsedReply,
    PathEnd,
    Rendered,
)
from turnstile_server.rendering.raw_parser import RawReplyParser
from turnstile_server.rendering.recognition import PROBE_TOOLS, NotRecognised, Recognised, check, recognise
from turnstile_server.rendering.reply_grammar import ReplyGrammar
from turnstile_server.rendering.reply_parser import TagReplyParser
from turnstile_server.rendering.synthetic import Synthetic
from turnstile_server.rendering.tags import find_tags, opened_by
from turnstile_server.rendering.traced_template import TracedTemplate
from turnstile_server.rendering.vocabulary import Vocabulary
from turnstile_server.rendering.written_reply import HELLO, ProbeReader, written_reply
from turnstile_server.settings import RenderingSettings

BACKEND = "template/2"


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
        self.tools_text = settings.tools_text
        if self.tools_text:
            self._with_tools = self._default
        self._xml_tools = "xml_tools" in self._with_tools
        """SmolLM3 takes its tools by this name (its model card)."""
        self._calls: CallFormat | None = None
        self._no_tools: list[Any] | None = None
        try:
            self.text(self.stock([HELLO]), [], prompt=True)
        except InvalidRequest:
            self._no_tools = []  # Hermes 3's reads them in any case
        shown = self.tools_text and self._shows_system()
        self._tools_role = "system" if shown else "user"

    def _shows_system(self) -> bool:
        try:
            return "probesystem" in self.text(
                self.stock([Message("system", "probesystem"), HELLO]), [], prompt=True
            )
        except InvalidRequest:
            return False

    def writing(self, call_format: CallFormat | None) -> ChatTemplate:
        """This template, which gets calls with the ids that ``call_format`` has in a model's context."""
        made = copy.copy(self)
        made._calls = call_format
        return made

    def stock(self, messages: Sequence[Message]) -> list[Stock]:
        """The messages as the dicts that ``transformers`` passes to a template."""
        return [
            stock_message(message, reasoning_key=self._reasoning_key) for message in own_ids(messages, self._calls)
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
        (``add_generation_prompt``). Raises ModelCannotServe with the template's words where the template refuses.
        """
        if tools and self.tools_text:
            said = self._rendered(self.tools_text, [], tools, prompt=False)
            messages, tools = with_text_before(messages, said, self._tools_role), []
        return self._rendered(self._with_tools if tools else self._default, messages, tools, prompt=prompt)

    def _rendered(self, source: str, messages: list[Stock], tools: list[Stock], *, prompt: bool) -> str:
        options = {**self._options, "xml_tools": [*tools]} if tools and self._xml_tools else self._options
        try:
            rendered = render_jinja_template(
                conversations=[messages],
                tools=[*tools] if tools else self._no_tools,
                chat_template=source,
                add_generation_prompt=prompt,
                **options,
            )
        except TemplateError as error:
            raise ModelCannotServe(f"the chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ModelCannotServe(f"the chat template fails on these messages: {error}") from error
        return str(rendered[0][0])


def with_text_before(messages: Sequence[Stock], text: str, role: str) -> list[Stock]:
    """The messages with ``text`` before that of the first one, or as a message of ``role`` before it where that is
    of another role."""
    first = messages[0] if messages else None
    if first is None or first["role"] != role:
        return [{"role": role, "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


class TemplateRenderer:
    """A ``Renderer`` over a chat template. Raises StartupError when the folder has no usable one."""

    def __init__(self, vocabulary: Vocabulary, settings: RenderingSettings) -> None:
        if not vocabulary.chat_templates:
            raise StartupError(
                f"the tokenizer of {vocabulary.path} has no chat template; put a chat_template.jinja there"
            )
        self._vocabulary = vocabulary
        self._encoder = TextEncoder(vocabulary)
        self._table = TokenBytes(vocabulary)
        self._template = ChatTemplate(vocabulary, settings, self._encoder)
        try:
            self._template.text(self._template.stock([HELLO]), [], prompt=True)
        except InvalidRequest as error:
            raise StartupError(
                f"the chat template of {vocabulary.path} cannot render one user message: {error}"
            ) from error
        if settings.tools_text:
            self._check_tools_text()
        self._stop_ids = vocabulary.stop_ids
        self._media_words = probe_media_words(
            lambda messages: self._template.text(messages, [], prompt=True),
            lambda text: not self._encoder.control.found(text),
        )
        self._strict = settings.calls == "strict"
        self._calls = self._call_format(settings)
        call_format = self._calls.format.form if isinstance(self._calls, Recognised) else None
        self._template = self._template.writing(call_format)
        self._tags = find_tags(vocabulary, call_format, self._thinking_shown())
        self._rules = self._probed_rules(call_format)
        stops = [self._table.control[index].text for index in self._stop_ids if index in self._table.control]
        self._synthetic = Synthetic(self._template, self._encoder, call_format, stops)
        close = self._synthetic.turn_close_id
        added = [index for index in (close, self._synthetic.call_end_id) if index is not None]
        self._stop_ids = tuple(dict.fromkeys([*vocabulary.stop_ids, *added]))
        if not self._stop_ids:
            raise StartupError(f"{vocabulary.path} names no end-of-turn token (eos_token or generation_config)")
        self._close = self._stop_ids[0] if close is None else close
        control = {text: token.id for text, token in self._encoder.control.by_text.items()}
        self._grammar = ReplyGrammar(
            control,
            self._tags.think,
            self._tags.marked,
            self._stop_ids,
            write=lambda message, tools: self._written(message, tools)[0],
            read=self._read,
        )
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
            settings.tools_text,
            vocabulary.fingerprint,
            # Its own ids of calls stand in the context.
            self._calls.format.name if isinstance(self._calls, Recognised) else None,
        )
        self._hash = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def _check_tools_text(self) -> None:
        named = [tool.name for tool in PROBE_TOOLS]
        try:
            text = self._template.text(
                self._template.stock([HELLO]), [dict(t.spec) for t in PROBE_TOOLS], prompt=True
            )
        except ModelCannotServe as error:
            raise StartupError(f"rendering.tools_text cannot show tools: {error.message}") from error
        if not all(name in text for name in named):
            raise StartupError("rendering.tools_text does not show the tools: let it write each of `tools`")

    @property
    def media_words(self) -> Mapping[str, str]:
        return self._media_words

    @property
    def report(self) -> ModelReport:
        stops = tuple(self._table.control[index].text for index in self._stop_ids if index in self._table.control)
        return model_report(self._calls, self._tags, stops, self._rules)

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

    def _call_format(self, settings: RenderingSettings) -> Recognised | NotRecognised:
        """The call format that ``rendering.call_format`` names, or that of the template."""
        if settings.call_format == "none":
            return NotRecognised("rendering.call_format = none")
        reader = ProbeReader(self._vocabulary, self._template, self._encoder, self._table)
        if settings.call_format == "auto":
            return recognise(reader, installed_formats())
        return check(reader, named_format(settings.call_format))

    def _probed_rules(self, call_format: CallFormat | None) -> MessageRules:
        """The rules that hold with tools and without."""

        def rules(tools: list[Stock]) -> MessageRules:
            return probe_rules(
                lambda messages: self._template.text(self._template.stock(messages), tools, prompt=True)
            )

        bare = rules([])
        return bare if call_format is None else bare & rules([dict(tool.spec) for tool in PROBE_TOOLS])

    def _thinking_shown(self) -> str:
        """A prompt, and a reply with reasoning: where templates put thinking tags together from variables."""
        thoughtful = Message("assistant", "text", reasoning="thought")
        shown = self._template.text(self._template.stock([HELLO]), [], prompt=True)
        try:
            return shown + self._template.text(self._template.stock([HELLO, thoughtful]), [], prompt=False)
        except InvalidRequest:
            return shown

    def check_tools(self, tools: Sequence[Tool]) -> None:
        if tools and isinstance(self._calls, NotRecognised):
            raise ModelCannotServe(
                f"this model cannot be given tools: {self._calls.why}. Set rendering.call_format to the form in "
                "which the model writes calls"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        if not messages:
            raise InvalidRequest("a call needs at least one message")
        arranged, rewritten = self._rules.arranged(messages, begins=True)
        prepared = self._template.prepare(self._template.stock(arranged), tools)
        shield = prepared.shield
        text = shield.unescape(self._template.text(prepared.messages, prepared.tools, prompt=True))
        if not in_order(text, callers_texts(prepared.messages)):
            raise ModelCannotServe("the chat template leaves out, moves or changes the text of a message")
        if prepared.fenced is not None:
            fenced = prepared.fenced.shield.unescape(
                self._template.text(prepared.fenced.messages, prepared.fenced.tools, prompt=True)
            )
            # The fences may change what the template writes; then the text without them stands.
            if prepared.fenced.unfenced(fenced) == text:
                text, shield = fenced, prepared.fenced.shield
        if isinstance(self._calls, Recognised):
            rewritten |= self._calls.left_out(arranged)
        if tools and self._template.tools_text:
            rewritten |= {Rewritten.TOOLS_AS_TEXT}
        encoded = self._encoder.encode(text, shield, most=most)
        return Rendered(np.array(encoded.ids, dtype=np.int32), encoded.tokenized_bytes, rewritten)

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        arranged, rewritten = self._rules.arranged(new_messages, begins=False)
        bridge = self._continuation.bridge(end, arranged, tools, most=most)
        return replace(bridge, rewritten=rewritten) if rewritten and isinstance(bridge, Bridge) else bridge

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> TagReplyParser:
        parse_calls = parse_calls and bool(tools)
        return TagReplyParser(
            self._table,
            self._tags,
            ToolSchemas(tools, strict=self._strict, forbidden=not parse_calls),
            thinking=opened_by(prompt_tail, self._tags, self._table),
            stop=stop,
            stop_ids=frozenset(self._stop_ids),
            parse_calls=parse_calls,
        )

    def encode_prompt(self, text: str, *, begin: bool, most: int | None = None) -> Int32Array:
        ids = self._encoder.encode(text, most=most).ids
        first = self._vocabulary.tokenizer.encode("").ids[:1] if begin else []
        return np.array(ids if ids[: len(first)] == first else [*first, *ids], dtype=np.int32)

    def raw_parser(self, stop: Sequence[str]) -> RawReplyParser:
        return RawReplyParser(self._table, stop, frozenset(self._stop_ids))

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        return completion_ids(self._encoder, text, self._stop_ids, self._close if close else None)

    def answer_grammar(self, schema: str, prompt_tail: Int32Array) -> str | None:
        return self._grammar.answer(schema, opened=opened_by(prompt_tail, self._tags, self._table))

    def call_grammar(self, tools: Sequence[Tool], name: str, prompt_tail: Int32Array) -> str | None:
        return self._grammar.call(tools, name, opened=opened_by(prompt_tail, self._tags, self._table))

    def _read(self, text: str, tools: Sequence[Tool]) -> ParsedReply:
        """The reply that the model would have sampled as ``text``."""
        parser = self.parser(tools, prompt_tail=np.empty(0, np.int32))
        parser.feed(self.encode_completion(text))
        return parser.finish()[1]

    def encode_reply(self, message: Message, tools: Sequence[Tool]) -> Int32Array:
        text, shield = self._written(message, tools)
        ids = self._encoder.encode(text, shield, after=self._encoder.anchor_id).ids
        end = next((place for place, index in enumerate(ids) if index in self._stop_ids), None)
        return np.array([*ids, self._close] if end is None else ids[: end + 1], dtype=np.int32)

    def _written(self, message: Message, tools: Sequence[Tool]) -> tuple[str, Shield]:
        """The text of a reply without thinking that the template made up, and its stand-ins."""
        reply = written_reply(self._template, message, tools)
        text = reply.text
        if self._tags.think is not None and not message.reasoning:
            opening, closing = (tag.strip() for tag in self._tags.think)
            before, closed, after = text.partition(closing)
            if closed and not before.replace(opening, "").strip():
                text = after.lstrip("\n")
        return text, reply.shield

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
