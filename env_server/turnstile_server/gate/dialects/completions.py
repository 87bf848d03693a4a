"""OpenAI's legacy completions, for harnesses that render their prompts themselves.

(https://platform.openai.com/docs/api-reference/completions/create)

The prompt is a list of token ids, or a text, which is tokenized once as it is: the literals in it are control
tokens, for nobody can tell the client's own from those of a tool. A call whose ids begin with exactly the tokens
of an earlier turn continues it; any other is a root. The text of the reply is all that was sampled but special
tokens: thinking and calls are the client's to read.

Read: prompt, max_tokens (16 without it), stop, stream, stream_options, response_format, add_special_tokens.
Recorded but not obeyed, because the trainer pins sampling: temperature, top_p, …. Refused by name: what would need
another prompt, other tokens or several turns.

With ``return_token_ids`` a choice has ``prompt_token_ids`` and ``token_ids``, as from vLLM and SGLang, and with
``logprobs`` the sampled tokens' logprobs, named ``token_id:N``; of a stream they come with its last choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from turnstile_server.errors import InvalidRequest
from turnstile_server.gate.dialects.base import (
    NO_CONTEXT,
    PROMPT,
    BodyContext,
    Endpoint,
    FinishedReply,
    ModelRequest,
    Purpose,
    RenderedPrompt,
    ReplyHead,
    StreamWriter,
    endpoint,
)
from turnstile_server.gate.dialects.chat import ChatDialect, ChatStream
from turnstile_server.gate.dialects.json import flag, kind, positive_int, read_object, recorded, stop_strings, text
from turnstile_server.gate.dialects.openai import (
    format_schema,
    refuse_logit_bias,
    server_event,
    usage_value,
)
from turnstile_server.rendering.protocol import Delta, TextDelta

DEFAULT_MAX_TOKENS: Final = 16
"""Of a call that names none, as of OpenAI's, vLLM's and SGLang's."""

ASKED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("seed", "max_tokens", "stop", "response_format", "min_tokens", "ignore_eos"),
)
"""Fields that say how to sample: recorded as asked, and part of the retry identity."""

_REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "n": ((1,), "every completion is one turn of the episode: send one call for each"),
    "best_of": ((1,), "every completion is one turn of the episode: send one call for each"),
    "suffix": (("",), "the model only continues a prompt"),
    "echo": (
        (False,),
        "the reply is what was sampled; with return_token_ids it has prompt_token_ids too",
    ),
    "prompt_logprobs": ((), "only sampled tokens have recorded logprobs"),
    "prompt_embeds": ((), "the prompt must be a text or token ids"),
    "truncate_prompt_tokens": ((), "the model must be fed what was sent: shorten the prompt"),
    "stop_token_ids": (([],), "the model's own end tokens end a completion; send stop strings for others"),
    "allowed_token_ids": (([],), "recorded logprobs must be those of the policy"),
    "bad_words": (([],), "recorded logprobs must be those of the policy"),
    "include_stop_str_in_output": ((False,), "leave it out"),
    "skip_special_tokens": (
        (True,),
        "the text is without special tokens; with return_token_ids token_ids has them",
    ),
}
"""Fields by name: the values that change nothing, and why others are refused."""


class CompletionsDialect(ChatDialect):
    """Errors and lists of models are those of Chat Completions."""

    name = "completions"
    history = PROMPT
    endpoints: tuple[Endpoint, ...] = (endpoint("/v1/completions", Purpose.TURN),)

    def parse(self, body: bytes, context: BodyContext = NO_CONTEXT) -> ModelRequest:
        return parse_completion(read_object(body))

    def reply(self, reply: FinishedReply, request: ModelRequest) -> bytes:
        choice = {**_choice(reply.message.content, reply.finish), **_tokens(reply, request)}
        value = {**_head(reply.head), "choices": [choice], "usage": usage_value(reply.usage)}
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)

    def stream(self, head: ReplyHead, request: ModelRequest) -> StreamWriter:
        return _CompletionStream(head, request)


