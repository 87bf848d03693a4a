"""The bytes of tokens, joined, are the text that the model wrote; a text is found in the tokens that hold it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers_of_families import BYTEWISE, SENTENCEPIECE, tokenizer_of

from turnstile_server.rendering.detokenizer import Detokenizer, TokenBytes
from turnstile_server.rendering.token_text import TokenText, shown
from turnstile_server.rendering.vocabulary import ControlToken, Vocabulary

FAMILIES = [*BYTEWISE, *SENTENCEPIECE]


def table_of(tokenizer: Tokenizer) -> TokenBytes:
    if tokenizer.decoder is None:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    control = tuple(
        ControlToken(index, token.content, token.special)
        for index, token in tokenizer.get_added_tokens_decoder().items()
        if token.content.strip()
    )
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return TokenBytes(Vocabulary(Path(), tokenizer, {}, {}, control, (), size, ""))


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_bytes_of_any_path_are_what_the_detokenizer_gives(
    tiny_model: Path, family: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(family, tiny_model)
    table = table_of(tokenizer)
    beyond = tokenizer.get_vocab_size(with_added_tokens=True) + 5
    encoded = tokenizer.encode(data.draw(st.text(max_size=20)), add_special_tokens=False).ids
    control = st.sampled_from(sorted(table.control)) if table.control else st.nothing()
    any_ids = data.draw(st.lists(st.integers(0, beyond) | control, max_size=20))
    ids = np.array(data.draw(st.permutations([encoded, any_ids]))[0] + any_ids, np.int32)
    pieces = TokenText(table).bytes_of(ids)
    detokenizer = Detokenizer(table)
    given_text = "".join(piece.text for piece in (*detokenizer.feed(ids.tolist()), *detokenizer.finish()))
    assert b"".join(pieces).decode(errors="replace") == given_text
    if family in BYTEWISE:  # the others' own decode trims the beginning of the text
        known = [index for index in ids.tolist() if tokenizer.id_to_token(index) is not None]
        assert given_text == tokenizer.decode(known, skip_special_tokens=False)
    assert [bool(piece) for piece in pieces] == [
        tokenizer.id_to_token(index) is not None for index in ids.tolist()
    ]
    assert TokenText(table).special(ids) == [index in table.control for index in ids.tolist()]


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab é🦉", max_size=60), st.text("ab é🦉", min_size=1, max_size=3), st.integers(-1, 40))
def test_found_tokens_hold_the_text_and_no_place_is_missed(
    tiny_model: Path, text: str, wanted: str, after: int
) -> None:
    tokenizer = tokenizer_of("gpt2", tiny_model)
    shower = TokenText(table_of(tokenizer))
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    pieces = shower.bytes_of(ids)
    data, needle = b"".join(pieces), wanted.encode()
    owner = [index for index, piece in enumerate(pieces) for _ in piece]
    places = [at for at in range(len(data)) if data.startswith(needle, at) and owner[at] > after]
    first_of_token = {owner[at]: at for at in reversed(places)}
    runs = [(token, owner[at + len(needle) - 1] + 1) for token, at in sorted(first_of_token.items())]
    assert list(shower.find(ids, wanted, after)) == runs


def test_a_part_of_a_character_is_shown_as_one(tiny_model: Path) -> None:
    tokenizer = tokenizer_of("gpt2", tiny_model)
    ids = np.array(tokenizer.encode("🦉", add_special_tokens=False).ids, np.int32)
    pieces = TokenText(table_of(tokenizer)).bytes_of(ids)
    assert len(pieces) > 1
    assert {shown(piece) for piece in pieces} <= {"\ufffd", "\ufffd\ufffd"}
    assert b"".join(pieces).decode() == "🦉"
