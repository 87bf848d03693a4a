"""Texts of megabytes are encoded to the same ids, without the interpreter lock, and only where they may fit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering_models import USER, ids_of
from test_token_floor import EXAMPLES, FAMILIES, TEXTS, family

from products import examples
from turnstile.models import Message, Tool
from turnstile_server.rendering import encoder as encoder_module
from turnstile_server.rendering import repeat_encoder
from turnstile_server.rendering.encoder import ControlText, TextEncoder, free_characters
from turnstile_server.rendering.protocol import PathEnd, TooManyTokens
from turnstile_server.rendering.repeat_encoder import ids_of as stock_ids
from turnstile_server.rendering.template import TemplateRenderer
from turnstile_server.rendering.vocabulary import ControlToken, load_vocabulary

PROSE = "The quick brown fox of 1984 jumps over\n\tthe lazy dog. "
Make = Callable[..., TemplateRenderer]


def longest_pause(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds that ``work`` took in a thread, and the longest time in which this thread could not go on."""
    thread = threading.Thread(target=work)
    pause = 0.0
    began = at = time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        pause, at = max(pause, now - at), now
    return time.perf_counter() - began, max(pause, time.perf_counter() - at)


def assert_others_run(work: Callable[[], object], tries: int = 5) -> None:
    """``work`` leaves the interpreter to other threads for half of its time. A busy machine can keep a thread from
    running too, but hardly each time; one that holds the interpreter does each time."""
    for _ in range(tries):
        took, pause = longest_pause(work)
        if pause < took / 2:
            return
    pytest.fail(f"the interpreter was held for {pause:.2f} of {took:.2f} s, {tries} times")