class _CompletionStream(ChatStream):
    def __init__(self, head: ReplyHead, request: ModelRequest) -> None:
        super().__init__(head, request)
        self._head = _head(head)

    def start(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        assert isinstance(delta, TextDelta)  # all of such a reply is text
        return server_event({**self._head, "choices": [_choice(delta.text, None)]})

    def end(self, reply: FinishedReply) -> bytes:
        choice = {**_choice("", reply.finish), **_tokens(reply, self._request)}
        tail = server_event({**self._head, "choices": [choice]})
        if self._request.stream_usage:
            tail += server_event({**self._head, "choices": [], "usage": usage_value(reply.usage)})
        return tail + b"data: [DONE]\n\n"


def _head(head: ReplyHead) -> dict[str, Any]:
    named = head.named("cmpl-")
    return {"id": named, "object": "text_completion", "created": head.created, "model": head.model}


def _choice(said: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": said, "logprobs": None, "finish_reason": finish}


def _tokens(reply: FinishedReply, request: ModelRequest) -> dict[str, Any]:
    """The fields of a choice that tell its tokens."""
    tokens = reply.tokens
    if tokens is None:
        return {}
    found: dict[str, Any] = {"prompt_token_ids": tokens.prompt_ids, "token_ids": tokens.completion_ids}
    if request.wire.get("logprobs"):
        found["logprobs"] = {
            "tokens": [f"token_id:{index}" for index in tokens.completion_ids.tolist()],
            "token_logprobs": tokens.logprobs,
            "top_logprobs": None,
            "text_offset": None,
        }
    return found


def parse_completion(source: dict[str, Any]) -> ModelRequest:
    """The request in a body of completions. Raises InvalidRequest, which names the field."""
    for name, (neutral, why) in _REFUSED.items():
        value = source.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} {value!r} is not accepted: {why}")
    refuse_logit_bias(source)
    options = source.get("stream_options")
    show_tokens = flag(source, "return_token_ids")
    begin = source.get("add_special_tokens") is None or flag(source, "add_special_tokens")
    return ModelRequest(
        messages=(),
        prompt=RenderedPrompt(_prompt(source.get(PROMPT)), begin),
        model=text(source, "model") or "",
        stream=flag(source, "stream"),
        stream_usage=isinstance(options, dict) and options.get("include_usage") is True,
        show_tokens=show_tokens,
        wire={"logprobs": _wants_logprobs(source, show_tokens=show_tokens)},
        max_tokens=positive_int(source, "max_tokens") or DEFAULT_MAX_TOKENS,
        stop=stop_strings(source.get("stop"), "stop", one_alone=True),
        parse_calls=False,
        json_schema=format_schema(source.get("response_format"), "response_format", "json_schema"),
        asked=recorded(source, ASKED),
    )


def _wants_logprobs(source: dict[str, Any], *, show_tokens: bool) -> bool:
    """Whether the reply has the logprobs of its tokens: with 0 and 1, and with their ids."""
    asked = source.get("logprobs")
    if asked is None or asked is False:
        return False
    if asked not in (0, 1) or not show_tokens:
        raise InvalidRequest(
            "logprobs are those of the sampled tokens, for clients that read ids: send 1, and return_token_ids"
        )
    return True


def _prompt(value: Any) -> str | tuple[int, ...]:
    """The one prompt, which may stand in a list alone."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise InvalidRequest("prompt holds several prompts; each is a turn of its own: send one call for each")
        value = value[0]
    if not isinstance(value, str | list):
        raise InvalidRequest(f"prompt must be a text or an array of token ids, not {kind(value)}")
    if not value:
        raise InvalidRequest("prompt is empty: send a text, or at least one token id")
    if isinstance(value, str):
        return value
    wrong = next((index for index, one in enumerate(value) if type(one) is not int), None)
    if wrong is not None:
        raise InvalidRequest(f"prompt[{wrong}] must be a token id, not {kind(value[wrong])}")
    return tuple(value)
