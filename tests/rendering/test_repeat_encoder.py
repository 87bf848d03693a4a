"""Long repeats are encoded to the tokenizer's own ids, and only a little of them goes through the tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_token_floor import FAMILIES, family
from tokenizers import Tokenizer
from tokenizers_of_families import BYTEWISE, changed

from products import examples
from turnstile_server.rendering import encoder as encoder_module
from turnstile_server.rendering import repeat_encoder
from turnstile_server.rendering.encoder import TextEncoder
from turnstile_server.rendering.protocol import TooManyTokens
from turnstile_server.rendering.repeat_encoder import RepeatEncoder
from turnstile_server.rendering.repeats import PERIOD_CHARS, repeats
from turnstile_server.rendering.token_floor import TokenFloor
from turnstile_server.rendering.vocabulary import load_vocabulary

UNITS = [
    " ",
    "\n",
    "a",
    "A",
    "7",
    "#",
    "=",
    "<",
    "-=",
    "\t ",
    " \n",
    "abc",
    "acgt",
    "ab1 ",
    "語",
    "语言",
    "🙂",
    "é",
]
BETWEEN = [
    "",
    " ",
    "x",
    " the",
    "\n",
    "def f(x):\n",
    "12",
    "e\u0301",
    "\u0338",
    "<|im_end|>",
    "▁",
    "é",
    "🙂 ",
    "#\n",
]
SIZES = st.integers(1, 9_000) | st.integers(1, 60)
TEXTS = st.lists(
    st.tuples(st.sampled_from(BETWEEN), st.sampled_from(UNITS) | st.text(min_size=1, max_size=12), SIZES),
    min_size=1,
    max_size=5,
)
EXAMPLES = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(60)
)


def written(parts: list[tuple[str, str, int]]) -> str:
    return (
        "".join(between + (unit * size)[:size] for between, unit, size in parts).encode(errors="replace").decode()
    )


@cache
def encoder_of(name: str, tiny_model: Path) -> RepeatEncoder:
    return RepeatEncoder(family(name, tiny_model)[0])


@pytest.mark.parametrize("name", FAMILIES)
@EXAMPLES
@given(TEXTS)
def test_the_ids_of_a_text_with_repeats_are_those_of_the_stock_call(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: list[tuple[str, str, int]]
) -> None:
    encoder, text = encoder_of(name, tiny_model), written(parts)
    monkeypatch.setattr(repeat_encoder, "LEAST_CHARS", 2_000)
    monkeypatch.setattr(repeat_encoder, "KEPT_CHARS", 1_000)
    stock = family(name, tiny_model)[0].encode(text, add_special_tokens=False).ids
    assert encoder.encode(text).tolist() == stock


@pytest.mark.cases(16)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("unit", UNITS)
def test_little_of_a_long_repeat_goes_through_the_tokenizer(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, unit: str
) -> None:
    encoder, (tokenizer, _) = encoder_of(name, tiny_model), family(name, tiny_model)
    text = "x = 1;\n" + (unit * 100_003)[:100_003] + " the end"
    stock = tokenizer.encode(text, add_special_tokens=False).ids
    encode, lengths = repeat_encoder.ids_of, list[int]()

    def noted(tokenizer: Tokenizer, text: str) -> Any:
        lengths.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(repeat_encoder, "ids_of", noted)
    assert encoder.encode(text).tolist() == stock
    assert sum(lengths) < 40_000


@pytest.mark.parametrize("pattern", [r"a{1,100}|[^a]", r"(.)\1+|."])
def test_a_tokenizer_that_counts_far_or_looks_back_encodes_the_whole_text(tiny_model: Path, pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytewise = BYTEWISE["llama3"]["pre_tokenizer"]["pretokenizers"][1]
    fields = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytewise]}}
    tokenizer = changed(tiny_model, **fields)
    text = "a" * 50_000
    assert RepeatEncoder(tokenizer)._sizes is None
    assert RepeatEncoder(tokenizer).encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_whose_normal_form_has_other_lengths_is_encoded_whole(tiny_model: Path) -> None:
    """The places of tokens are found by counting bytes; here they lie elsewhere, although the sum is the same."""
    tokenizer = family("qwen", tiny_model)[0]
    text = "e\u0301" * 9_000 + " " * 40_000 + "a" + "\u0958" * 3_000 + "#" * 40_000
    stock = tokenizer.encode(text, add_special_tokens=False).ids
    assert RepeatEncoder(tokenizer).encode(text).tolist() == stock


NO_THREADS = """
import resource
import sys
import os
import subprocess
import sys
import threading
from pathlib import Path
from tokenizers import Tokenizer
from turnstile_server.rendering.repeat_encoder import RepeatEncoder

