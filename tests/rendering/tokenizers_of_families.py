"""Tokenizers as model families have them: the tiny vocabulary with their normalisers and pre-tokenizers, and a
small SentencePiece one. No family's own vocabulary is in the repository."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DEEPSEEK = [r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|\s+|[^\s]+"]


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, prefix: bool = False, regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


BYTEWISE: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama3": {"pre_tokenizer": _sequence(_split(LLAMA3), byte_level(regex=False))},
    "qwen": {"pre_tokenizer": _sequence(_split(QWEN), byte_level(regex=False)), "normalizer": {"type": "NFC"}},
    "deepseek": {"pre_tokenizer": _sequence(*map(_split, DEEPSEEK), byte_level(regex=False))},
    "prefix_space": {"pre_tokenizer": byte_level(prefix=True)},
}
"""Changes to the tiny model's ``tokenizer.json``."""

_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "llama2": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACES]},
        "pre_tokenizer": None,
    },
    "mistral": {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False},
    },
    "gemma": {
        "normalizer": _SPACES,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    },
}
"""How the SentencePiece vocabulary is used."""


def changed(tiny_model: Path, **fields: Any) -> Tokenizer:
    """The tiny model's tokenizer with these fields of ``tokenizer.json``."""
    spec = json.loads((tiny_model / "tokenizer.json").read_text()) | {"post_processor": None} | fields
    return Tokenizer.from_str(json.dumps(spec))


def tokenizer_of(family: str, tiny_model: Path) -> Tokenizer:
    if family in BYTEWISE:
        return changed(tiny_model, **BYTEWISE[family])
    tokenizer = Tokenizer.from_str(json.dumps(_sentencepiece() | SENTENCEPIECE[family]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "</s>")])
    return tokenizer


@cache
def _sentencepiece() -> dict[str, Any]:
    """A byte-fallback BPE in which ``▁`` stands for a space, without normaliser and pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] == "<unk>"]
    return spec
