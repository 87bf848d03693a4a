"""A model's chat format, as far as a scripted policy must know it: prompts read, completions written, in ids.

Calls are in the Hermes form (JSON between `<tool_call>` tags), tools are listed between `<tools>` tags: what
Qwen's templates and the tiny model's do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripted.script import Scene, ScriptError, Step

CALL = "<tool_call>\n{call}\n</tool_call>"
TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


class ChatFormat:
    """That of the model in ``folder``. Raises ScriptError when its calls have another form."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _tokenizer(folder)
        user = [{"role": "user", "content": "x"}]
        closed = self._tokenizer.apply_chat_template(user, tokenize=False)
        opened = self._tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
        if "<tool_call>" not in str(self._tokenizer.chat_template) or not opened.startswith(closed):
            raise ScriptError(f"{folder}: a scripted policy needs a chat template with <tool_call> tags")
        self._header = self.encode(opened[len(closed) :])
        self._close = int(self._tokenizer.eos_token_id)
        self._added = tuple(self._tokenizer.get_added_vocab())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def read(self, ids: Sequence[int]) -> Scene:
        """Turns are counted by the ids that open the model's own: the same text in a message is other ids."""
        text = self.decode(ids)
        first, width = self._header[0], len(self._header)
        opened = sum(
            1
            for index, token in enumerate(ids)
            if token == first and list(ids[index : index + width]) == self._header
        )
        return Scene(text, max(opened - 1, 0), _tools(text))

    def write(self, step: Step) -> list[int]:
        """The ids of a completion that says ``step`` and ends the model's turn."""
        parts = [step.text] if step.text else []
        if step.tool is not None:
            call = json.dumps({"name": step.tool, "arguments": step.arguments}, ensure_ascii=False)
            if any(token in call for token in self._added):
                call = call.replace("<", "\\u003c")  # the same JSON, without the tokens
            parts.append(CALL.format(call=call))
        return [*self.encode("\n".join(parts)), self._close]


def _tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def _tools(prompt: str) -> frozenset[str]:
    found = TOOLS.search(prompt)
    names = set()
    for line in found[1].splitlines() if found else ():
        try:
            tool = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(tool, dict):
            function = tool.get("function", tool)
            names.add(str(function.get("name")) if isinstance(function, dict) else "")
    return frozenset(names)
