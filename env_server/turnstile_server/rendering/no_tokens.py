"""The renderer of a hosted model, which has none: its tokenizer and its chat template are its server's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from turnstile.models import Int32Array, Message, Tool
from turnstile_server.errors import EngineRefused
from turnstile_server.rendering.media_words import OMITTED
from turnstile_server.rendering.protocol import (
    Bridge,
    CannotBridge,
    ModelReport,
    PathEnd,
    Rendered,
    Renderer,
    ReplyParser,
)


class NoTokens(Renderer):
    """Everything that would need a token is refused. ``model``: the hosted model's name."""

    stop_token_ids: tuple[int, ...] = ()
    vocab_size = 0
    token_bytes = None
    report = ModelReport(None, "", (), (), ())
    media_words = OMITTED

    def __init__(self, model: str) -> None:
        self._model = model

    @property
    def template_hash(self) -> str:
        """The model's name: its template is its server's own."""
        return f"upstream:{self._model}"

    def check_tools(self, tools: Sequence[Tool]) -> None:
        """A hosted model's server knows how to show it tools."""

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None) -> Rendered:
        self._refuse()

    def bridge(
        self, end: PathEnd, new_messages: Sequence[Message], tools: Sequence[Tool], *, most: int | None = None
    ) -> Bridge | CannotBridge:
        self._refuse()

    def parser(
        self, tools: Sequence[Tool], *, prompt_tail: Int32Array, stop: Sequence[str] = (), parse_calls: bool = True
    ) -> ReplyParser:
        self._refuse()

    def encode_prompt(self, text: str, *, begin: bool, most: int | None = None) -> Int32Array:
        self._refuse()

    def raw_parser(self, stop: Sequence[str]) -> ReplyParser:
        self._refuse()

    def answer_grammar(self, schema: str, prompt_tail: Int32Array) -> str | None:
        self._refuse()

    def call_grammar(self, tools: Sequence[Tool], name: str, prompt_tail: Int32Array) -> str | None:
        self._refuse()

    def encode_completion(self, text: str, *, close: bool = True) -> Int32Array:
        self._refuse()

    def encode_reply(self, message: Message, tools: Sequence[Tool]) -> Int32Array:
        self._refuse()

    def decode(self, ids: Sequence[int] | Int32Array) -> str:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineRefused(f"the hosted model {self._model} has no token ids here")