encoder = RepeatEncoder(Tokenizer.from_file(sys.argv[1]))
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), used + (1 << 28)))
try:
    threading.Thread(target=int).start()
except RuntimeError:
    print(encoder.encode("some text").tolist())
"""


@pytest.mark.slow
def test_a_text_is_encoded_where_no_thread_can_be_started_any_more(tiny_model: Path) -> None:
    file = str(tiny_model / "tokenizer.json")
    # The library's threads have stacks of their own size.
    environment = {**os.environ, "RUST_MIN_STACK": str(1 << 30), "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-c", NO_THREADS, file]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.stdout.strip() == str(Tokenizer.from_file(file).encode("some text").ids), done.stderr


@EXAMPLES
@given(TEXTS, st.integers(30, 2_000))
def test_every_long_repeat_is_found_and_nothing_else_is(parts: list[tuple[str, str, int]], least: int) -> None:
    text = written(parts)
    found = list(repeats(text, least))
    places = [(one.start, one.end) for one in found]
    assert places == sorted(places)
    inside = [False] * len(text)
    for one in found:
        assert one.end - one.start >= least
        assert text[one.start : one.end - PERIOD_CHARS] == text[one.start + PERIOD_CHARS : one.end]
        inside[one.start : one.end] = [True] * (one.end - one.start)
    run = 0
    for index in range(PERIOD_CHARS, len(text)):
        run = run + 1 if text[index] == text[index - PERIOD_CHARS] else 0
        if run + PERIOD_CHARS >= 2 * least:
            assert inside[index - least // 2 - PERIOD_CHARS]


@pytest.mark.parametrize("name", FAMILIES)
@EXAMPLES
@given(TEXTS)
def test_a_text_with_repeats_that_fits_is_never_taken_for_too_long(
    tiny_model: Path, name: str, parts: list[tuple[str, str, int]]
) -> None:
    tokenizer, floor = family(name, tiny_model)
    text = written(parts)
    assert floor.over(text, len(tokenizer.encode(text, add_special_tokens=False).ids)) is None


@pytest.mark.slow
def test_megabytes_of_spaces_are_encoded_where_they_fit_and_counted_where_they_do_not(tiny_model: Path) -> None:
    encoder = TextEncoder(load_vocabulary(tiny_model))
    text = f"<|im_start|>user\n{' ' * 3_000_000}x"
    ids = encoder.encode(text, most=200_000).ids
    assert 3_000_000 / 64 < len(ids) < 200_000
    assert encoder.encode(text).ids == ids
    with pytest.raises(TooManyTokens) as refused:
        encoder.encode(text, most=1_000)
    assert refused.value.tokens > 1_000


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_text_whose_caller_went_away_is_not_read_to_its_end(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = TextEncoder(load_vocabulary(tiny_model))
    read, go_on, begun = list[int](), threading.Event(), threading.Event()
    pieces = TokenFloor._without_repeats

    def noted(self: TokenFloor, piece: str) -> Any:
        read.append(len(piece))
        begun.set()
        assert go_on.wait(60)
        return pieces(self, piece)

    monkeypatch.setattr(TokenFloor, "_without_repeats", noted)
    monkeypatch.setattr(encoder_module, "SURE_BYTES", 0)
    monkeypatch.setattr(repeat_encoder, "ids_of", lambda *_: pytest.fail("it was encoded"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, lambda: encoder.encode("The end. " * 100_000, most=900_000))
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
        go_on.set()
    assert len(read) == 1