@pytest.mark.slow
def test_a_thread_goes_on_while_two_megabytes_are_encoded(tiny_model: Path) -> None:
    encoder = TextEncoder(load_vocabulary(tiny_model))
    text = PROSE * (2_000_000 // len(PROSE))
    assert_others_run(lambda: encoder.encode(text))


@pytest.mark.slow
def test_a_thread_goes_on_while_it_is_found_that_a_text_is_too_long(tiny_model: Path) -> None:
    floor = family("gpt2", tiny_model)[1]
    text = PROSE * (2_000_000 // len(PROSE))
    assert_others_run(lambda: floor.over(text, len(text)))


@pytest.mark.parametrize("name", FAMILIES)
@EXAMPLES
@given(TEXTS)
def test_ids_are_those_of_the_stock_call(tiny_model: Path, name: str, text: str) -> None:
    tokenizer, _ = family(name, tiny_model)
    assert stock_ids(tokenizer, text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_of_a_long_text_are_those_of_the_stock_call(tiny_model: Path, name: str) -> None:
    tokenizer, _ = family(name, tiny_model)
    text = (PROSE + "语言 e\u0301 <|im_start|> 🙂 \n\n  ") * 4_000
    assert stock_ids(tokenizer, text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


# Searches by slices find what a search of the whole text finds

CONTROL = ["<|a|>", "<|a|><|b|>", "<a>", "[X]", "<<", "|>"]
PIECES = st.lists(st.sampled_from([*CONTROL, "<", "|", ">", "a", " ", "\n", "é", "🙂"]), max_size=30).map("".join)
LONGEST_FIRST = re.compile("|".join(re.escape(text) for text in sorted(CONTROL, key=lambda text: -len(text))))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
@given(PIECES, st.integers(1, 12))
def test_control_text_is_found_whatever_the_slices(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setattr(encoder_module, "SLICE_CHARS", size)
    control = ControlText(ControlToken(index, literal, True) for index, literal in enumerate(CONTROL))
    spans = [match.span() for match in LONGEST_FIRST.finditer(text)]
    assert list(control.cuts(text)) == spans
    assert control.found(text) == {text[start:end] for start, end in spans}
    table = {literal: f"({index})" for index, literal in enumerate(CONTROL)}
    assert control.replace(text, table) == LONGEST_FIRST.sub(lambda match: table[match.group()], text)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(["\U00100000", r"\udbc0\udc01", r"\udbc0", r"\udc02", r"\U00100002", r"\U001", "\\", "x"])
    ).map("".join)
)
def test_a_stand_in_is_free_as_character_and_as_escape(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(encoder_module, "SLICE_CHARS", 3)
    taken = [chr(point) for point in range(0x100000, 0x100004)]
    escapes = [r"\udbc0\udc00", r"\udbc0\udc01", r"\udbc0\udc02", r"\udbc0\udc03"]
    free = [
        one
        for one, escape in zip(taken, escapes, strict=True)
        if not any(each in text for each in (one, escape, repr(one)[1:-1]))
    ]
    assert next(free_characters(text)) == free[0]


@pytest.mark.slow
def test_half_a_surrogate_pair_is_replaced_whatever_the_slices(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = TextEncoder(load_vocabulary(tiny_model))
    monkeypatch.setattr(encoder_module, "SLICE_CHARS", 3)
    assert encoder.encode("abc\ud83dde\udc00f🙂") == encoder.encode("abc\ufffdde\ufffdf🙂")


# Renderers

LONG = Message("user", PROSE * 200)
HUGE_TOOL = Tool("t", {"type": "function", "function": {"name": "t", "description": PROSE * 200}})


def encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are encoded from now on."""
    lengths: list[int] = []
    encode = repeat_encoder.ids_of

    def noted(tokenizer: Any, text: str) -> Any:
        lengths.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(repeat_encoder, "ids_of", noted)
    return lengths


@pytest.mark.parametrize("messages", [[LONG], [Message("user", "q"), Message("assistant", "a"), LONG]])
def test_a_prompt_that_surely_does_not_fit_is_not_encoded(
    renderer: Make, monkeypatch: pytest.MonkeyPatch, messages: list[Message]
) -> None:
    subject = renderer("tiny")
    rendered = subject.render(messages, [])
    assert subject.render(messages, [], most=len(rendered.ids)).ids.tolist() == rendered.ids.tolist()
    lengths = encoded_texts(monkeypatch)
    with pytest.raises(TooManyTokens) as raised:
        subject.render(messages, [], most=len(rendered.ids) // 10)
    assert len(rendered.ids) // 10 < raised.value.tokens < 2 * len(rendered.ids)
    assert max(lengths, default=0) < len(PROSE)


def test_a_continuation_that_surely_does_not_fit_is_not_encoded(
    renderer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = renderer("tiny")
    completion = ids_of(subject, "Fine.<|im_end|>")
    end = PathEnd(subject.render([USER], []).ids[-64:], completion, Message("assistant", "Fine."), "stop")
    bridge: Any = subject.bridge(end, [LONG], [])
    again: Any = subject.bridge(end, [LONG], [], most=len(bridge.context_ids))
    assert again.context_ids.tolist() == bridge.context_ids.tolist()
    lengths = encoded_texts(monkeypatch)
    with pytest.raises(TooManyTokens):
        subject.bridge(end, [LONG], [], most=10)
    assert max(lengths, default=0) < len(PROSE)


@pytest.mark.parametrize("literal", ["<|im_end|>", "think"])
def test_text_that_would_be_control_is_counted_too(renderer: Make, literal: str) -> None:
    """Stand-ins and fences are no reason to refuse a prompt that fits."""
    subject = renderer("tiny")
    messages = [Message("user", literal * 300 + "<"), Message("user", literal)]
    rendered = subject.render(messages, [])
    assert subject.render(messages, [], most=len(rendered.ids)).ids.tolist() == rendered.ids.tolist()
    with pytest.raises(TooManyTokens):
        subject.render(messages, [], most=len(rendered.ids) // 10)


def test_tools_are_counted_too(renderer: Make) -> None:
    with pytest.raises(TooManyTokens):
        renderer("tiny").render([USER], [HUGE_TOOL], most=100)
