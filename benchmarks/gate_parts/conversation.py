"""The conversation that every measured server gets, and the one reply that the mock engine gives.

An agent with two tools: a system prompt, a task, then turns of one sampled reply (a sentence and a tool call,
``REPLY_TOKENS`` tokens) and one tool result (about ``RESULT_TOKENS`` tokens).

Measured calls come in *chains* of ``CHAIN``. The first of a chain goes on from the history with a tool result of
its own, as a branch does; each other one goes on from the call before it, as an agent does: what that call had,
its reply, and a new tool result. Only the others are counted. Each tool result of a chain begins with a number
that no other one has, so that no server can answer from what it has seen, and all have the same length.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

REPLY_TOKENS = 40
RESULT_TOKENS = 250
CHAIN = 3
NONCE_CHARS = 12
_NONCE = "N" * NONCE_CHARS
_COMMAND = json.dumps({"command": "ls"})
_CALL = f'\n<tool_call>\n{{"name": "bash", "arguments": {_COMMAND}}}\n</tool_call>'
_SENTENCE = (
    "I will read the next part of the module first and then run the tests of it again to see what fails there. "
    * 4
)
_SYSTEM = (
    "You are a careful software engineer. You work in a repository through the tools that you are offered. Read "
    "before you change anything, change as little as possible, run the tests after every change, and say what you "
    "did when you are done. Never change a test in order to make it pass. "
) * 2
_TASK = "The suite of this repository fails since the last refactoring. Find out why and repair it."


def _tool(name: str, purpose: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": purpose, "parameters": schema}}


_TOOLS = [
    _tool("bash", "Runs a command in the repository and returns its output.", command="The command line."),
    _tool("write_file", "Replaces a file.", path="Relative to the repository.", content="The whole new text."),
]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine samples, always: ``ids`` end with the end-of-turn token."""

    content: str
    call_name: str
    call_arguments: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text of each id, "" for the last."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request body but for the numbers of its chain's tool results, which go between ``pieces``."""

    pieces: tuple[bytes, ...]
    result_bytes: int
    """UTF-8 bytes of the tool result that is new in this call."""

    def parts(self, first: int) -> list[bytes]:
        """With ``first`` as the number of the chain's first result, ``first + 1`` as that of its second, …"""
        parts = [self.pieces[0]]
        for at, piece in enumerate(self.pieces[1:]):
            parts += [f"{first + at:0{NONCE_CHARS}d}".encode(), piece]
        return parts

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces) + NONCE_CHARS * (len(self.pieces) - 1)


class Conversation:
    """``model``: a folder with ``tokenizer.json``; nothing else of it is used. ``seed``: another one gives other
    tool results of the same number of tokens."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        self._seed = seed
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.reply = self._make_reply()
        self._turns: list[bytes] = []
        head = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _TASK}]
        self._head = b"".join(_dumps(message) + b"," for message in head)

    def chain(self, turns: int, *, stream: bool) -> tuple[Body, ...]:
        """The measured calls after ``turns`` (at least one) answered turns, in the order in which they are
        sent."""
        messages = self._head + b"".join(self._turn(index) for index in range(turns - 1))
        content = f"run {_NONCE}\n{self.result(-1)}"
        bodies: list[Body] = []
        for at in range(turns - 1, turns - 1 + CHAIN):
            result = _dumps({"role": "tool", "tool_call_id": f"call_{at}", "content": content})
            messages += self._echo(at) + result + b","
            body = _request(messages.removesuffix(b","), stream=stream)
            bodies.append(Body(tuple(body.split(_NONCE.encode())), len(content.encode())))
        return tuple(bodies)

    def step(self, turns: int) -> bytes:
        """The call that makes the turn after ``turns`` others: with its reply, what all longer bodies repeat."""
        messages = self._head + b"".join(self._turn(index) for index in range(turns))
        return _request(messages.removesuffix(b","), stream=False)

    def opening(self, number: int, tokens: int) -> list[dict[str, Any]]:
        """The system prompt, and a task with about ``tokens`` tokens of text, another one for each ``number``."""
        texts = [self.result(-1 - number * 1_000 - at) for at in range(max(1, tokens // RESULT_TOKENS))]
        task = {"role": "user", "content": "\n".join([f"task {number}", _TASK, *texts])}
        return [{"role": "system", "content": _SYSTEM}, task]

    def request(self, messages: list[dict[str, Any]], *, stream: bool, max_tokens: int) -> bytes:
        """A body with ``messages``, for a reply that says how many tokens it has."""
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 1.0, "stream": stream}
        options |= {"stream_options": {"include_usage": True}} if stream else {}
        return _dumps({"model": "tiny", "messages": messages, "tools": _TOOLS, **options})

    def _turn(self, index: int) -> bytes:
        """One answered call of the history: the reply and the tool's result."""
        while len(self._turns) <= index:
            at = len(self._turns)
            result = {"role": "tool", "tool_call_id": f"call_{at}", "content": self.result(at)}
            self._turns.append(self._echo(at) + _dumps(result) + b",")
        return self._turns[index]

    def _echo(self, index: int) -> bytes:
        function = {"name": self.reply.call_name, "arguments": self.reply.call_arguments}
        call = {"id": f"call_{index}", "type": "function", "function": function}
        return _dumps({"role": "assistant", "content": self.reply.content, "tool_calls": [call]}) + b","

    @lru_cache(maxsize=4)  # noqa: B019 - few conversations per process
    def result(self, index: int) -> str:
        """A listing of ``RESULT_TOKENS`` tokens, another one for each index, of ASCII."""
        words = ("handle", "parse", "render", "commit", "replay", "queue", "socket", "record", "matcher", "budget")
        pick = random.Random(index + 100_003 * self._seed)
        lines = (
            f"src/{pick.choice(words)}_{pick.choice(words)}.py:{pick.randrange(900)}:    "
            f"def {pick.choice(words)}(self, {pick.choice(words)}, timeout={pick.randrange(60)}):"
            for _ in range(40)
        )
        text = "\n".join(lines)
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[RESULT_TOKENS - 1][1]]

    def _make_reply(self) -> Reply:
        call = self.tokenizer.encode(_CALL, add_special_tokens=False).ids
        end = self.tokenizer.encode("<|im_end|>", add_special_tokens=False).ids[0]
        words = self.tokenizer.encode(_SENTENCE, add_special_tokens=False).ids[: REPLY_TOKENS - len(call) - 1]
        content = self.tokenizer.decode(words, skip_special_tokens=False)
        pieces = [self.tokenizer.decode([index], skip_special_tokens=False) for index in (*words, *call)]
        ids = (*words, *call, end)
        if len(ids) != REPLY_TOKENS or not words:
            raise SystemExit(
                f"the tool call alone has {len(call)} tokens in this vocabulary; nothing left for text"
            )
        return Reply(content, "bash", _COMMAND, ids, (*pieces, ""))


def _request(messages: bytes, *, stream: bool) -> bytes:
    options = b'],"tools":' + _dumps(_TOOLS) + b',"stream":' + (b"true" if stream else b"false") + b"}"
    return b'{"model":"tiny","messages":[' + messages + options


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
