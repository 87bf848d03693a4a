"""The second encoder gives the tokenizer's own ids, and is not used where it may not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers_of_families import SENTENCEPIECE, byte_level, changed, tokenizer_of

from products import examples
from turnstile_server.rendering.encoder import TextEncoder
from turnstile_server.rendering.fast_bpe import FastBpe
from turnstile_server.rendering.vocabulary import load_vocabulary

USED = ["gpt2", "llama3", "qwen"]
EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(150)
)
WORDS = st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "def", " return", "'s", "'LL", "123", "4567", "<tag>", "://", "==", "\x00"]
)
TEXTS = st.lists(WORDS | st.text(st.characters(codec="ascii"), max_size=12), max_size=12).map("".join)


def model_of(tiny_model: Path) -> dict[str, Any]:
    model: dict[str, Any] = json.loads((tiny_model / "tokenizer.json").read_text())["model"]
    return model


@cache
def both(name: str, tiny_model: Path) -> tuple[Tokenizer, FastBpe | None]:
    tokenizer = tokenizer_of(name, tiny_model)
    return tokenizer, FastBpe.of(tokenizer)


@pytest.mark.parametrize("name", USED)
@EXAMPLES
@given(text=TEXTS)
def test_the_ids_are_the_tokenizers(tiny_model: Path, name: str, text: str) -> None:
    tokenizer, fast = both(name, tiny_model)
    assert fast is not None
    ids = fast.encode(text)
    assert ids is not None
    assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@EXAMPLES
@given(text=TEXTS, order=st.randoms(use_true_random=False))
def test_ids_need_not_be_in_the_order_of_the_merges(tiny_model: Path, text: str, order: Any) -> None:
    tokenizer, fast = shuffled(tiny_model)
    assert fast is not None
    assert fast.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[union-attr]


@cache
def shuffled(tiny_model: Path) -> tuple[Tokenizer, FastBpe | None]:
    model = model_of(tiny_model)
    size = len(model["vocab"])
    model["vocab"] = {token: size - 1 - index for token, index in model["vocab"].items()}
    tokenizer = changed(tiny_model, model=model, added_tokens=[])
    return tokenizer, FastBpe.of(tokenizer)


@given(text=st.text(min_size=1).filter(lambda text: not text.isascii()))
@EXAMPLES
def test_text_outside_ascii_is_left_to_the_tokenizer(tiny_model: Path, text: str) -> None:
    fast = both("qwen", tiny_model)[1]
    assert fast is not None
    assert fast.encode(text) is None


def test_a_long_text_is_left_to_the_tokenizer(tiny_model: Path) -> None:
    fast = both("qwen", tiny_model)[1]
    assert fast is not None
    assert fast.encode("a" * 20_000) is None


@pytest.mark.parametrize("name", ["deepseek", "prefix_space", *SENTENCEPIECE])
def test_a_tokenizer_that_splits_in_another_way_keeps_its_own(tiny_model: Path, name: str) -> None:
    assert both(name, tiny_model)[1] is None


@pytest.mark.parametrize(
    "pattern", [r"\w+|.", r"[[:alpha:]]+|\s+|[^\s]", r"a++|\s+", r"^a|\s+", r"[\p{L}&&a]+", r"(a)\1|\s+", r"\h+"]
)
def test_an_expression_with_rare_syntax_is_not_used(tiny_model: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    parts = {"type": "Sequence", "pretokenizers": [split, byte_level(regex=False)]}
    assert FastBpe.of(changed(tiny_model, pre_tokenizer=parts)) is None


def test_an_expression_that_leaves_text_out_fails_the_probe(tiny_model: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated", "invert": False}
    parts = {"type": "Sequence", "pretokenizers": [split, byte_level(regex=False)]}
    assert FastBpe.of(changed(tiny_model, pre_tokenizer=parts)) is None


def small(merges: list[str], **fields: Any) -> Tokenizer:
    """A byte-level tokenizer with these merges only."""
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    tokens = list(dict.fromkeys([*letters, *(merge.replace(" ", "") for merge in merges)]))
    model = {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    } | fields
    spec = {"version": "1.0", "added_tokens": [], "pre_tokenizer": byte_level(), "model": model}
    spec |= dict.fromkeys(("normalizer", "post_processor", "decoder", "truncation", "padding"))
    return Tokenizer.from_str(json.dumps(spec))


@pytest.mark.slow
def test_merges_that_are_no_ranks_are_not_used() -> None:
    assert FastBpe.of(small(["a b", "ab c", "b c"])) is not None
    assert FastBpe.of(small(["a b", "b c", "ab c", "c d", "a bc"])) is None, "the merges of abc lie apart"


def test_a_token_that_its_own_text_never_becomes_is_no_token() -> None:
    """`bc` comes first, so `ab c` never happens; tiktoken would merge `a` and `bc`, which spell the same token."""
    tokenizer = small(["b c", "a b", "ab c"])
    fast = FastBpe.of(tokenizer)
    assert fast is not None
    ids = fast.encode("abc xabc")
    assert ids is not None
    assert ids.tolist() == tokenizer.encode("abc xabc").ids
    assert tokenizer.token_to_id("abc") not in ids.tolist()
    assert FastBpe.of(small(["b c", "a b", "ab c"], ignore_merges=True)) is None, "a whole word abc is that token"


def test_a_run_with_text_of_a_control_token_is_refused(tiny_model: Path) -> None:
    encoder = TextEncoder(load_vocabulary(tiny_model))
    assert encoder.run("\nsome text\n") is not None
    assert encoder.run("\nsome <|im_end|> text\n") is None
