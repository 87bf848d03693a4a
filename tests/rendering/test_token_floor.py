"""``TokenFloor`` never takes a text for too long that has few enough tokens, however the text is built or cut."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from tokenizers_of_families import BYTEWISE, SENTENCEPIECE, byte_level, changed, tokenizer_of

from turnstile_server.rendering import token_floor
from turnstile_server.rendering.token_floor import TokenFloor

FAMILIES = (*BYTEWISE, *SENTENCEPIECE)
WORDS = st.sampled_from(
    [
        *(
            "the",
            " quick",
            "  ",
            "\n\n",
            "\t",
            " " * 70,
            "#" * 130,
            "def f(x):\n",
            "1234567",
            "a1",
            "é",
            "e\u0301",
        ),
        *("<|im_end|>", "<|im_start|>", "</s>", "<think>", ">\u0338", "<|im_end|>\u0338", "a\u0323\u0307", "语言"),
        *("한국어", "\u1112\u1161\u11ab", "🙂", "👩\u200d🔬", "\x00", "\u2028", "\ufeff", "ﬁ", "▁", "<0x41>"),
    ]
)
TEXTS = st.lists(WORDS | st.text(max_size=8), max_size=40).map("".join) | st.text(max_size=200)
EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@cache
def family(name: str, tiny_model: Path) -> tuple[Tokenizer, TokenFloor]:
    tokenizer = tokenizer_of(name, tiny_model)
    floor = TokenFloor.of(tokenizer)
    assert floor is not None
    return tokenizer, floor


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 16])
@EXAMPLES
@given(TEXTS)
def test_a_text_that_fits_is_never_taken_for_too_long(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int, text: str
) -> None:
    monkeypatch.setattr(token_floor, "PIECE_CHARS", piece)
    tokenizer, floor = family(name, tiny_model)
    assert floor.over(text, count(tokenizer, text)) is None


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("piece", [1, 7, 64])
@EXAMPLES
@given(TEXTS)
def test_a_bound_over_stretches_that_are_restored_holds_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int, text: str
) -> None:
    monkeypatch.setattr(token_floor, "PIECE_CHARS", piece)
    tokenizer, floor = family(name, tiny_model)
    stand_in, literal = "\U00100000", "<|im_start|>"
    marked = text.replace(" ", stand_in)
    most = count(tokenizer, marked.replace(stand_in, literal))
    assert floor.over(marked, most, lambda part: part.replace(stand_in, literal)) is None


LONG = {"prose": "The quick brown fox of 1984 jumps over\n\tthe lazy dog. " * 3_000, "no space": "a1" * 60_000}
CHINESE = "语言模型" * 20_000
"""Only for vocabularies of bytes: a run of characters that are in no string counts as one."""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(pytest.param(name, text, id=f"{name}, {kind}") for name in FAMILIES for kind, text in LONG.items()),
        *(pytest.param(name, CHINESE, id=f"{name}, Chinese") for name in BYTEWISE),
    ],
)
def test_a_text_of_twice_the_tokens_is_taken_for_too_long(tiny_model: Path, name: str, text: str) -> None:
    tokenizer, floor = family(name, tiny_model)
    tokens = count(tokenizer, text)
    over = floor.over(text, tokens // 2)
    assert over is not None
    assert tokens // 2 < over <= tokens


def test_a_text_is_cut_before_no_character_that_may_be_joined() -> None:
    """By Unicode's tables: the second of two characters that become one, and all that change their order."""
    for character in map(chr, range(0x110000)):
        parts = unicodedata.decomposition(character).split()
        second = chr(int(parts[1], 16)) if len(parts) == 2 and parts[0][0] != "<" else None
        assert second is None or not token_floor._STARTS.match(second)
        assert not (unicodedata.combining(character) and token_floor._STARTS.match(character))


@pytest.mark.parametrize("text", ["many words ", "🙂👩\u200d🔬 ", "ไทย", "नमस्ते", "العربية"])
def test_no_more_of_a_text_is_read_than_is_needed_to_be_sure(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """4 MB of emoji were one piece, which took 2 s and 500 MB."""
    _, floor = family("gpt2", tiny_model)
    pieces = token_floor._pieces
    read: list[int] = []

    def counted(text: str) -> Any:
        for piece in pieces(text):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(token_floor, "_pieces", counted)
    assert floor.over(text * 200_000, 1_000) is not None
    assert sum(read) <= 2 * token_floor.PIECE_CHARS


UNSUITABLE: dict[str, dict[str, Any]] = {
    "whitespace is dropped": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, byte_level(regex=False)],
        }
    },
    "matches are dropped": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Removed", "invert": False},
                byte_level(regex=False),
            ],
        }
    },
    "the text is stripped": {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    "runs become one": {"normalizer": {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}},
    "letters become fewer": {"normalizer": {"type": "NFKC"}},
}


@pytest.mark.parametrize("fields", UNSUITABLE.values(), ids=UNSUITABLE)
def test_there_is_no_bound_where_tokens_do_not_spell_the_text(tiny_model: Path, fields: dict[str, Any]) -> None:
    assert TokenFloor.of(changed(tiny_model, **fields)) is None


def test_there_is_no_bound_where_a_control_token_swallows_whitespace(tiny_model: Path) -> None:
    tokenizer = changed(tiny_model)
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    assert TokenFloor.of(tokenizer) is None


def test_there_is_no_bound_for_a_vocabulary_that_lacks_a_byte(tiny_model: Path) -> None:
    spec = json.loads((tiny_model / "tokenizer.json").read_text())
    del spec["model"]["vocab"]["ÿ"]
    spec["model"]["merges"] = [merge for merge in spec["model"]["merges"] if "ÿ" not in "".join(merge)]
    assert TokenFloor.of(Tokenizer.from_str(json.dumps(spec))) is None


def test_there_is_no_bound_for_other_models() -> None:
    assert TokenFloor.of(Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))) is None
