"""The conversation that every measured server gets, and the one reply that the mock engine gives.

An agent with two tools: a system prompt, a task, then turns of one sampled reply (a sentence and a tool call,
``REPLY_TOKENS`` tokens) and one tool result (about ``RESULT_TOKENS`` tokens). A *measured* call has ``turns``
answered turns of history and one tool result of its own: its text begins with a number that no other call has, so
that no server can answer from what it has seen, and always has the same length.
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
    """A request body but for its nonce."""

    before: bytes
    after: bytes
    result_bytes: int
    """UTF-8 bytes of the tool result that is new in this call."""

    def parts(self, number: int) -> list[bytes]:
        return [self.before, f"{number:0{NONCE_CHARS}d}".encode(), self.after]

    @property
    def size(self) -> int:
        return len(self.before) + NONCE_CHARS + len(self.after)


class Conversation:
    """``model``: a folder with ``tokenizer.json``; nothing else of it is used."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.reply = self._make_reply()
        self._turns: list[bytes] = []
        head = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _TASK}]
        self._head = b"".join(_dumps(message) + b"," for message in head)

    def body(self, turns: int, *, stream: bool) -> Body:
        """A measured call: ``turns`` (at least one) answered turns, then a tool result of its own, which differs
        from call to call in its nonce only, whatever the length of the history."""
        history = b"".join(self._turn(index) for index in range(turns - 1)) + self._echo(turns - 1)
        content = f"run {_NONCE}\n{self._result(-1)}"
        last = {"role": "tool", "tool_call_id": f"call_{turns - 1}", "content": content}
        body = _request(self._head + history + _dumps(last), stream=stream)
        before, _, after = body.rpartition(_NONCE.encode())
        return Body(before, after, len(content.encode()))

    def step(self, turns: int) -> bytes:
        """The call that makes the turn after ``turns`` others: with its reply, what all longer bodies repeat."""
        messages = self._head + b"".join(self._turn(index) for index in range(turns))
        return _request(messages.removesuffix(b","), stream=False)

    def _turn(self, index: int) -> bytes:
        """One answered call of the history: the reply and the tool's result."""
        while len(self._turns) <= index:
            at = len(self._turns)
            result = {"role": "tool", "tool_call_id": f"call_{at}", "content": self._result(at)}
            self._turns.append(self._echo(at) + _dumps(result) + b",")
        return self._turns[index]

    def _echo(self, index: int) -> bytes:
        function = {"name": self.reply.call_name, "arguments": self.reply.call_arguments}
        call = {"id": f"call_{index}", "type": "function", "function": function}
        return _dumps({"role": "assistant", "content": self.reply.content, "tool_calls": [call]}) + b","

    @lru_cache(maxsize=4)  # noqa: B019 - one conversation per process
    def _result(self, index: int) -> str:
        """A listing of ``RESULT_TOKENS`` tokens, another one for each index, of ASCII."""
        words = ("handle", "parse", "render", "commit", "replay", "queue", "socket", "record", "matcher", "budget")
        pick = random.Random(index)
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
        end = self.tokenizer.token_to_id("<|im_end|>")
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
