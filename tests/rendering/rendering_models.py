"""Builds model folders with other chat templates; helpers to sample and parse by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from turnstile.models import Int32Array, Message, Tool
from turnstile_server.rendering.protocol import Delta, ParsedReply

ROLE_TOKENS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def make_folder(
    source: Path,
    target: Path,
    template: str,
    *,
    added: list[str] | None = None,
    eos: str = "<|im_end|>",
    bos: str | None = None,
) -> Path:
    """A copy of ``source``'s tokenizer with ``template`` and more special tokens."""
    target.mkdir(parents=True)
    spec = json.loads((source / "tokenizer.json").read_text())
    following = max(token["id"] for token in spec["added_tokens"]) + 1
    for offset, text in enumerate(added or []):
        spec["added_tokens"].append(
            {
                "id": following + offset,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    (target / "tokenizer.json").write_text(json.dumps(spec))
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"eos_token": eos}
    if bos is not None:
        config["bos_token"] = bos
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "chat_template.jinja").write_text(template)
    if added is None:
        shutil.copy(source / "generation_config.json", target)
    return target


BASH = Tool(
    "bash",
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    },
)


def ids_of(renderer: Any, text: str) -> Int32Array:
    """Ids of text in which control-token literals are control tokens: what a model would have sampled."""
    return np.array(renderer._vocabulary.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)


def parse(renderer: Any, ids: Any, tools: Any = (BASH,), **options: Any) -> tuple[list[Delta], ParsedReply]:
    """The whole completion through the parser at once."""
    options.setdefault("prompt_tail", np.array([], dtype=np.int32))
    parser = renderer.parser(list(tools), **options)
    deltas = parser.feed(ids)
    last, reply = parser.finish()
    return deltas + last, reply


USER = Message("user", "List the files.")
