"""The chat format of a model folder, for a scripted policy that runs beside the model's own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from scripted.script import ScriptError
from turnstile_server.testing.policy import CALL_OPEN, ChatFormat

THINKING = ("<think>", "</think>")


def chat_format(folder: Path) -> ChatFormat:
    """Raises ScriptError when the model's calls have another form than `<tool_call>` tags."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if CALL_OPEN not in str(tokenizer.chat_template):
        raise ScriptError(f"{folder}: a scripted policy needs a chat template with {CALL_OPEN} tags")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    control = tokenizer.get_added_vocab()

    def encode(text: str) -> list[int]:
        return [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id)]

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    try:
        return ChatFormat(
            decode,
            encode,
            prompt=tokenizer.encode(prompt, add_special_tokens=False),
            control=control,
            thinking=THINKING if control.keys() >= set(THINKING) else None,
        )
    except ValueError as error:
        raise ScriptError(f"{folder}: {error}") from error
