"""The counting of ``benchmarks/exactness``: it finds what a gateway did wrong, and nothing in a right row.

Rows are strings: a character is a token, and what stands in brackets is trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from exactness.count import Call, Counts, Row, count
from exactness.gateway import merged
from exactness.plan import MODEL, Plan, Sampler, Step, logprob
from exactness.report import MARK, write


def call(name: str, prompt: str, completion: str, version: str = "v1") -> Call:
    logprobs = tuple(logprob(name, place) for place in range(len(completion)))
    ids = tuple(map(ord, completion))
    return Call(name, tuple(map(ord, prompt)), ids, logprobs, (version,) * len(ids))


FIRST = call("k1.0", "ask:", "hello")
SECOND = call("k2.0", "ask:hello/tool:", "there")
CALLS = (FIRST, SECOND)
GIVEN = {"k1.0", "k2.0"}


def row(text: str, *calls: Call, version: str | None = "v1") -> Row:
    """The logprobs of the trained characters are those of the ``calls``, one after the other."""
    known = [value for each in calls for value in each.logprobs]
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    trained = False
    for character in text:
        if character in "[]":
            trained = character == "["
            continue
        ids.append(ord(character))
        mask.append(int(trained))
        logprobs.append(known.pop(0) if trained and known else None)
    versions = tuple(version if on else None for on in mask)
    return Row(tuple(ids), tuple(mask), tuple(logprobs), versions)


WHOLE = row("ask:[hello]/tool:[there]", *CALLS)


def faults(found: Counts) -> dict[str, int]:
    names = ("wrong", "other_context", "untrained", "twice", "not_given", "logprobs_wrong")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def test_a_row_of_what_was_sampled_and_given_is_exact() -> None:
    found = count([WHOLE], CALLS, GIVEN)
    assert found.exact
    assert (found.rows, found.tokens, found.sampled, found.given, found.trained) == (1, 20, 10, 10, 10)
    assert found.versions == {"right": 10, "wrong": 0, "absent": 0}


def test_a_token_that_was_not_sampled_there_is_wrong() -> None:
    found = count([row("ask:[hallo]/tool:there", FIRST)], CALLS, GIVEN)
    # Behind the other letter, the rest has a context in which the engine sampled nothing.
    assert faults(found) == {"wrong": 4, "untrained": 4 + 5}
    assert not found.exact


def test_a_trained_token_of_the_context_is_wrong() -> None:
    found = count([row("ask[:]hello", FIRST)], (FIRST,), {"k1.0"})
    assert faults(found) == {"wrong": 1, "untrained": 5}


def test_a_completion_behind_other_ids_is_not_right() -> None:
    found = count([row("ASK:[hello]", FIRST)], (FIRST,), {"k1.0"})
    assert faults(found) == {"other_context": 5}


def test_a_completion_in_two_rows_is_trained_twice() -> None:
    found = count([row("ask:[hello]", FIRST), WHOLE], CALLS, GIVEN)
    assert faults(found) == {"twice": 5}


def test_a_given_reply_without_mask_is_untrained() -> None:
    found = count([row("ask:hello/tool:[there]", SECOND)], CALLS, GIVEN)
    assert faults(found) == {"untrained": 5}


def test_a_reply_that_nobody_got_must_not_be_trained() -> None:
    assert faults(count([WHOLE], CALLS, {"k1.0"})) == {"not_given": 5}


def test_samples_that_begin_alike_are_told_apart_by_their_ends() -> None:
    lost, kept = call("k1.0", "ask:", "hello"), call("k1.1", "ask:", "help!")
    assert faults(count([row("ask:[help!]", kept)], (lost, kept), {"k1.1"})) == {}
    assert faults(count([row("ask:[hello]", lost)], (lost, kept), {"k1.1"})) == {"untrained": 5, "not_given": 5}


def test_the_logprob_must_be_that_of_the_token() -> None:
    shifted = replace(WHOLE, logprobs=(*WHOLE.logprobs[:4], *FIRST.logprobs[1:], -1.0, *WHOLE.logprobs[9:]))
    assert faults(count([shifted], CALLS, GIVEN)) == {"logprobs_wrong": 5}


@pytest.mark.parametrize(("version", "name"), [(None, "absent"), ("v2", "wrong"), ("v1", "right")])
def test_versions_are_counted_for_each_token(version: str | None, name: str) -> None:
    found = count([row("ask:[hello]", FIRST, version=version)], (FIRST,), {"k1.0"})
    assert found.versions == {"right": 0, "wrong": 0, "absent": 0} | {name: 5}


def test_calls_are_merged_while_each_prompt_goes_on_from_all_before() -> None:
    turns = [(each.prompt, each.ids, each.logprobs) for each in CALLS]
    assert [each.ids for each in merged(turns)] == [WHOLE.ids]
    assert merged(turns)[0].mask == WHOLE.mask
    assert len(merged([turns[1], turns[0]])) == 2


def test_split_tokens_have_the_text_and_not_the_ids_of_canonical_ones() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    plan = Plan({"k1": Step(("bash",))}, split=0.4)
    sample = Sampler(tokenizer).sample(plan, "k1", 0)
    text = "".join(sample.pieces)
    canonical = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(canonical, skip_special_tokens=False) == text
    assert len(sample.ids) > len(canonical) + 5
    assert Sampler(tokenizer).sample(plan, "k1", 0) == sample
    assert Sampler(tokenizer).sample(plan, "k1", 1).content != sample.content


def test_only_what_follows_the_mark_is_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"words\n\n{MARK}\n\nold\n")
    write(page, "new")
    assert page.read_text() == f"words\n\n{MARK}\n\nnew\n"
    page.write_text("words")
    with pytest.raises(SystemExit, match="has no line"):
        write(page, "new")
