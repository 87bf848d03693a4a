"""A model folder's tokenizer: loading, control tokens, end tokens, fingerprint.

This is the only module that reads tokenizer files. *Control tokens* are all added tokens that are not pure
whitespace, whether marked special or not: ``<|im_end|>`` ends a turn, ``<tool_call>`` is a tag that our parser
acts on. Text of a caller must never become one of them (``encoder``). The module never imports torch:
``PreTrainedTokenizerFast`` reads ``tokenizer.json`` as it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from turnstile_server.errors import StartupError


@dataclass(frozen=True, slots=True)
class ControlToken:
    """An added token. ``lstrip``, ``rstrip``: it takes the whitespace on that side with it, as its file says."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """A loaded tokenizer.

    ``special_names``: the texts that templates see as ``bos_token``, ``eos_token`` and so on. ``size``: the size
    of the model's vocabulary (``config.json``) where the folder has one, else of the tokenizer's. ``stop_ids``:
    the end tokens that the folder declares, first those of ``generation_config.json``, then the tokenizer's.
    """

    path: Path
    tokenizer: Tokenizer
    special_names: dict[str, str]
    chat_templates: dict[str, str]
    control: tuple[ControlToken, ...]
    stop_ids: tuple[int, ...]
    size: int
    fingerprint: str


def load_vocabulary(model_dir: Path) -> Vocabulary:
    """Reads the tokenizer of a Hugging Face folder. Raises StartupError for a folder that has none."""
    if not model_dir.is_dir():
        raise StartupError(f"model folder {model_dir} does not exist (--model takes a Hugging Face folder)")
    if not (model_dir / "tokenizer.json").is_file():
        raise StartupError(f"{model_dir} has no tokenizer: tokenizer.json is missing (a fast tokenizer is needed)")
    try:
        wrapper = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:
        raise StartupError(f"the tokenizer of {model_dir} cannot be loaded: {error}") from error
    tokenizer: Tokenizer = wrapper.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    control = tuple(
        ControlToken(index, token.content, token.special, token.lstrip, token.rstrip)
        for index, token in sorted(tokenizer.get_added_tokens_decoder().items())
        if token.content.strip()
    )
    templates = wrapper.chat_template or {}
    if isinstance(templates, str):
        templates = {"default": templates}
    known = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Vocabulary(
        path=model_dir,
        tokenizer=tokenizer,
        special_names={
            name: str(text) for name, text in wrapper.special_tokens_map.items() if isinstance(text, str)
        },
        chat_templates=dict(templates),
        control=control,
        stop_ids=_stop_ids(model_dir, wrapper.eos_token_id),
        size=_model_vocabulary(model_dir) or known,
        fingerprint=_fingerprint(tokenizer),
    )


def tokenizer_fingerprint(model_dir: Path) -> str:
    """Hash of vocabulary and added tokens, equal for two folders exactly when they map ids to the same strings.

    Raises StartupError when the folder has no readable tokenizer.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"{model_dir} has no tokenizer: tokenizer.json is missing")
    return load_vocabulary(model_dir).fingerprint


def _fingerprint(tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1]):
        digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    for index, added in sorted(tokenizer.get_added_tokens_decoder().items()):
        digest.update(f"+{index}\0{added.content}\0{added.special}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _stop_ids(model_dir: Path, eos: int | None) -> tuple[int, ...]:
    found: list[int] = []
    for value in (_read_json(model_dir / "generation_config.json").get("eos_token_id"), eos):
        for index in value if isinstance(value, list) else [value]:
            if isinstance(index, int) and index not in found:
                found.append(index)
    return tuple(found)


def _model_vocabulary(model_dir: Path) -> int | None:
    config = _read_json(model_dir / "config.json")
    for section in (config, config.get("text_config")):
        if isinstance(section, dict) and isinstance(section.get("vocab_size"), int):
            return int(section["vocab_size"])
    return None
